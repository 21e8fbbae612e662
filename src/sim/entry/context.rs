//! Contexts: a primary one for each device, retained and released, and those that a program makes;
//! current per thread. A made context differs from its device's primary one in what it owns: memory
//! that was allocated while it was current. Streams and events are its device's.

use super::device::device;
use crate::call::{call, check_output, write_output};
use crate::context;
use crate::failure::Function;
use crate::run::Session;
use crate::state::DriverResult;
use cudarc::driver::sys::{CUcontext, CUdevice, CUlimit, CUresult};
use std::ffi::{c_int, c_uint, c_ulonglong};

/// Contexts' handles start here and lie this far apart: they look like addresses.
const FIRST_HANDLE: u64 = 0x5c70_0000_0000;
const HANDLE_STEP: u64 = 0x1000;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_CONTEXT;

/// The handle of a context by its number, which is the device's for a primary one.
pub(super) fn handle(number: usize) -> CUcontext {
    (FIRST_HANDLE + number as u64 * HANDLE_STEP) as CUcontext
}

/// The number of a context that lives.
fn number_of(session: &Session<'_>, context: CUcontext) -> DriverResult<usize> {
    let distance = (context as u64).checked_sub(FIRST_HANDLE).ok_or(INVALID)?;
    let number = (distance / HANDLE_STEP) as usize;
    match distance.is_multiple_of(HANDLE_STEP) && session.state.context_exists(number) {
        true => Ok(number),
        false => Err(INVALID),
    }
}

/// The device of a context that lives.
pub(super) fn device_of(session: &Session<'_>, context: CUcontext) -> DriverResult<usize> {
    Ok(number_of(session, context)? % context::DEVICES)
}

/// Makes a context of a device, and makes it current.
pub unsafe extern "C" fn cuCtxCreate_v2(to: *mut CUcontext, _flags: c_uint, of: CUdevice) -> u32 {
    call(Function::cuCtxCreate_v2, |session| {
        let device = device(session, of)?;
        check_output(to)?;
        let state = &mut *session.state;
        state.ever_made += 1;
        let number = state.ever_made * context::DEVICES + device;
        state.made.insert(number);
        context::push(state.machine, number);
        // SAFETY: the module's contract.
        unsafe { write_output(to, handle(number)) }
    })
}

/// Ends a context that was made, and takes it from the calling thread if it is current there. Its
/// memory goes with it.
pub unsafe extern "C" fn cuCtxDestroy_v2(which: CUcontext) -> u32 {
    call(Function::cuCtxDestroy_v2, |session| {
        let number = number_of(session, which)?;
        if number < context::DEVICES {
            return Err(INVALID);
        }
        let _ = session.synchronise_device(number % context::DEVICES);
        let state = &mut *session.state;
        let owned = state.owned.iter().filter(|(_, owner)| **owner == number);
        for address in owned.map(|(address, _)| *address).collect::<Vec<_>>() {
            state.owned.remove(&address);
            state.memory.free(address)?;
        }
        state.made.remove(&number);
        if context::current(state.machine) == Some(number) {
            context::pop(state.machine);
        }
        Ok(())
    })
}

/// Makes or keeps a device's context.
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(to: *mut CUcontext, of: CUdevice) -> u32 {
    call(Function::cuDevicePrimaryCtxRetain, |session| {
        let device = device(session, of)?;
        check_output(to)?;
        session.state.devices[device].retained += 1;
        // SAFETY: the module's contract.
        unsafe { write_output(to, handle(device)) }
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
            end(session, device)?;
        }
        Ok(())
    })
}

