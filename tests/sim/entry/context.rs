//! Contexts: one for each device, retained and released, current per thread.

use super::device::device;
use crate::call::{call, give, wanted};
use crate::context;
use crate::failure::Function;
use crate::run::Session;
use crate::state::Answer;
use cudarc::driver::sys::{CUcontext, CUdevice, CUresult};

/// Contexts' handles start here and lie this far apart: they look like addresses.
const FIRST_HANDLE: u64 = 0x5c70_0000_0000;
const HANDLE_STEP: u64 = 0x1000;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_CONTEXT;

pub(super) fn handle(device: usize) -> CUcontext {
    (FIRST_HANDLE + device as u64 * HANDLE_STEP) as CUcontext
}

/// The device of a context that is retained.
pub(super) fn device_of(session: &Session<'_>, context: CUcontext) -> Answer<usize> {
    let distance = (context as u64).checked_sub(FIRST_HANDLE).ok_or(INVALID)?;
    let device = (distance / HANDLE_STEP) as usize;
    match session.state.devices.get(device) {
        Some(found) if distance.is_multiple_of(HANDLE_STEP) && found.retained > 0 => Ok(device),
        _ => Err(INVALID),
    }
}

/// Makes or keeps a device's context.
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(to: *mut CUcontext, of: CUdevice) -> u32 {
    call(Function::cuDevicePrimaryCtxRetain, |session| {
        let device = device(session, of)?;
        wanted(to)?;
        session.state.devices[device].retained += 1;
        // SAFETY: the module's contract.
        unsafe { give(to, handle(device)) }
    })
}

/// Lets go of a device's context. With the last hold go the context's streams, events, allocations
/// and sticking error; chunks and mappings belong to the process and stay.
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(of: CUdevice) -> u32 {
    call(Function::cuDevicePrimaryCtxRelease_v2, |session| {
        let device = device(session, of)?;
        let retained = &mut session.state.devices[device].retained;
        *retained = retained.checked_sub(1).ok_or(INVALID)?;
        if *retained == 0 {
            // A sticking error does not keep the context alive.
            let _ = session.synchronise_device(device);
            let state = &mut *session.state;
            for slot in state.streams.created(device) {
                state.capturing -= usize::from(state.streams.get(slot).capturing);
                state.streams.destroy(slot);
            }
            let events = state
                .events
                .iter()
                .filter(|(_, event)| event.device == device);
            for event in events.map(|(index, _)| index).collect::<Vec<_>>() {
                state.events.remove(event);
            }
            for address in state.memory.allocations(device) {
                state.memory.free(address)?;
            }
            state.devices[device].fault = None;
        }
        Ok(())
    })
}

/// The calling thread's context, null if it has none.
pub unsafe extern "C" fn cuCtxGetCurrent(to: *mut CUcontext) -> u32 {
    call(Function::cuCtxGetCurrent, |session| {
        let current = context::current(session.state.machine);
        // SAFETY: the module's contract.
        unsafe { give(to, current.map_or(std::ptr::null_mut(), handle)) }
    })
}

/// Replaces the calling thread's context; null takes it away.
pub unsafe extern "C" fn cuCtxSetCurrent(to: CUcontext) -> u32 {
    call(Function::cuCtxSetCurrent, |session| {
        let machine = session.state.machine;
        let device = if to.is_null() {
            None
        } else {
            Some(device_of(session, to)?)
        };
        context::pop(machine);
        if let Some(device) = device {
            context::push(machine, device);
        }
        Ok(())
    })
}

/// Puts a context on top of the calling thread's.
pub unsafe extern "C" fn cuCtxPushCurrent_v2(to: CUcontext) -> u32 {
    call(Function::cuCtxPushCurrent_v2, |session| {
        let device = device_of(session, to)?;
        context::push(session.state.machine, device);
        Ok(())
    })
}

/// Takes the calling thread's context away; the one below is current again.
pub unsafe extern "C" fn cuCtxPopCurrent_v2(to: *mut CUcontext) -> u32 {
    call(Function::cuCtxPopCurrent_v2, |session| {
        let device = context::pop(session.state.machine).ok_or(INVALID)?;
        if !to.is_null() {
            // SAFETY: the module's contract.
            unsafe { give(to, handle(device))? };
        }
        Ok(())
    })
}

/// Waits for all work of the current device.
pub unsafe extern "C" fn cuCtxSynchronize() -> u32 {
    call(Function::cuCtxSynchronize, |session| {
        let device = session.state.device()?;
        session.state.outside_capture("cuCtxSynchronize")?;
        session.synchronise_device(device)
    })
}
