//! Streams in capture, as far as somebody sees them begin and end.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static STREAMS: AtomicUsize = AtomicUsize::new(0);

/// Says how many streams of the process are being captured. While there is one no device is asked or
/// waited for, from whichever thread: an event on the whole context would end the capture.
pub fn announce(streams: usize) {
    STREAMS.store(streams, Relaxed);
}

/// Whether any stream is known to be in capture. One relaxed load.
#[inline]
pub fn is_on() -> bool {
    STREAMS.load(Relaxed) > 0
}