/// Takes along what belongs to a device's context.
fn end(session: &mut Session<'_>, device: usize) -> DriverResult {
    // A sticking error does not keep the context alive.
    let _ = session.synchronise_device(device);
    let state = &mut *session.state;
    for slot in state.streams.created(device) {
        state.destroy_stream(slot);
    }
    let events = state
        .events
        .iter()
        .filter(|(_, event)| event.device == device);
    for event in events.map(|(index, _)| index).collect::<Vec<_>>() {
        state.events.remove(event);
    }
    for address in state.memory.allocations(device) {
        if state.owned.contains_key(&address) {
            continue;
        }
        state.memory.free(address)?;
    }
    for address in state.memory.locked_allocations(device) {
        state.memory.unlock(address, false)?;
    }
    state.devices[device].fault = None;
    state.devices[device].peers = 0;
    state.devices[device].pool = None;
    Ok(())
}

/// Ends a device's context whoever holds it. It is made anew when it is next retained or used.
pub unsafe extern "C" fn cuDevicePrimaryCtxReset_v2(of: CUdevice) -> u32 {
    call(Function::cuDevicePrimaryCtxReset_v2, |session| {
        let device = device(session, of)?;
        session.state.outside_capture("cuDevicePrimaryCtxReset")?;
        end(session, device)?;
        session.state.devices[device].retained = 0;
        Ok(())
    })
}

/// The flags of a device's context, which are none, and whether it exists.
pub unsafe extern "C" fn cuDevicePrimaryCtxGetState(
    of: CUdevice,
    flags: *mut c_uint,
    active: *mut c_int,
) -> u32 {
    call(Function::cuDevicePrimaryCtxGetState, |session| {
        let device = device(session, of)?;
        check_output(active)?;
        // SAFETY: the module's contract.
        unsafe {
            write_output(flags, session.state.devices[device].flags)?;
            write_output(
                active,
                c_int::from(session.state.devices[device].retained > 0),
            )
        }
    })
}

/// Sets the flags of a device's context.
pub unsafe extern "C" fn cuDevicePrimaryCtxSetFlags_v2(of: CUdevice, flags: c_uint) -> u32 {
    call(Function::cuDevicePrimaryCtxSetFlags_v2, |session| {
        let device = device(session, of)?;
        session.state.devices[device].flags = flags;
        Ok(())
    })
}

/// The calling thread's context, null if it has none.
pub unsafe extern "C" fn cuCtxGetCurrent(to: *mut CUcontext) -> u32 {
    call(Function::cuCtxGetCurrent, |session| {
        let current = context::current(session.state.machine);
        // SAFETY: the module's contract.
        unsafe { write_output(to, current.map_or(std::ptr::null_mut(), handle)) }
    })
}

/// Replaces the calling thread's context; null takes it away.
pub unsafe extern "C" fn cuCtxSetCurrent(to: CUcontext) -> u32 {
    call(Function::cuCtxSetCurrent, |session| {
        let machine = session.state.machine;
        let number = if to.is_null() {
            None
        } else {
            Some(number_of(session, to)?)
        };
        context::pop(machine);
        if let Some(number) = number {
            context::push(machine, number);
        }
        Ok(())
    })
}

/// Puts a context on top of the calling thread's.
pub unsafe extern "C" fn cuCtxPushCurrent_v2(to: CUcontext) -> u32 {
    call(Function::cuCtxPushCurrent_v2, |session| {
        let number = number_of(session, to)?;
        context::push(session.state.machine, number);
        Ok(())
    })
}

/// Takes the calling thread's context away; the one below is current again.
pub unsafe extern "C" fn cuCtxPopCurrent_v2(to: *mut CUcontext) -> u32 {
    call(Function::cuCtxPopCurrent_v2, |session| {
        let number = context::pop(session.state.machine).ok_or(INVALID)?;
        if !to.is_null() {
            // SAFETY: the module's contract.
            unsafe { write_output(to, handle(number))? };
        }
        Ok(())
    })
}

/// Waits for all work of the current device.
pub unsafe extern "C" fn cuCtxSynchronize() -> u32 {
    call(Function::cuCtxSynchronize, |session| {
        let device = session.state.device()?;
        session.state.without_capture("cuCtxSynchronize")?;
        session.synchronise_device(device)
    })
}

