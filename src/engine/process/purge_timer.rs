//! The thread that purges idle memory if `idle_release_ms` is set.
//!
//! It purges every device [`external_cache::CHECKS`] times in that time, and holds a device's lock for about
//! a millisecond at most. It stops before the driver does: functions registered with `atexit` run in the
//! reverse order of their registration, and the driver was initialised first. A forked child has no such
//! thread, and needs none, as it has no memory.

use crate::device::external_cache;
use crate::process::allocator::Allocator;
use crate::util::fork;
use crate::util::message;
use crate::util::thread;
use parking_lot::Mutex;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Held while a device is purged. True once the process is ending.
static ENDING: Mutex<bool> = Mutex::new(false);

/// How long the end of the process waits for the thread to release the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Starts the thread if the allocator's settings ask for it and it does not run yet.
pub fn start(allocator: &'static Allocator) {
    static STARTED: AtomicBool = AtomicBool::new(false);
    let timeout = allocator.settings().idle_release;
    if timeout.is_zero() || STARTED.swap(true, Ordering::Relaxed) {
        return;
    }
    if !allocator.settings().expandable_segments {
        message::print("idle_release_ms has no effect with expandable_segments:False");
        return;
    }
    // SAFETY: the function stays, as the library is never unloaded.
    unsafe { libc::atexit(end) };
    if !thread::start(move || _ = purge_until_exit(allocator, timeout)) {
        message::print("idle_release_ms has no effect: no thread could be started");
    }
}

/// Runs at exit.
extern "C" fn end() {
    // A child may have been forked while the lock was held.
    if !fork::in_forked_child()
        && let Some(mut ending) = ENDING.try_lock_for(LOCK_TIMEOUT)
    {
        *ending = true;
    }
}

/// Calls `work`, which the end of the process waits for; `None` once the process is ending.
fn unless_ending<T>(work: impl FnOnce() -> T) -> Option<T> {
    let ending = ENDING.lock();
    (!*ending).then(work)
}

/// The thread. Returns when the process is ending.
fn purge_until_exit(allocator: &Allocator, timeout: Duration) -> Option<Infallible> {
    allocator.functions().relax_capture_mode();
    let start = Instant::now();
    loop {
        sleep((timeout / external_cache::CHECKS).max(Duration::from_millis(1)));
        unless_ending(external_cache::purge)?;
        for device in allocator.devices_in_use() {
            // A millisecond at a time: the end of the process need not wait for all of it.
            while unless_ending(|| device.purge_idle(start.elapsed(), timeout))? {}
        }
    }
}
