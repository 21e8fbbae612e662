//! Page-locked and managed memory.

use crate::call::{call, check_output, write_output};
use crate::failure::Function;
use crate::memory::AllocationKind;
use cudarc::driver::sys::{CUdeviceptr, CUresult};
use std::ffi::{c_uint, c_void};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Page-locked host memory, which devices reach at the same address.
pub unsafe extern "C" fn cuMemHostAlloc(to: *mut *mut c_void, bytes: usize, flags: c_uint) -> u32 {
    call(Function::cuMemHostAlloc, |session| {
        let device = session.state.device()?;
        check_output(to)?;
        if flags > 7 {
            return Err(INVALID);
        }
        let found = session
            .state
            .memory
            .allocate_locked(bytes as u64, device, flags)?;
        // SAFETY: the module's contract.
        unsafe { write_output(to, found as *mut c_void) }
    })
}

/// Page-locked host memory without flags.
pub unsafe extern "C" fn cuMemAllocHost_v2(to: *mut *mut c_void, bytes: usize) -> u32 {
    call(Function::cuMemAllocHost_v2, |session| {
        session.state.outside_capture("cuMemAllocHost")?;
        let device = session.state.device()?;
        check_output(to)?;
        let found = session
            .state
            .memory
            .allocate_locked(bytes as u64, device, 0)?;
        // SAFETY: the module's contract.
        unsafe { write_output(to, found as *mut c_void) }
    })
}

/// Frees page-locked memory, after all work of its device.
pub unsafe extern "C" fn cuMemFreeHost(address: *mut c_void) -> u32 {
    call(Function::cuMemFreeHost, |session| {
        session.state.outside_capture("cuMemFreeHost")?;
        session.state.device()?;
        let (start, locked) = session
            .state
            .memory
            .locked_at(address as u64)
            .ok_or(INVALID)?;
        if start != address as u64 || locked.registered {
            return Err(INVALID);
        }
        session.synchronise_device(locked.device)?;
        session.state.memory.unlock(start, false)
    })
}

/// Makes memory of the program's own known to the driver.
pub unsafe extern "C" fn cuMemHostRegister_v2(
    address: *mut c_void,
    bytes: usize,
    flags: c_uint,
) -> u32 {
    call(Function::cuMemHostRegister_v2, |session| {
        let device = session.state.device()?;
        session
            .state
            .memory
            .lock(address as u64, bytes as u64, device, flags)
    })
}

/// Ends a registration, after all work of its device.
pub unsafe extern "C" fn cuMemHostUnregister(address: *mut c_void) -> u32 {
    call(Function::cuMemHostUnregister, |session| {
        let device = session.state.device()?;
        session.synchronise_device(device)?;
        session.state.memory.unlock(address as u64, true)
    })
}

/// Where devices reach page-locked memory: at the same address.
pub unsafe extern "C" fn cuMemHostGetDevicePointer_v2(
    to: *mut CUdeviceptr,
    address: *mut c_void,
    flags: c_uint,
) -> u32 {
    call(Function::cuMemHostGetDevicePointer_v2, |session| {
        session.state.device()?;
        if flags != 0 || session.state.memory.locked_at(address as u64).is_none() {
            return Err(INVALID);
        }
        // SAFETY: the module's contract.
        unsafe { write_output(to, address as u64) }
    })
}

/// The flags that page-locked memory was made with.
pub unsafe extern "C" fn cuMemHostGetFlags(flags: *mut c_uint, address: *mut c_void) -> u32 {
    call(Function::cuMemHostGetFlags, |session| {
        session.state.device()?;
        let (_, locked) = session
            .state
            .memory
            .locked_at(address as u64)
            .ok_or(INVALID)?;
        // SAFETY: the module's contract.
        unsafe { write_output(flags, locked.flags) }
    })
}

/// Memory that the host and all devices reach; it counts as the current device's.
pub unsafe extern "C" fn cuMemAllocManaged(
    to: *mut CUdeviceptr,
    bytes: usize,
    flags: c_uint,
) -> u32 {
    call(Function::cuMemAllocManaged, |session| {
        let device = session.state.device()?;
        check_output(to)?;
        if !matches!(flags, 1 | 2 | 4) {
            return Err(INVALID);
        }
        session.state.outside_capture("cuMemAllocManaged")?;
        let found = session
            .state
            .memory
            .allocate(device, bytes as u64, AllocationKind::Managed)?;
        // SAFETY: the module's contract.
        unsafe { write_output(to, found) }
    })
}
