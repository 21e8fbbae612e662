//! Streams in capture, as far as somebody sees them begin and end, and the calls that a capture forbids.
//!
//! An event on a whole context ends every capture of the context, in whatever mode, and so does a wait for
//! it (`cuCtxRecordEvent`, `cuCtxSynchronize`). Who sees captures begin says so before the driver is asked
//! to, and waits for the calls of that kind that are under way; these are short and wait for nothing. Where
//! captures begin unseen no such call is ever made.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Captures under way, or about to begin.
static CAPTURES: AtomicUsize = AtomicUsize::new(0);

/// Threads in a call that would end a capture.
static CALLS: AtomicUsize = AtomicUsize::new(0);

/// Captures may begin that nobody announces.
static UNSEEN: AtomicBool = AtomicBool::new(false);

/// How long a capture waits for such calls. The driver may hold one up where a stream's queue is full.
const LONGEST: Duration = Duration::from_millis(200);

/// A capture is about to begin. Returns when no call is under way that would end it.
pub fn begin() {
    CAPTURES.fetch_add(1, SeqCst);
    let began = Instant::now();
    while CALLS.load(SeqCst) > 0 && began.elapsed() < LONGEST {
        std::thread::yield_now();
    }
}

/// A capture has ended, or did not begin.
pub fn end() {
    CAPTURES.fetch_sub(1, SeqCst);
}

/// Whether any stream is known to be in capture. One relaxed load.
#[inline]
pub fn is_on() -> bool {
    CAPTURES.load(Relaxed) > 0
}

/// From now on captures may begin that nobody announces: by CUDA's own calls, in a process in which no
/// library stands between these and the driver.
pub fn expect_unseen() {
    UNSEEN.store(true, Relaxed);
}

/// Whether captures may begin that nobody announces.
pub fn are_unseen() -> bool {
    UNSEEN.load(Relaxed)
}

/// Held while a call is made that would end a capture: none begins meanwhile.
pub struct NoCapture(());

impl NoCapture {
    /// `None` where a stream is being captured, or may be.
    #[inline]
    pub fn hold() -> Option<NoCapture> {
        if are_unseen() {
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
