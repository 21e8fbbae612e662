//! Room for what the driver allocates itself. Bare, what a program has freed is the driver's again, for an
//! array, a module or the local memory of a kernel as well; here the pool keeps it. So where the driver says
//! that it has none, what is kept for later goes back to it, and it is asked again.

use super::breaks::is_broken;
use super::malloc::OUT_OF_MEMORY;
use super::{driver_table, enter, guard, stream_capture, vmm_cache};
use concertina_engine::device::Device;
use concertina_engine::process::allocator::allocator_in_use;
use std::cell::Cell;
use std::ffi::c_uint;
use std::slice;

/// Whose memory a call may need.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// The current device's.
    Here,
    /// Any device's, which its arguments name.
    Anywhere,
}

/// What is given back, one after the other, until the driver has memory.
#[derive(Clone, Copy)]
enum Step {
    /// What is idle on the current device.
    Idle,
    /// The same on the others. Nothing waits for them: their work may be waiting for this call.
    IdleElsewhere,
    /// What was freed in a stream's order on the current device, and what waits there for its work. What
    /// `cudaFree` gave back is idle, unless it is relaxed: only a program that has freed otherwise waits.
    Freed,
}

/// Calls a function of the driver, and again where there was no memory. Costs one comparison where there was.
#[inline(always)]
pub fn with(reach: Reach, call: impl Fn() -> u32) -> u32 {
    match call() {
        OUT_OF_MEMORY => ask_again(reach, &call),
        status => status,
    }
}

/// The same for a function that writes over so many of the values it is given, as what loads a module does over
/// the sizes of the buffers for its messages.
pub fn with_values(reach: Reach, values: *mut usize, count: c_uint, call: impl Fn() -> u32) -> u32 {
    let kept = match values.is_null() {
        true => Vec::new(),
        // SAFETY: the program's list of so many values, which the driver would read now.
        false => unsafe { slice::from_raw_parts(values, count as usize) }.to_vec(),
    };
    let first = Cell::new(true);
    with(reach, || {
        if !first.replace(false) && !kept.is_empty() {
            // SAFETY: the same list, which the driver writes to as well.
            unsafe { slice::from_raw_parts_mut(values, kept.len()) }.copy_from_slice(&kept);
        }
        call()
    })
}

/// The same for who is inside already, and has the first answer: on one device, whatever may be missing there.
#[cold]
pub fn again(device: &Device, status: u32, call: impl Fn() -> u32) -> u32 {
    let is_here = |it: &Device| it.ordinal() == device.ordinal();
    match status {
        OUT_OF_MEMORY => after(Reach::Here, |step| give_back(step, is_here), &call),
        status => status,
    }
}

#[cold]
#[inline(never)]
fn ask_again(reach: Reach, call: &dyn Fn() -> u32) -> u32 {
    let give_back = |step| {
        // Nothing where this is none of our business.
        enter().is_some_and(|_inside| {
            let mut device = -1;
            let known = driver_table::ask!(cuCtxGetDevice(&mut device)) == 0;
            // Without a current device every one is meant.
            guard(false, || {
                give_back(step, |it| !known || it.ordinal() == device)
            })
        })
    };
    after(reach, give_back, call)
}

/// Calls after each step, as long as that is possible and there is no memory. Whether this thread gave anything
/// back does not count: another one may have done it for both.
fn after(reach: Reach, give_back: impl Fn(Step) -> bool, call: &dyn Fn() -> u32) -> u32 {
    let elsewhere = (reach == Reach::Anywhere).then_some(Step::IdleElsewhere);
    let steps = [Some(Step::Idle), elsewhere, Some(Step::Freed)];
    for step in steps.into_iter().flatten() {
        if !give_back(step) {
            break;
        }
        match call() {
            OUT_OF_MEMORY => {}
            status => return status,
        }
    }
    OUT_OF_MEMORY
}

/// Gives back. False while a stream is captured, in which nothing may be unmapped or waited for.
fn give_back(step: Step, is_here: impl Fn(&Device) -> bool) -> bool {
    if stream_capture::is_on() || is_broken("room") {
        return false;
    }
    if let Step::Idle = step {
        vmm_cache::give_back();
    }
    let devices = allocator_in_use()
        .into_iter()
        .flat_map(|it| it.devices_in_use());
    for device in devices {
        match (step, is_here(device)) {
            (Step::Idle, true) | (Step::IdleElsewhere, false) => device.release_idle(),
            (Step::Freed, true) => device.release_all(),
            _ => {}
        }
    }
    true
}
