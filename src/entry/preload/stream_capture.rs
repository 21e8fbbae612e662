//! Streams that the program captures. Meanwhile allocations are passed on to the driver: they may become nodes of the
//! graph, or end the capture with the driver's error.

use super::abi::{self, Answer};
use super::{driver_table, mutation, primary_context};
use concertina_engine::device::captures;
use concertina_engine::device::thread_number;
use std::sync::{Mutex, PoisonError};

/// Streams on which a capture began and has not ended, with their contexts.
static STREAMS: Mutex<Vec<(Captured, usize)>> = Mutex::new(Vec::new());

/// A stream by its handle, and for a per-thread default stream, which all have the same, its thread.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Captured {
    stream: u64,
    thread: u64,
}

impl Captured {
    fn of(stream: u64) -> Captured {
        let thread = match stream {
            abi::PER_THREAD => thread_number(),
            _ => 0,
        };
        Captured { stream, thread }
    }
}

/// Whether any stream of the process is being captured. One relaxed load.
#[inline]
pub fn is_on() -> bool {
    captures::is_on() && !mutation::is_on("capture")
}

/// Whether this stream (by handle) is being captured.
pub fn is_captured(stream: u64) -> bool {
    let streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    let captured = Captured::of(stream);
    streams.iter().any(|(it, _)| *it == captured)
}

/// A program's function that begins a capture on a stream, and answers with the driver's status. It is
/// announced before the driver begins it, so that no call of this library ends it.
pub fn begin(stream: u64, begin: impl FnOnce() -> u32) -> Answer {
    let announced = !mutation::is_on("idle");
    if announced {
        captures::begin();
    }
    // To ask a default stream may end another's capture.
    let context = match stream <= abi::PER_THREAD {
        true => primary_context::current(),
        false => primary_context::of_stream(stream).unwrap_or(0),
    };
    let status = begin();
    if status == 0 && announced {
        let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
        streams.push((Captured::of(stream), context));
    } else if announced {
        captures::end();
    }
    Some(status)
}

/// The driver was asked to end a capture, and answered with `status`: also a capture that went wrong
/// may be over now.
pub fn end(stream: u64, status: u32) -> Answer {
    let mut capturing = 0;
    let asked = driver_table::ask!(cuStreamIsCapturing(stream, &mut capturing));
    if status == 0 || (asked == 0 && capturing == 0) {
        remove(stream);
    }
    Some(status)
}

/// A stream that is destroyed takes its capture along.
pub fn destroy(stream: u64) {
    if is_on() {
        remove(stream);
    }
}

/// A device's primary context is about to end, and every capture of its streams with it. True if there was any.
pub fn remove_device(device: i32) -> bool {
    let context = is_on().then(|| primary_context::primary(device)).flatten();
    context.is_some_and(|context| remove_all(|(_, of)| *of == context))
}

fn remove(stream: u64) {
    let captured = Captured::of(stream);
    remove_all(|(it, _)| *it == captured);
}

fn remove_all(is_over: impl Fn(&(Captured, usize)) -> bool) -> bool {
    let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    let before = streams.len();
    while let Some(at) = streams.iter().position(&is_over) {
        streams.swap_remove(at);
        captures::end();
    }
    streams.len() < before
}
