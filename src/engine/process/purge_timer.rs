//! The thread that gives idle memory back, where the settings ask for it.
//!
//! It looks at every device [`external_cache::LOOKS`] times in the time that memory may lie idle, and takes a device's lock
//! for about a millisecond at most. A forked child has no such thread, and needs none: it has no memory.
//! When the process ends the thread stops before the driver does: `atexit` functions run in the reverse
//! order of their registration, and the driver was started first.

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

/// Held while a device is looked at. True once the process is ending.
static ENDING: Mutex<bool> = Mutex::new(false);

/// How long the end of the process waits for a look to be over.
const PATIENCE: Duration = Duration::from_secs(1);

/// Starts the thread, if the allocator's settings ask for it and it does not run yet.
pub fn start(allocator: &'static Allocator) {
    static STARTED: AtomicBool = AtomicBool::new(false);
    let patience = allocator.settings().idle_release;
    if patience.is_zero() || STARTED.swap(true, Ordering::Relaxed) {
        return;
    }
    if !allocator.settings().expandable_segments {
        message::print("idle_release_ms has no effect with expandable_segments:False");
        return;
    }
    // SAFETY: the function stays, as the library is never unloaded.
    unsafe { libc::atexit(end) };
    if !thread::start(move || _ = watch(allocator, patience)) {
        message::print("idle_release_ms has no effect: no thread could be started");
    }
}

extern "C" fn end() {
    // A child may have been forked while the lock was held.
    if !fork::in_forked_child()
        && let Some(mut ending) = ENDING.try_lock_for(PATIENCE)
    {
        *ending = true;
    }
}

/// Does a piece of work, which the end of the process waits for; `None` once that has begun.
fn before_the_end<T>(work: impl FnOnce() -> T) -> Option<T> {
    let ending = ENDING.lock();
    (!*ending).then(work)
}

/// Until the process ends.
fn watch(allocator: &Allocator, patience: Duration) -> Option<Infallible> {
    allocator.functions().relax_capture_mode();
    let start = Instant::now();
    loop {
        sleep((patience / external_cache::LOOKS).max(Duration::from_millis(1)));
        before_the_end(external_cache::tend)?;
        for device in allocator.devices_in_use() {
            // A millisecond at a time: the end of the process does not wait for all of it.
            while before_the_end(|| device.purge_idle(start.elapsed(), patience))? {}
        }
    }
}
