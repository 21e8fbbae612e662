//! Streams in capture. While there is one, memory comes from the driver: an allocation may become a
//! node of the graph, or end the capture with the error that the driver gives.

use super::breaks::is_broken;
use super::{Answer, real};
use concertina_engine::runtime::capture;
use std::sync::{Mutex, PoisonError};

/// Streams, by handle, on which a capture began and has not ended.
static STREAMS: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Whether any stream of the process is being captured. One relaxed load.
#[inline]
pub fn is_on() -> bool {
    capture::is_on() && !is_broken("capture")
}

/// Whether this stream (by handle) is being captured.
pub fn holds(stream: u64) -> bool {
    let streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    streams.contains(&stream)
}

fn change(change: impl FnOnce(&mut Vec<u64>)) {
    let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    change(&mut streams);
    if !is_broken("idle") {
        capture::announce(streams.len());
    }
}

/// The driver was asked to begin a capture, and answered with `status`.
pub fn begin(stream: u64, status: u32) -> Answer {
    if status == 0 {
        change(|streams| streams.push(stream));
    }
    Some(status)
}

/// The driver was asked to end a capture, and answered with `status`: also a capture that went wrong
/// may be over now.
pub fn end(stream: u64, status: u32) -> Answer {
    let mut capturing = 0;
    let asked = real::ask!(cuStreamIsCapturing(stream, &mut capturing));
    if status == 0 || (asked == 0 && capturing == 0) {
        change(|streams| streams.retain(|it| *it != stream));
    }
    Some(status)
}

/// A stream that is destroyed takes its capture along.
pub fn destroy(stream: u64) -> Answer {
    if is_on() {
        change(|streams| streams.retain(|it| *it != stream));
    }
    None
}
