//! Stream captures under way, and the driver calls that would break them.
//!
//! An event of the whole context, or a wait for it (`cuCtxRecordEvent`, `cuCtxSynchronize`), breaks every
//! capture of the context in any mode. A hook that sees a capture start announces it with [`begin`] before
//! the driver is called, and waits there for such calls under way; these are short and wait for nothing.
//! Where captures may start unannounced no such call is ever made.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Captures under way, or about to begin.
static CAPTURES: AtomicUsize = AtomicUsize::new(0);

/// Threads in a call that would break a capture.
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// Whether captures may start unannounced.
static UNANNOUNCED: AtomicBool = AtomicBool::new(false);

/// How long [`begin`] waits for such calls: the driver may hold one up while a stream's queue is full.
const LONGEST_WAIT: Duration = Duration::from_millis(200);

/// Announces that a capture is about to start. Returns once no call is under way that would break it.
pub fn begin() {
    CAPTURES.fetch_add(1, SeqCst);
    let began = Instant::now();
    while CALLS.load(SeqCst) > 0 && began.elapsed() < LONGEST_WAIT {
        std::thread::yield_now();
    }
}

/// Announces that a capture has ended, or did not start.
pub fn end() {
    CAPTURES.fetch_sub(1, SeqCst);
}

/// Whether an announced capture is under way. One relaxed load.
#[inline]
pub fn is_on() -> bool {
    CAPTURES.load(Relaxed) > 0
}

/// From now on captures may start unannounced: in a process whose calls of the driver are not hooked.
pub fn expect_unannounced() {
    UNANNOUNCED.store(true, Relaxed);
}

/// Whether captures may start unannounced.
pub fn may_be_unannounced() -> bool {
    UNANNOUNCED.load(Relaxed)
}

/// Held during a call that would break a capture: none starts meanwhile.
pub struct NoCapture(());

impl NoCapture {
    /// `None` if a capture is, or may be, under way.
    #[inline]
    pub fn hold() -> Option<NoCapture> {
        if may_be_unannounced() {
            return None;
        }
        CALLS.fetch_add(1, SeqCst);
        let held = NoCapture(());
        (CAPTURES.load(SeqCst) == 0).then_some(held)
    }
}

impl Drop for NoCapture {
    fn drop(&mut self) {
        CALLS.fetch_sub(1, SeqCst);
    }
}