/// The device of the current context.
pub unsafe extern "C" fn cuCtxGetDevice(to: *mut CUdevice) -> u32 {
    call(Function::cuCtxGetDevice, |session| {
        let device = session.state.device()?;
        // SAFETY: the module's contract.
        unsafe { write_output(to, device as CUdevice) }
    })
}

/// The flags of the current context.
pub unsafe extern "C" fn cuCtxGetFlags(to: *mut c_uint) -> u32 {
    call(Function::cuCtxGetFlags, |session| {
        let device = session.state.device()?;
        // SAFETY: the module's contract.
        unsafe { write_output(to, session.state.devices[device].flags) }
    })
}

/// The version of the interface that a context was made with; null means the current one.
pub unsafe extern "C" fn cuCtxGetApiVersion(context: CUcontext, to: *mut c_uint) -> u32 {
    call(Function::cuCtxGetApiVersion, |session| {
        if !context.is_null() {
            device_of(session, context)?;
        }
        // SAFETY: the module's contract.
        unsafe { write_output(to, 3020) }
    })
}

/// A context's number; null means the current one.
pub unsafe extern "C" fn cuCtxGetId(context: CUcontext, to: *mut c_ulonglong) -> u32 {
    call(Function::cuCtxGetId, |session| {
        let device = match context.is_null() {
            true => session.state.device()?,
            false => device_of(session, context)?,
        };
        // SAFETY: the module's contract.
        unsafe { write_output(to, device as c_ulonglong + 1) }
    })
}

/// The numerically greatest and least priorities of streams; less comes first.
pub unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, most: *mut c_int) -> u32 {
    call(Function::cuCtxGetStreamPriorityRange, |session| {
        session.state.check_not_faulted(session.state.device()?)?;
        // SAFETY: the module's contract: either may be null.
        unsafe {
            if !least.is_null() {
                write_output(least, 0)?;
            }
            if !most.is_null() {
                write_output(most, crate::stream::MOST_URGENT)?;
            }
        }
        Ok(())
    })
}

/// A limit of the current context: 0 until it is set.
pub unsafe extern "C" fn cuCtxGetLimit(to: *mut usize, limit: CUlimit) -> u32 {
    call(Function::cuCtxGetLimit, |session| {
        let device = session.state.device()?;
        let limits = &session.state.devices[device].limits;
        let set = limits.get(limit as usize).copied();
        // SAFETY: the module's contract.
        unsafe { write_output(to, set.ok_or(CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT)?) }
    })
}

/// Sets a limit of the current context. It has no effect but to be read again.
pub unsafe extern "C" fn cuCtxSetLimit(limit: CUlimit, value: usize) -> u32 {
    call(Function::cuCtxSetLimit, |session| {
        let device = session.state.device()?;
        let limits = &mut session.state.devices[device].limits;
        let unsupported = CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT;
        *limits.get_mut(limit as usize).ok_or(unsupported)? = value;
        Ok(())
    })
}

/// Lets the current context use what `cuMemAlloc_v2` allocates in another device's.
pub unsafe extern "C" fn cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint) -> u32 {
    call(Function::cuCtxEnablePeerAccess, |session| {
        let device = session.state.device()?;
        let other = device_of(session, peer)?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if device == other || !session.state.config.peers {
            return Err(CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
        }
        let peers = &mut session.state.devices[device].peers;
        if *peers & 1 << other != 0 {
            return Err(CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
        }
        *peers |= 1 << other;
        Ok(())
    })
}

/// Ends what [`cuCtxEnablePeerAccess`] began.
pub unsafe extern "C" fn cuCtxDisablePeerAccess(peer: CUcontext) -> u32 {
    call(Function::cuCtxDisablePeerAccess, |session| {
        let device = session.state.device()?;
        let other = device_of(session, peer)?;
        let peers = &mut session.state.devices[device].peers;
        if *peers & 1 << other == 0 {
            return Err(CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
        }
        *peers &= !(1 << other);
        Ok(())
    })
}
