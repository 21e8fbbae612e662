//! The driver's own allocations.

use crate::call::{call, check_output, write_output};
use crate::context;
use crate::failure::Function;
use crate::memory::AllocationKind;
use crate::run::Session;
use crate::state::DriverResult;
use cudarc::driver::sys::{CUdeviceptr, CUresult, CUstreamCaptureMode};
use std::ffi::c_uint;

/// Free and total physical memory of the current device.
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32 {
    call(Function::cuMemGetInfo_v2, |session| {
        let device = session.state.device()?;
        let all = session.state.config.memory;
        check_output(total)?;
        // SAFETY: the module's contract.
        unsafe {
            write_output(free, (all - session.state.memory.used(device)) as usize)?;
            write_output(total, all as usize)
        }
    })
}

/// Allocates memory on the current device, aligned to 512 bytes.
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) -> u32 {
    call(Function::cuMemAlloc_v2, |session| {
        let device = session.state.device()?;
        check_output(address)?;
        allocating(session, device, "cuMemAlloc")?;
        let found = session
            .state
            .memory
            .allocate(device, bytes as u64, AllocationKind::Device)?;
        note_owner(session, found);
        // SAFETY: the module's contract.
        unsafe { write_output(address, found) }
    })
}

/// Notes that an allocation belongs to the current context, if that is one that the program made.
fn note_owner(session: &mut Session<'_>, address: u64) {
    let state = &mut *session.state;
    if let Some(number) = context::current(state.machine).filter(|it| *it >= context::DEVICES) {
        state.owned.insert(address, number);
    }
}

/// Frees an allocation, after all work of its device.
pub unsafe extern "C" fn cuMemFree_v2(address: CUdeviceptr) -> u32 {
    call(Function::cuMemFree_v2, |session| {
        session.state.device()?;
        session.state.outside_capture("cuMemFree")?;
        if address == 0 {
            return Ok(());
        }
        let found = session.state.memory.allocation(address);
        let (_, device) = found.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        session.synchronise_device(device)?;
        // Looked up again: a host function may have let other threads in.
        let found = session.state.memory.allocation(address);
        let (mapping, _) = found.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        session.state.owned.remove(&address);
        session.state.check_unmap("cuMemFree", mapping);
        session.state.memory.free(address)
    })
}

/// Allocates rows that start 512 bytes apart or a multiple of it.
pub unsafe extern "C" fn cuMemAllocPitch_v2(
    address: *mut CUdeviceptr,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> u32 {
    call(Function::cuMemAllocPitch_v2, |session| {
        let device = session.state.device()?;
        check_output(address)?;
        check_output(pitch)?;
        let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
        if !matches!(element, 4 | 8 | 16) || width == 0 || height == 0 {
            return Err(invalid);
        }
        allocating(session, device, "cuMemAllocPitch")?;
        let row = width.checked_next_multiple_of(512).ok_or(invalid)?;
        let bytes = row
            .checked_mul(height)
            .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let memory = &mut session.state.memory;
        let found = memory.allocate(device, bytes as u64, AllocationKind::Device)?;
        note_owner(session, found);
        // SAFETY: the module's contract.
        unsafe {
            write_output(pitch, row)?;
            write_output(address, found)
        }
    })
}

/// That memory may be allocated on a device by this thread now.
fn allocating(session: &mut Session<'_>, device: usize, function: &str) -> DriverResult {
    // A thread in relaxed mode may allocate while a stream captures.
    if context::capture_mode() != CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32 {
        session.state.outside_capture(function)?;
    }
    session.state.check_not_faulted(device)
}
