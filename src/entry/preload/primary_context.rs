//! Which device's pool a call is for: that of the current context, if it is the device's primary one.
//! Whatever is done in a context that the program made itself is the driver's.

use super::breaks::is_broken;
use super::{Answer, driver_table, ipc_hooks, malloc_async, stream_capture, unpooled, vmm_cache};
use crate::entry::{launched_by_run, python, torch};
use concertina_engine::device::Device;
use concertina_engine::driver;
use concertina_engine::process::allocator::allocator_in_use;
use concertina_engine::process::settings::ignore_pytorch_variables;
use concertina_engine::process::settings::process_settings;
use concertina_engine::process::startup;
use concertina_engine::process::startup::start_allocator;
use concertina_engine::util::message;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering::Relaxed};

/// Handles up to this are default streams, of whatever context is current (`CU_STREAM_PER_THREAD`).
pub const PER_THREAD: u64 = 2;

/// Devices beyond these are left to the driver.
const DEVICES: usize = 64;

/// Each device's primary context, once its pool is there; else 0.
static PRIMARY: [AtomicUsize; DEVICES] = [const { AtomicUsize::new(0) }; DEVICES];
/// How often the program holds each device's primary context.
static HOLDS: [AtomicI32; DEVICES] = [const { AtomicI32::new(0) }; DEVICES];
/// The hold that a pool took on its context was let go.
static RELEASED: [AtomicBool; DEVICES] = [const { AtomicBool::new(false) }; DEVICES];
/// The last context that turned out to be none of these.
static OTHER: AtomicUsize = AtomicUsize::new(0);
/// There is no pool to be had in this process.
static HOPELESS: AtomicBool = AtomicBool::new(false);

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
pub fn known(context: usize) -> Option<&'static Device> {
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
pub fn known_device() -> Option<&'static Device> {
    known(current())
}

/// The device of the current context; its pool is made if there is none.
#[inline]
pub fn device() -> Option<&'static Device> {
    let context = current();
    known(context).or_else(|| take_up(context))
}

/// The device of a stream's context, whose pool is made if there is none and it is the current one.
#[inline]
pub fn known_or_new(context: usize, stream: u64) -> Option<&'static Device> {
    let context = match PRIMARY[0].load(Relaxed) {
        primary if is_broken("context") && primary != 0 => primary,
        _ => context,
    };
    known(context).or_else(|| take_up_current(stream, context))
}

#[cold]
fn take_up_current(stream: u64, context: usize) -> Option<&'static Device> {
    match stream <= PER_THREAD || context == current() {
        true => take_up(context),
        false => None,
    }
}

/// Makes the pool of the device whose primary context is the current one, `context`.
#[cold]
fn take_up(context: usize) -> Option<&'static Device> {
    if context == 0 || HOPELESS.load(Relaxed) || OTHER.load(Relaxed) == context {
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
        choose_settings();
        if process_settings().verbose {
            message::print(&format!("not on: {why}"));
        }
        HOPELESS.store(true, Relaxed);
        return None;
    }
    startup::initialize();
    python::schedule_exit_hook();
    launched_by_run::check_first_use();
    choose_settings();
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

/// What is set for PyTorch's allocator is PyTorch's own, where that is what runs above us.
fn choose_settings() {
    if !torch::is_attached() {
        ignore_pytorch_variables();
    }
}

/// Whether the process may hold only so much, which it is to see before it has allocated anything.
pub fn is_limited() -> bool {
    choose_settings();
    let settings = process_settings();
    settings.limit.is_some() || settings.per_process_memory_fraction < 1.0
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
    known(PRIMARY.get(device as usize)?.load(Relaxed))
}

/// `cuDevicePrimaryCtxRetain`, which the driver answered with `status`.
pub fn retained(device: i32, status: u32) -> Answer {
    if status == 0
        && let Some(holds) = HOLDS.get(device as usize)
    {
        holds.fetch_add(1, Relaxed);
    }
    Some(status)
}

/// `cuDevicePrimaryCtxRelease`: with the last hold goes what was allocated in the context.
pub fn release(device: i32, release: impl FnOnce() -> u32) -> Answer {
    let holds = HOLDS.get(device as usize)?;
    if holds.load(Relaxed) != 1 {
        let status = release();
        if status == 0 {
            holds.fetch_sub(1, Relaxed);
        }
        return Some(status);
    }
    end(device, release)
}

/// `cuDevicePrimaryCtxReset`: all that was allocated in the context goes, whoever holds it.
pub fn reset(device: i32, reset: impl FnOnce() -> u32) -> Answer {
    end(device, reset)
}

/// The end of a primary context, which `end` makes: the pool gives back all it has. Where the work of
/// the context has failed that is not possible before the end, so it is done after it.
fn end(device: i32, end: impl FnOnce() -> u32) -> Answer {
    let pool = pool_of(device).filter(|_| !is_broken("reset"));
    // To wait for the context's work is an error while any of it is being captured.
    let captured = stream_capture::forget_device(device);
    let works = !captured && pool.is_some_and(|pool| pool.synchronize() == 0);
    pool.into_iter().for_each(ipc_hooks::close_all);
    pool.into_iter().for_each(malloc_async::forget_device);
    if works || pool.is_none() {
        vmm_cache::forget_all();
    }
    if works {
        pool.into_iter().for_each(|pool| pool.reset(false));
    }
    let status = end();
    if !works && status == 0 {
        pool.into_iter().for_each(|pool| pool.reset(true));
        vmm_cache::forget_all();
    }
    if status == 0 {
        unpooled::forget(device);
        if let Some(holds) = HOLDS.get(device as usize) {
            holds.store(0, Relaxed);
        }
    }
    Some(status)
}
