//! Which device's pool a call is for: that of the current context, if it is the device's primary context. Calls in a
//! context that the program created itself are passed on.

use super::abi::PER_THREAD;
use super::{conf, driver_table, mutation};
use crate::entry::{launched_by_run, python};
use concertina_engine::device::Device;
use concertina_engine::driver;
use concertina_engine::process::allocator::allocator_in_use;
use concertina_engine::process::settings::process_settings;
use concertina_engine::process::startup;
use concertina_engine::process::startup::start_allocator;
use concertina_engine::util::message;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Devices beyond these are left to the driver.
pub const DEVICES: usize = 64;

/// Each device's primary context, once its pool is there; else 0.
static PRIMARY: [AtomicUsize; DEVICES] = [const { AtomicUsize::new(0) }; DEVICES];
/// Whether the pool's own retain of its context was released.
static RELEASED: [AtomicBool; DEVICES] = [const { AtomicBool::new(false) }; DEVICES];
/// The last context that was found not to be a primary one.
static OTHER: AtomicUsize = AtomicUsize::new(0);
/// Whether no pool can be made in this process.
static UNUSABLE: AtomicBool = AtomicBool::new(false);

/// The calling thread's context; 0 where there is none.
#[inline]
pub fn current() -> usize {
    let mut context = 0;
    match driver_table::ask!(cuCtxGetCurrent(&mut context)) {
        0 => context,
        _ => 0,
    }
}

/// The context of a stream, for a default stream the thread's own. Where work of the context has failed,
/// or there is none, the status that says so. No question that the driver answers in this way is cheaper:
/// 20 ns, where to ask whether the stream is done takes 200 to 350 and, while the device is busy, 1700
/// (H100).
#[inline]
pub fn of_stream(stream: u64) -> Result<usize, u32> {
    let mut context = 0;
    match driver_table::ask!(cuStreamGetCtx(stream, &mut context)) {
        0 => Ok(context),
        status => Err(status),
    }
}

/// The device whose primary context this is, if it has a pool already.
#[inline]
pub fn device_of(context: usize) -> Option<&'static Device> {
    if context == 0 {
        return None;
    }
    let allocator = allocator_in_use()?;
    let mut devices = allocator.devices_in_use();
    devices.find(|device| {
        let primary = PRIMARY.get(device.ordinal() as usize);
        primary.is_some_and(|primary| primary.load(Relaxed) == context)
    })
}

/// The device of the current context, if it has a pool already.
#[inline]
pub fn current_device_in_use() -> Option<&'static Device> {
    device_of(current())
}

/// The device of the current context; its pool is made if there is none.
#[inline]
pub fn current_device() -> Option<&'static Device> {
    let context = current();
    device_of(context).or_else(|| open_pool(context))
}

/// The device of a stream's context, whose pool is made if there is none and it is the current one.
#[inline]
pub fn device_of_stream_context(context: usize, stream: u64) -> Option<&'static Device> {
    let context = match PRIMARY[0].load(Relaxed) {
        primary if mutation::is_on("context") && primary != 0 => primary,
        _ => context,
    };
    device_of(context).or_else(|| open_current(stream, context))
}

#[cold]
fn open_current(stream: u64, context: usize) -> Option<&'static Device> {
    match stream <= PER_THREAD || context == current() {
        true => open_pool(context),
        false => None,
    }
}

/// Makes the pool of the device whose primary context is the current one, `context`.
#[cold]
fn open_pool(context: usize) -> Option<&'static Device> {
    if context == 0 || UNUSABLE.load(Relaxed) || OTHER.load(Relaxed) == context {
        return None;
    }
    let ordinal = primary_of(context);
    if ordinal.is_none() {
        OTHER.store(context, Relaxed);
    }
    let ordinal = ordinal?;
    let primary = PRIMARY.get(ordinal as usize)?;
    // Where the driver is too old for the pool, or there is none, the program runs as without it.
    if allocator_in_use().is_none()
        && let Err(why) = driver::cuda()
    {
        conf::choose_variables();
        if process_settings().verbose {
            message::print(&format!("not on: {why}"));
        }
        UNUSABLE.store(true, Relaxed);
        return None;
    }
    startup::initialize();
    python::schedule_exit_hook();
    launched_by_run::check_first_use();
    conf::choose_variables();
    let allocator = start_allocator()?;
    let device = allocator.device(ordinal).ok()?;
    if !RELEASED[ordinal as usize].swap(true, Relaxed) {
        // The pool holds the context, so it would outlive the program's last release of it.
        driver_table::ask!(cuDevicePrimaryCtxRelease_v2(ordinal));
    }
    if device.context() != context {
        OTHER.store(context, Relaxed);
        return None;
    }
    primary.store(context, Relaxed);
    Some(device)
}

/// The device whose primary context is the current one, `context`.
fn primary_of(context: usize) -> Option<i32> {
    let (mut device, mut flags, mut active, mut primary) = (0, 0, 0, 0);
    if driver_table::ask!(cuCtxGetDevice(&mut device)) != 0
        || driver_table::ask!(cuDevicePrimaryCtxGetState(device, &mut flags, &mut active)) != 0
        || active == 0
        || driver_table::ask!(cuDevicePrimaryCtxRetain(&mut primary, device)) != 0
    {
        return None;
    }
    driver_table::ask!(cuDevicePrimaryCtxRelease_v2(device));
    (primary == context).then_some(device)
}

/// A device's primary context, where anybody has it.
pub fn primary(device: i32) -> Option<usize> {
    let mut primary = 0;
    if !is_active(device) || driver_table::ask!(cuDevicePrimaryCtxRetain(&mut primary, device)) != 0
    {
        return None;
    }
    driver_table::ask!(cuDevicePrimaryCtxRelease_v2(device));
    Some(primary)
}

/// Whether anybody has a device's primary context, by the device's number.
pub fn is_active(device: i32) -> bool {
    let (mut flags, mut active) = (0, 1);
    driver_table::ask!(cuDevicePrimaryCtxGetState(device, &mut flags, &mut active)) != 0
        || active != 0
}

/// The pool of a device, by its number, if its primary context is in use.
pub fn pool_of(device: i32) -> Option<&'static Device> {
    device_of(PRIMARY.get(device as usize)?.load(Relaxed))
}
