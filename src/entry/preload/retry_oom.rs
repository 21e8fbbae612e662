//! Retrying a driver's call that is out of memory: the pool's cached memory is returned to the driver, step by step, and
//! the call is made again.
//!
//! Without this library, memory that the program has freed is available to the driver for arrays, modules and the local
//! memory of kernels too. Here it is cached in the pool.

use super::abi::OUT_OF_MEMORY;
use super::program_calls::enter_hook;
use super::{driver_table, mutation, stream_capture, vmm_cache};
use crate::entry::panic_guard::guard;
use concertina_engine::device::Device;
use concertina_engine::process::allocator::allocator_in_use;
use std::cell::Cell;
use std::ffi::c_uint;
use std::slice;

/// On which devices a call may need memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The current one.
    CurrentDevice,
    /// Any, as its arguments say.
    AllDevices,
}

/// What is returned to the driver, step by step, until the call succeeds.
#[derive(Clone, Copy)]
enum Step {
    /// Idle memory of the current device, and cached mappings.
    Idle,
    /// Idle memory of the other devices. They are not waited for: their work may be waiting for this call.
    IdleOfOthers,
    /// Everything free on the current device, after waiting for it: stream-ordered and deferred frees. Memory freed by
    /// a strict `cudaFree` is idle, and is not waited for.
    Deferred,
}

/// Calls a function of the driver, and retries it if it is out of memory. One comparison if it is not.
#[inline(always)]
pub fn with(reach: Scope, call: impl Fn() -> u32) -> u32 {
    match call() {
        OUT_OF_MEMORY => retry_all(reach, &call),
        status => status,
    }
}

/// [`with`] for a function that overwrites `count` values of its arguments, as `cuModuleLoadDataEx` does: they are
/// restored before each retry.
pub fn with_values(reach: Scope, values: *mut usize, count: c_uint, call: impl Fn() -> u32) -> u32 {
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

/// [`with`] for a hook that has made the call once, on this device, with this `status`.
#[cold]
pub fn retry(device: &Device, status: u32, call: impl Fn() -> u32) -> u32 {
    let is_here = |it: &Device| it.ordinal() == device.ordinal();
    match status {
        OUT_OF_MEMORY => retry_after_steps(
            Scope::CurrentDevice,
            |step| release_cached(step, is_here),
            &call,
        ),
        status => status,
    }
}

#[cold]
#[inline(never)]
fn retry_all(reach: Scope, call: &dyn Fn() -> u32) -> u32 {
    let release = |step| {
        // Only for the program's own calls.
        enter_hook().is_some_and(|_inside| {
            let mut device = -1;
            let known = driver_table::ask!(cuCtxGetDevice(&mut device)) == 0;
            // Without a current device every one is meant.
            guard(false, || {
                release_cached(step, |it| !known || it.ordinal() == device)
            })
        })
    };
    retry_after_steps(reach, release, call)
}

/// Makes the call after each step, until it succeeds. Whether this thread returned anything does not count: another
/// thread may have done it for both.
fn retry_after_steps(reach: Scope, release: impl Fn(Step) -> bool, call: &dyn Fn() -> u32) -> u32 {
    let elsewhere = (reach == Scope::AllDevices).then_some(Step::IdleOfOthers);
    let steps = [Some(Step::Idle), elsewhere, Some(Step::Deferred)];
    for step in steps.into_iter().flatten() {
        if !release(step) {
            break;
        }
        match call() {
            OUT_OF_MEMORY => {}
            status => return status,
        }
    }
    OUT_OF_MEMORY
}

/// Returns cached memory to the driver. False while a stream is captured, when nothing may be unmapped or waited for.
fn release_cached(step: Step, is_here: impl Fn(&Device) -> bool) -> bool {
    if stream_capture::is_on() || mutation::is_on("room") {
        return false;
    }
    if let Step::Idle = step {
        vmm_cache::release_all();
    }
    let devices = allocator_in_use()
        .into_iter()
        .flat_map(|it| it.devices_in_use());
    for device in devices {
        match (step, is_here(device)) {
            (Step::Idle, true) | (Step::IdleOfOthers, false) => device.release_idle(),
            (Step::Deferred, true) => device.release_all(),
            _ => {}
        }
    }
    true
}
