//! Work: fills, copies and host functions.

use crate::call::call;
use crate::failure::Function;
use crate::run::Session;
use crate::state::Answer;
use crate::work::Work;
use cudarc::driver::sys::{CUdeviceptr, CUhostFn, CUresult, CUstream};
use std::ffi::{c_uint, c_void};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Enqueues to the stream of a handle, if its device is sound.
fn enqueue(session: &mut Session<'_>, name: &str, stream: CUstream, work: Work) -> Answer {
    let slot = session.state.stream(name, stream)?;
    session
        .state
        .healthy(session.state.streams.get(slot).device)?;
    if let (None, None) | (Some((_, 1..)), _) | (_, Some((_, 1..))) = work.accesses() {
        session.enqueue(slot, work, None);
    }
    Ok(())
}

/// Fills memory with a word of four bytes.
pub unsafe extern "C" fn cuMemsetD32Async(
    address: CUdeviceptr,
    value: c_uint,
    count: usize,
    stream: CUstream,
) -> u32 {
    call(Function::cuMemsetD32Async, |session| {
        if !address.is_multiple_of(4) || count > usize::MAX / 4 {
            return Err(INVALID);
        }
        let work = Work::Fill {
            to: address,
            value,
            count: count as u64,
        };
        enqueue(session, "cuMemsetD32Async", stream, work)
    })
}

/// Copies within device memory, of whichever devices.
pub unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> u32 {
    call(Function::cuMemcpyDtoDAsync_v2, |session| {
        let work = Work::Copy {
            to,
            from,
            bytes: bytes as u64,
        };
        enqueue(session, "cuMemcpyDtoDAsync", stream, work)
    })
}

/// Copies to host memory, which is written when the copy's turn comes.
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> u32 {
    call(Function::cuMemcpyDtoHAsync_v2, |session| {
        if to.is_null() && bytes > 0 {
            return Err(INVALID);
        }
        let work = Work::Read {
            to: to as usize,
            from,
            bytes: bytes as u64,
        };
        enqueue(session, "cuMemcpyDtoHAsync", stream, work)
    })
}

/// Copies from host memory, which is read at once, as the driver does with pageable memory.
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: CUdeviceptr,
    from: *const c_void,
    bytes: usize,
    stream: CUstream,
) -> u32 {
    call(Function::cuMemcpyHtoDAsync_v2, |session| {
        if bytes > 0 && from.is_null() {
            return Err(INVALID);
        }
        let bytes = match bytes {
            0 => Vec::new(),
            // SAFETY: the module's contract: so many bytes may be read.
            _ => unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.to_vec(),
        };
        enqueue(
            session,
            "cuMemcpyHtoDAsync",
            stream,
            Work::Write { to, bytes },
        )
    })
}

/// Calls a function of the host when its turn on the stream comes, on whichever thread makes the
/// stream advance.
pub unsafe extern "C" fn cuLaunchHostFunc(
    stream: CUstream,
    function: CUhostFn,
    argument: *mut c_void,
) -> u32 {
    call(Function::cuLaunchHostFunc, |session| {
        let function = function.ok_or(INVALID)?;
        let work = Work::Call {
            function,
            argument: argument as usize,
        };
        enqueue(session, "cuLaunchHostFunc", stream, work)
    })
}
