//! Streams.

use super::graph::capture_status;
use crate::call::{call, check_output, write_output};
use crate::context;
use crate::failure::Function;
use crate::graph::{Capture, Place};
use crate::run::Session;
use crate::state::DriverResult;
use crate::stream::{Kind, MOST_URGENT};
use crate::work::Work;
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUevent, CUresult, CUstream, CUstreamCallback, CUstreamCaptureMode,
};
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Creates a stream of the current device, under the handle that was destroyed last.
pub unsafe extern "C" fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> u32 {
    call(Function::cuStreamCreate, |session| {
        // SAFETY: the module's contract.
        unsafe { create(session, stream, flags, 0) }
    })
}

/// Creates a stream of some priority, which is brought into the range there is. It has no effect
/// but to be read again.
pub unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut CUstream,
    flags: c_uint,
    priority: c_int,
) -> u32 {
    call(Function::cuStreamCreateWithPriority, |session| {
        // SAFETY: the module's contract.
        unsafe { create(session, stream, flags, priority) }
    })
}

/// # Safety
/// The output is null or may be written.
unsafe fn create(
    session: &mut Session<'_>,
    stream: *mut CUstream,
    flags: c_uint,
    priority: c_int,
) -> DriverResult {
    let device = session.state.device()?;
    check_output(stream)?;
    let kind = match flags {
        0 => Kind::Blocking,
        1 => Kind::NonBlocking,
        _ => return Err(INVALID),
    };
    let state = &mut *session.state;
    let host = state.config.checks.then_some(&state.host);
    let slot = state.streams.create(device, kind, host);
    let made = state.streams.get_mut(slot);
    made.priority = priority.clamp(MOST_URGENT, 0);
    // SAFETY: the caller's promise.
    unsafe { write_output(stream, made.handle as CUstream) }
}

/// A stream's priority.
pub unsafe extern "C" fn cuStreamGetPriority(stream: CUstream, priority: *mut c_int) -> u32 {
    call(Function::cuStreamGetPriority, |session| {
        let slot = session.state.stream("cuStreamGetPriority", stream)?;
        // SAFETY: the module's contract.
        unsafe { write_output(priority, session.state.streams.get(slot).priority) }
    })
}

/// The flags that a stream was created with.
pub unsafe extern "C" fn cuStreamGetFlags(stream: CUstream, flags: *mut c_uint) -> u32 {
    call(Function::cuStreamGetFlags, |session| {
        let slot = session.state.healthy_stream("cuStreamGetFlags", stream)?;
        let kind = session.state.streams.get(slot).kind;
        // SAFETY: the module's contract.
        unsafe { write_output(flags, (kind == Kind::NonBlocking).into()) }
    })
}

/// The device of a stream.
pub unsafe extern "C" fn cuStreamGetDevice(stream: CUstream, to: *mut CUdevice) -> u32 {
    call(Function::cuStreamGetDevice, |session| {
        let slot = session.state.stream("cuStreamGetDevice", stream)?;
        // SAFETY: the module's contract.
        unsafe { write_output(to, session.state.streams.get(slot).device as CUdevice) }
    })
}

