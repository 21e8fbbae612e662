//! What a thread has: a current device, and the last error.

use crate::driver::{Answer, Driver, INVALID_DEVICE, Pointer, driver};
use std::cell::Cell;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

thread_local! {
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
    static LAST: Cell<u32> = const { Cell::new(0) };
}

/// The status of a bug in this library.
const UNKNOWN: u32 = 999;

/// Runs a function of the runtime: its error becomes the thread's last one.
pub(crate) fn run(body: impl FnOnce() -> Answer) -> u32 {
    let status = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return 0,
        Ok(Err(status)) => status,
        Err(_) => UNKNOWN,
    };
    LAST.set(status);
    status
}

/// The last error, which stays if `keep`, and if it will not go away: after a fault the device has
/// to be reset.
pub(crate) fn last_error(keep: bool) -> u32 {
    const STICKS: [u32; 3] = [700, 716, 719];
    let last = LAST.get();
    if !keep && !STICKS.contains(&last) {
        LAST.set(0);
    }
    last
}

/// The primary contexts that this library holds, by device.
static HELD: Mutex<[Option<usize>; 64]> = Mutex::new([None; 64]);

fn held() -> std::sync::MutexGuard<'static, [Option<usize>; 64]> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A device's primary context, made if there is none.
pub(crate) fn primary(driver: &Driver, device: c_int) -> Answer<Pointer> {
    let mut held = held();
    let place = usize::try_from(device)
        .ok()
        .and_then(|index| held.get_mut(index))
        .ok_or(INVALID_DEVICE)?;
    if let Some(context) = place {
        return Ok(*context as Pointer);
    }
    let mut context = std::ptr::null_mut();
    // SAFETY: the output is a local.
    unsafe { driver.cuDevicePrimaryCtxRetain(&mut context, device) }?;
    *place = Some(context as usize);
    Ok(context)
}

/// Forgets a primary context that was reset; this thread has none after that.
pub(crate) fn forget(driver: &Driver, device: c_int) -> Answer {
    if let Some(place) = held().get_mut(device as usize) {
        *place = None;
    }
    // SAFETY: null takes the context away.
    unsafe { driver.cuCtxSetCurrent(std::ptr::null_mut()) }
}

/// The driver, with a context current: the program's own if it made one current, else the primary
/// one of this thread's device.
pub(crate) fn ready() -> Answer<&'static Driver> {
    let driver = driver()?;
    let mut context = std::ptr::null_mut();
    // SAFETY: the output is a local.
    unsafe { driver.cuCtxGetCurrent(&mut context) }?;
    if context.is_null() {
        let context = primary(driver, DEVICE.get())?;
        // SAFETY: a context that is held.
        unsafe { driver.cuCtxSetCurrent(context) }?;
    }
    Ok(driver)
}

/// The current device: that of the current context, else the one that was chosen.
pub(crate) fn device() -> Answer<c_int> {
    let driver = driver()?;
    let mut context = std::ptr::null_mut();
    // SAFETY: the output is a local.
    unsafe { driver.cuCtxGetCurrent(&mut context) }?;
    if context.is_null() {
        return Ok(DEVICE.get());
    }
    let mut device = 0;
    // SAFETY: the output is a local.
    unsafe { driver.cuCtxGetDevice(&mut device) }?;
    Ok(device)
}

/// Chooses a device and makes its primary context current.
pub(crate) fn choose(device: c_int) -> Answer {
    let driver = driver()?;
    let context = primary(driver, device)?;
    DEVICE.set(device);
    // SAFETY: a context that is held.
    unsafe { driver.cuCtxSetCurrent(context) }
}

/// The handle that means the calling thread's own stream: `cudaStreamPerThread`.
pub(crate) const OWN: Pointer = std::ptr::without_provenance_mut(2);

/// A stream as functions see it whose default stream is the calling thread's own.
pub(crate) fn own_default(stream: Pointer) -> Pointer {
    match stream.is_null() {
        true => OWN,
        false => stream,
    }
}
