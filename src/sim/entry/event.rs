//! Events.

use crate::call::{call, check_output, write_output};
use crate::event::Event;
use crate::failure::Function;
use crate::graph::Place;
use crate::run::Session;
use crate::state::DriverResult;
use crate::work::Work;
use cudarc::driver::sys::{CUcontext, CUevent, CUresult, CUstream};
use std::ffi::{c_float, c_uint};

/// Creates an event of the current device.
pub unsafe extern "C" fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> u32 {
    call(Function::cuEventCreate, |session| {
        let device = session.state.device()?;
        check_output(event)?;
        // Events between processes have no times.
        if flags > 7 || flags & 6 == 4 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let index = session.state.events.insert(Event {
            device,
            timed: flags & 2 == 0,
            interprocess: flags & 4 != 0,
            ..Event::default()
        });
        // SAFETY: the module's contract.
        unsafe { write_output(event, session.state.events.handle(index) as CUevent) }
    })
}

/// Makes an event stand for all that a stream has so far.
pub unsafe extern "C" fn cuEventRecord(event: CUevent, stream: CUstream) -> u32 {
    call(Function::cuEventRecord, |session| {
        record(session, event, stream)
    })
}

/// Makes an event stand for all that a stream has so far; the flags may only say that the event is
/// from outside a capture.
pub unsafe extern "C" fn cuEventRecordWithFlags(
    event: CUevent,
    stream: CUstream,
    flags: c_uint,
) -> u32 {
    call(Function::cuEventRecordWithFlags, |session| match flags {
        0 | 1 => record(session, event, stream),
        _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    })
}

