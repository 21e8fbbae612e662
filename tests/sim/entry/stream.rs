//! Streams.

use crate::call::{call, give, wanted};
use crate::context;
use crate::failure::Function;
use crate::stream::Kind;
use crate::work::Work;
use cudarc::driver::sys::{
    CUcontext, CUevent, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
};
use std::ffi::{c_uint, c_ulonglong};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Creates a stream of the current device, under the handle that was destroyed last.
pub unsafe extern "C" fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> u32 {
    call(Function::cuStreamCreate, |session| {
        let device = session.state.device()?;
        wanted(stream)?;
        let kind = match flags {
            0 => Kind::Blocking,
            1 => Kind::NonBlocking,
            _ => return Err(INVALID),
        };
        let state = &mut *session.state;
        let host = state.config.checks.then_some(&state.host);
        let slot = state.streams.create(device, kind, host);
        // SAFETY: the module's contract.
        unsafe { give(stream, state.streams.get(slot).handle as CUstream) }
    })
}

/// Ends a stream's handle; its work goes on.
pub unsafe extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> u32 {
    call(Function::cuStreamDestroy_v2, |session| {
        let slot = session.state.stream("cuStreamDestroy", stream)?;
        if (stream as u64) <= crate::stream::PER_THREAD {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        let state = &mut *session.state;
        state.capturing -= usize::from(state.streams.get(slot).capturing);
        state.streams.destroy(slot);
        Ok(())
    })
}

/// A number that no other stream of the machine ever has, default streams included.
pub unsafe extern "C" fn cuStreamGetId(stream: CUstream, id: *mut c_ulonglong) -> u32 {
    call(Function::cuStreamGetId, |session| {
        let slot = session.state.stream("cuStreamGetId", stream)?;
        // SAFETY: the module's contract.
        unsafe { give(id, session.state.streams.get(slot).id) }
    })
}

/// Whether the stream captures. Asking about the legacy stream while a blocking one captures is an
/// error, as the two would have to wait for each other.
pub unsafe extern "C" fn cuStreamIsCapturing(stream: CUstream, status: *mut c_uint) -> u32 {
    call(Function::cuStreamIsCapturing, |session| {
        let slot = session.state.stream("cuStreamIsCapturing", stream)?;
        if session.state.implicitly_captured(slot) {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        let answer = match session.state.streams.get(slot).capturing {
            true => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE,
            false => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
        };
        // SAFETY: the module's contract.
        unsafe { give(status, answer as c_uint) }
    })
}

/// The context that a stream belongs to: its device's primary one. The default streams belong to
/// the current one.
pub unsafe extern "C" fn cuStreamGetCtx(stream: CUstream, to: *mut CUcontext) -> u32 {
    call(Function::cuStreamGetCtx, |session| {
        let slot = session.state.stream("cuStreamGetCtx", stream)?;
        let device = session.state.streams.get(slot).device;
        // SAFETY: the module's contract.
        unsafe { give(to, super::context::handle(device)) }
    })
}

/// Exchanges what the calling thread may call while a stream captures.
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode) -> u32 {
    call(Function::cuThreadExchangeStreamCaptureMode, |_| {
        wanted(mode)?;
        // SAFETY: the module's contract; the enum is a 32-bit number.
        unsafe {
            let number = mode.cast::<u32>();
            number.write(context::exchange_capture_mode(number.read()));
        }
        Ok(())
    })
}

/// Waits for all work of a stream.
pub unsafe extern "C" fn cuStreamSynchronize(stream: CUstream) -> u32 {
    call(Function::cuStreamSynchronize, |session| {
        let slot = session.state.stream("cuStreamSynchronize", stream)?;
        session.state.outside_capture("cuStreamSynchronize")?;
        session.synchronise_stream(slot)
    })
}

/// Whether all work of a stream is done.
pub unsafe extern "C" fn cuStreamQuery(stream: CUstream) -> u32 {
    call(Function::cuStreamQuery, |session| {
        let slot = session.state.stream("cuStreamQuery", stream)?;
        session.state.outside_capture("cuStreamQuery")?;
        session.query_stream(slot)
    })
}

/// Makes later work of a stream wait for what an event stands for now.
pub unsafe extern "C" fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) -> u32 {
    call(Function::cuStreamWaitEvent, |session| {
        let slot = session.state.stream("cuStreamWaitEvent", stream)?;
        let index = session.state.event("cuStreamWaitEvent", event)?;
        if flags > 1 {
            return Err(INVALID);
        }
        let state = &mut *session.state;
        if state.streams.get(slot).capturing {
            // No event is recorded within a capture here, so this one is from outside.
            let text = "cuStreamWaitEvent during a capture for an event recorded outside it";
            state.violation(text.to_string());
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        }
        state.healthy(state.streams.get(slot).device)?;
        let Some(event) = state.events.get(index) else {
            return Ok(());
        };
        let Some(recorded) = event.recorded else {
            return Ok(());
        };
        if state.config.checks {
            state.streams.get_mut(slot).clock.join(&event.clock);
        }
        session.enqueue(slot, Work::Mark, Some(recorded));
        Ok(())
    })
}