/// Ends a stream's handle; its work goes on.
pub unsafe extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> u32 {
    call(Function::cuStreamDestroy_v2, |session| {
        let slot = session.state.stream("cuStreamDestroy", stream)?;
        if (stream as u64) <= crate::stream::PER_THREAD {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        session.state.destroy_stream(slot);
        Ok(())
    })
}

/// A number that no other stream of the machine ever has, default streams included.
pub unsafe extern "C" fn cuStreamGetId(stream: CUstream, id: *mut c_ulonglong) -> u32 {
    call(Function::cuStreamGetId, |session| {
        let slot = session.state.healthy_stream("cuStreamGetId", stream)?;
        session.state.not_captured("cuStreamGetId", slot)?;
        // SAFETY: the module's contract.
        unsafe { write_output(id, session.state.streams.get(slot).id) }
    })
}

/// Whether the stream captures. Asking about the legacy stream while a blocking one captures is an
/// error, as the two would have to wait for each other.
pub unsafe extern "C" fn cuStreamIsCapturing(stream: CUstream, status: *mut c_uint) -> u32 {
    call(Function::cuStreamIsCapturing, |session| {
        let slot = session
            .state
            .healthy_stream("cuStreamIsCapturing", stream)?;
        if session.state.implicitly_captured(slot) {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        // SAFETY: the module's contract.
        unsafe { write_output(status, capture_status(session, slot) as c_uint) }
    })
}

/// The context that a stream belongs to: its device's primary one. The default streams belong to
/// the current one.
pub unsafe extern "C" fn cuStreamGetCtx(stream: CUstream, to: *mut CUcontext) -> u32 {
    call(Function::cuStreamGetCtx, |session| {
        let slot = session.state.healthy_stream("cuStreamGetCtx", stream)?;
        let owner = match stream as u64 > crate::stream::PER_THREAD {
            true => Some(session.state.streams.get(slot).device),
            false => context::current(session.state.machine),
        };
        let owner = owner.ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        // SAFETY: the module's contract.
        unsafe { write_output(to, super::context::handle(owner)) }
    })
}

/// Exchanges what the calling thread may call while a stream captures.
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode) -> u32 {
    call(Function::cuThreadExchangeStreamCaptureMode, |_| {
        check_output(mode)?;
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
        session.state.not_captured("cuStreamSynchronize", slot)?;
        let state = &mut *session.state;
        state.not_implicitly_captured("cuStreamSynchronize", slot)?;
        session.state.outside_capture("cuStreamSynchronize")?;
        session.synchronise_stream(slot)
    })
}

/// Whether all work of a stream is done.
pub unsafe extern "C" fn cuStreamQuery(stream: CUstream) -> u32 {
    call(Function::cuStreamQuery, |session| {
        let slot = session.state.stream("cuStreamQuery", stream)?;
        session.state.not_captured("cuStreamQuery", slot)?;
        session.state.outside_capture("cuStreamQuery")?;
        session.query_stream(slot)
    })
}

/// Makes later work of a stream wait for what an event stands for now.
pub unsafe extern "C" fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) -> u32 {
    call(Function::cuStreamWaitEvent, |session| {
        let slot = session.state.stream("cuStreamWaitEvent", stream)?;
        let state = &mut *session.state;
        state.not_implicitly_captured("cuStreamWaitEvent", slot)?;
        let index = session.state.event("cuStreamWaitEvent", event)?;
        if flags > 1 {
            return Err(INVALID);
        }
        let state = &mut *session.state;
        let event = state.events.get(index);
        if let Some(place) = event.and_then(|event| event.captured.clone()) {
            return wait_in_capture(session, slot, &place);
        }
        // With a flag that says so, an event from outside is a node of the graph.
        if state.streams.get(slot).capturing && flags == 0 {
            let text = "cuStreamWaitEvent during a capture for an event recorded outside it";
            state.violation(text.to_string());
            if let Some(capture) = state.streams.get(slot).capture
                && let Some(capture) = state.captures.get_mut(capture)
            {
                capture.invalid = true;
            }
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        }
        if state.record(slot, &Work::Mark) {
            return Ok(());
        }
        state.check_not_faulted(state.streams.get(slot).device)?;
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

/// A wait for an event that was recorded within a capture: the stream takes part in it from then on.
fn wait_in_capture(session: &mut Session<'_>, slot: u32, place: &Place) -> DriverResult {
    let (from, recorded) = (place.slot, place.recorded);
    let state = &mut *session.state;
    let of_place = |(_, capture): &(u32, &Capture)| capture.id == place.capture;
    let Some((index, _)) = state.captures.iter().find(of_place) else {
        // The capture is over: the event stands for nothing.
        return Err(CUresult::CUDA_ERROR_CAPTURED_EVENT);
    };
    match state.streams.get(slot).capture {
        None => state.join_capture(slot, index),
        Some(mine) if mine == index => {}
        Some(mine) => {
            for capture in [mine, index] {
                if let Some(capture) = state.captures.get_mut(capture) {
                    capture.invalid = true;
                }
            }
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE);
        }
    }
    if slot != from
        && let Some(capture) = state.captures.get_mut(index)
    {
        if let Some(other) = capture.part(from) {
            other.joined = other.joined.max(recorded);
        }
        capture.extend(slot, &place.ends);
        // Whoever waits has something to hand on in turn.
        if let Some(part) = capture.part(slot) {
            part.recorded += 1;
        }
    }
    Ok(())
}

/// Calls a function of the host with the stream and its status when its turn on the stream comes.
pub unsafe extern "C" fn cuStreamAddCallback(
    stream: CUstream,
    function: CUstreamCallback,
    argument: *mut c_void,
    flags: c_uint,
) -> u32 {
    struct Call {
        function: unsafe extern "C" fn(CUstream, CUresult, *mut c_void),
        stream: CUstream,
        argument: *mut c_void,
    }
    unsafe extern "C" fn run(call: *mut c_void) {
        // SAFETY: the box made below, which is passed here once.
        let call = unsafe { Box::from_raw(call.cast::<Call>()) };
        // SAFETY: the module's contract.
        unsafe { (call.function)(call.stream, CUresult::CUDA_SUCCESS, call.argument) };
    }
    call(Function::cuStreamAddCallback, |session| {
        let function = function.ok_or(INVALID)?;
        if flags != 0 {
            return Err(INVALID);
        }
        let slot = session.state.stream("cuStreamAddCallback", stream)?;
        session
            .state
            .check_not_faulted(session.state.streams.get(slot).device)?;
        let call = Box::new(Call {
            function,
            stream,
            argument,
        });
        let work = Work::Call {
            function: run,
            argument: Box::into_raw(call) as usize,
        };
        session.enqueue(slot, work, None);
        Ok(())
    })
}