fn record(session: &mut Session<'_>, event: CUevent, stream: CUstream) -> DriverResult {
    let index = session.state.event("cuEventRecord", event)?;
    let slot = session.state.stream("cuEventRecord", stream)?;
    session
        .state
        .not_implicitly_captured("cuEventRecord", slot)?;
    let device = session.state.streams.get(slot).device;
    if session
        .state
        .events
        .get(index)
        .is_some_and(|event| event.device != device)
    {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    let state = &mut *session.state;
    if let Some(capture) = state.streams.get(slot).capture {
        let Some(capture) = state.captures.get_mut(capture) else {
            return Ok(());
        };
        let id = capture.id;
        let place = capture.part(slot).map(|part| Place {
            capture: id,
            slot,
            recorded: part.recorded,
            ends: part.ends.clone(),
        });
        if let Some(event) = state.events.get_mut(index) {
            event.captured = place;
        }
        return Ok(());
    }
    if state.streams.get(slot).capturing {
        state.outside_capture("cuEventRecord")?;
    }
    session.state.check_not_faulted(device)?;
    let state = &mut *session.state;
    let sequence = state.submit(slot, Work::Mark, None);
    if let Some(event) = state.events.get_mut(index) {
        event.recorded = Some((slot, sequence));
        event.captured = None;
        event.ordinal = state.ordinal;
        event.clock.copy(&state.streams.get(slot).clock);
    }
    session.advance(slot, sequence);
    let between = session.state.events.get(index);
    if between.is_some_and(|event| event.interprocess) {
        // Another process cannot make this one's work run.
        session.finish(slot, sequence);
    }
    Ok(())
}

/// Makes an event stand for all that the streams of a context have so far, those included that were
/// destroyed. Holds no stream up.
pub unsafe extern "C" fn cuCtxRecordEvent(context: CUcontext, event: CUevent) -> u32 {
    call(Function::cuCtxRecordEvent, |session| {
        let device = super::context::device_of(session, context)?;
        let index = session.state.event("cuCtxRecordEvent", event)?;
        session.state.without_capture("cuCtxRecordEvent")?;
        session.state.check_not_faulted(device)?;
        let state = &mut *session.state;
        if state
            .events
            .get(index)
            .is_some_and(|event| event.device != device)
        {
            return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
        }
        // A stream of nobody's gathers the ends of all others.
        let joining_stream = state.streams.joining_stream(device);
        for other in state.streams.of_device(device) {
            let (enqueued, clock) = {
                let stream = state.streams.get(other);
                (stream.enqueued, stream.clock.clone())
            };
            if !state.streams.done(other, enqueued) {
                state.submit(joining_stream, Work::Mark, Some((other, enqueued)));
            }
            if state.config.checks {
                state.streams.get_mut(joining_stream).clock.join(&clock);
            }
        }
        let state = &mut *session.state;
        let sequence = state.submit(joining_stream, Work::Mark, None);
        if let Some(event) = state.events.get_mut(index) {
            event.recorded = Some((joining_stream, sequence));
            event.captured = None;
            event.ordinal = state.ordinal;
            event.clock.copy(&state.streams.get(joining_stream).clock);
        }
        session.advance(joining_stream, sequence);
        Ok(())
    })
}

/// That an event was not recorded within a capture last: to ask about it breaks that capture.
fn not_captured(session: &mut Session<'_>, index: u32) -> DriverResult {
    let state = &mut *session.state;
    let event = state.events.get(index);
    let Some(place) = event.and_then(|event| event.captured.as_ref()) else {
        return Ok(());
    };
    for (_, capture) in state.captures.iter_mut() {
        capture.invalid |= capture.id == place.capture;
    }
    Err(CUresult::CUDA_ERROR_CAPTURED_EVENT)
}

/// Whether what the event stands for is done.
pub unsafe extern "C" fn cuEventQuery(event: CUevent) -> u32 {
    call(Function::cuEventQuery, |session| {
        let index = session.state.event("cuEventQuery", event)?;
        not_captured(session, index)?;
        session.state.outside_capture("cuEventQuery")?;
        let state = &mut *session.state;
        let Some(event) = state.events.get(index) else {
            return Ok(());
        };
        state.check_not_faulted(event.device)?;
        if event
            .recorded
            .is_some_and(|(slot, sequence)| !state.streams.done(slot, sequence))
        {
            return Err(CUresult::CUDA_ERROR_NOT_READY);
        }
        if state.config.checks && state.host.join(&event.clock) {
            state.host_version += 1;
        }
        Ok(())
    })
}

/// Waits until what the event stands for is done.
pub unsafe extern "C" fn cuEventSynchronize(event: CUevent) -> u32 {
    call(Function::cuEventSynchronize, |session| {
        let index = session.state.event("cuEventSynchronize", event)?;
        not_captured(session, index)?;
        session.state.outside_capture("cuEventSynchronize")?;
        let Some(event) = session.state.events.get(index) else {
            return Ok(());
        };
        // Taken first: while a host function runs, another thread may record it anew.
        let (device, recorded, known) = (event.device, event.recorded, event.clock.clone());
        if let Some((slot, sequence)) = recorded {
            session.finish(slot, sequence);
        }
        session.state.host_observes(&known);
        session.state.check_not_faulted(device)
    })
}

/// Ends an event; what waits for it still does.
pub unsafe extern "C" fn cuEventDestroy_v2(event: CUevent) -> u32 {
    call(Function::cuEventDestroy_v2, |session| {
        let index = session.state.event("cuEventDestroy", event)?;
        session.state.events.remove(index);
        Ok(())
    })
}

/// Milliseconds between two events: the simulated GPU has no time, so a thousandth for each piece of
/// work that was enqueued between the two.
pub unsafe extern "C" fn cuEventElapsedTime_v2(
    milliseconds: *mut c_float,
    start: CUevent,
    end: CUevent,
) -> u32 {
    call(Function::cuEventElapsedTime_v2, |session| {
        let mut ordinals = [0; 2];
        for (event, ordinal) in [start, end].into_iter().zip(&mut ordinals) {
            let index = session.state.event("cuEventElapsedTime", event)?;
            let state = &*session.state;
            let event = state.events.get(index);
            let event = event.filter(|event| event.timed);
            let event = event.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
            let (slot, sequence) = event.recorded.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
            if !state.streams.done(slot, sequence) {
                return Err(CUresult::CUDA_ERROR_NOT_READY);
            }
            *ordinal = event.ordinal;
        }
        let distance = ordinals[1] as f32 - ordinals[0] as f32;
        // SAFETY: the module's contract.
        unsafe { write_output(milliseconds, distance / 1000.0) }
    })
}
