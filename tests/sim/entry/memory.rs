//! The driver's own allocations.

use crate::call::{call, give, wanted};
use crate::context;
use crate::failure::Function;
use cudarc::driver::sys::{CUdeviceptr, CUresult, CUstreamCaptureMode};

/// Free and total physical memory of the current device.
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> u32 {
    call(Function::cuMemGetInfo_v2, |session| {
        let device = session.state.device()?;
        let all = session.state.config.memory;
        wanted(total)?;
        // SAFETY: the module's contract.
        unsafe {
            give(free, (all - session.state.memory.used(device)) as usize)?;
            give(total, all as usize)
        }
    })
}

/// Allocates memory on the current device, aligned to 512 bytes.
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) -> u32 {
    call(Function::cuMemAlloc_v2, |session| {
        let device = session.state.device()?;
        wanted(address)?;
        // A thread in relaxed mode may allocate while a stream captures.
        if context::capture_mode() != CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32 {
            session.state.outside_capture("cuMemAlloc")?;
        }
        session.state.healthy(device)?;
        let found = session.state.memory.allocate(device, bytes as u64)?;
        // SAFETY: the module's contract.
        unsafe { give(address, found) }
    })
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
        session.state.check_unmap("cuMemFree", mapping);
        session.state.memory.free(address)
    })
}
