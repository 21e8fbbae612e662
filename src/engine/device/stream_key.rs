//! Stream keys: a stream's identity by its handle and the driver's id, since the driver reuses the handles of
//! destroyed streams.

use crate::core::StreamKey;
use crate::device::context::current;
use crate::device::permanent_streams::PermanentStreams;
use crate::driver::Functions;
use crate::driver::sys::*;
use crate::util::thread::thread_number;
use std::ptr;

/// Legacy default stream and per-thread default stream, as handles (`CU_STREAM_LEGACY`,
/// `CU_STREAM_PER_THREAD` in `cuda.h`).
const LEGACY: u64 = 1;

pub const PER_THREAD: u64 = 2;

/// Stands for the id of a stream that is being captured, which the driver does not tell, unless the stream is
/// permanent and its id known. So to the pool it is another stream than before and after the capture. Two
/// streams of one handle, each captured, the first destroyed before the second was made, are one stream to
/// it; PyTorch's own streams are never destroyed.
const CAPTURED: u64 = u64::MAX;

/// The identity of a stream, given its handle. The default stream is never destroyed and needs no call; the
/// per-thread one has its thread's number as id; for others the driver is asked, but for permanent ones.
#[inline]
pub fn stream_key(
    functions: &Functions,
    context: usize,
    permanent: &PermanentStreams,
    handle: u64,
) -> StreamKey {
    match handle {
        0 | LEGACY => StreamKey { handle: 0, id: 0 },
        PER_THREAD => StreamKey {
            handle,
            id: thread_number(),
        },
        _ => {
            let known = permanent.get(handle);
            let id = known.unwrap_or_else(|| stream_id(functions, context, handle));
            StreamKey { handle, id }
        }
    }
}

/// Caches the id of a stream that is never destroyed. No effect while the stream is captured, as the driver
/// does not tell its id then.
#[cold]
pub fn add_permanent_stream(
    functions: &Functions,
    context: usize,
    permanent: &PermanentStreams,
    handle: u64,
) {
    if let Some(key) = created_stream(functions, context, handle) {
        permanent.insert(handle, key.id);
    }
}

/// A stream that exists, but for default streams; `None` while it is captured.
pub fn created_stream(functions: &Functions, context: usize, handle: u64) -> Option<StreamKey> {
    if handle <= PER_THREAD {
        return None;
    }
    match stream_id(functions, context, handle) {
        0 | CAPTURED => None,
        id => Some(StreamKey { handle, id }),
    }
}

/// The driver's id for a stream, [`CAPTURED`] while it is captured, 0 where the driver does not know it.
#[inline]
fn stream_id(functions: &Functions, context: usize, handle: u64) -> u64 {
    ask_id(functions, handle).unwrap_or_else(|| stream_id_in(functions, context, handle))
}

/// [`stream_id`] on a thread that has no context yet.
#[cold]
fn stream_id_in(functions: &Functions, context: usize, handle: u64) -> u64 {
    let _current = current(functions, context);
    ask_id(functions, handle).unwrap_or(0)
}

/// To ask a captured stream for its id would end the capture; to ask whether it is captured does not (H100,
/// driver 580, every capture mode).
#[inline]
fn ask_id(functions: &Functions, handle: u64) -> Option<u64> {
    let (mut capturing, mut id) = (0, 0);
    // SAFETY: both outlive the calls; the program vouches for the handle that it passed.
    unsafe {
        if (functions.cuStreamIsCapturing)(handle as CUstream, &mut capturing) != 0 {
            return None;
        }
        if capturing != 0 {
            return Some(CAPTURED);
        }
        ((functions.cuStreamGetId)(handle as CUstream, &mut id) == 0).then_some(id)
    }
}

/// Whether a stream is being captured; `None` if the driver does not tell, as for the default stream while a
/// stream that synchronizes with it is captured.
pub fn is_capturing(functions: &Functions, context: usize, handle: u64) -> Option<bool> {
    let _current = current(functions, context);
    let mut status = 0;
    // SAFETY: `status` outlives the call; the program is using the stream just now.
    match unsafe { (functions.cuStreamIsCapturing)(handle as CUstream, &mut status) } {
        0 => Some(status != 0),
        _ => None,
    }
}

/// The context of another device that a stream belongs to; `None` for a stream of this device, which default
/// streams count as.
pub fn foreign_context(functions: &Functions, context: usize, handle: u64) -> Option<usize> {
    if handle <= PER_THREAD {
        return None;
    }
    let _current = current(functions, context);
    let mut owner: CUcontext = ptr::null_mut();
    // SAFETY: `owner` outlives the call; the program is using the stream just now.
    let status = unsafe { (functions.cuStreamGetCtx)(handle as CUstream, &mut owner) };
    (status == 0 && owner as usize != context).then_some(owner as usize)
}
