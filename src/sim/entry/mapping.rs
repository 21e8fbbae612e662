//! Virtual memory: reservations, chunks, and mappings of one at the other.

use super::device::device;
use crate::call::{call, check_output, write_output};
use crate::failure::Function;
use crate::run::Session;
use crate::state::DriverResult;
use cudarc::driver::sys::{
    CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationProp, CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation,
    CUmemLocationType, CUresult,
};
use std::ffi::c_ulonglong;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// The device a location names.
fn located(session: &Session<'_>, location: CUmemLocation) -> DriverResult<usize> {
    if location.type_ != CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE {
        return Err(INVALID);
    }
    device(session, location.id)
}

/// The device that chunks of these properties live on.
///
/// # Safety
/// Null, or readable.
unsafe fn home(
    session: &Session<'_>,
    properties: *const CUmemAllocationProp,
) -> DriverResult<usize> {
    // SAFETY: the caller's promise.
    let properties = unsafe { properties.as_ref() }.ok_or(INVALID)?;
    if properties.type_ != CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED {
        return Err(INVALID);
    }
    located(session, properties.location)
}

/// The granularity of chunks and addresses, minimum and recommended alike.
pub unsafe extern "C" fn cuMemGetAllocationGranularity(
    granularity: *mut usize,
    properties: *const CUmemAllocationProp,
    _option: CUmemAllocationGranularity_flags,
) -> u32 {
    call(Function::cuMemGetAllocationGranularity, |session| {
        session.state.has_virtual_memory()?;
        // SAFETY: the module's contract.
        unsafe {
            home(session, properties)?;
            write_output(granularity, session.state.config.granularity as usize)
        }
    })
}

/// Reserves addresses, at the wanted ones if they are free.
pub unsafe extern "C" fn cuMemAddressReserve(
    address: *mut CUdeviceptr,
    size: usize,
    alignment: usize,
    at: CUdeviceptr,
    flags: c_ulonglong,
) -> u32 {
    call(Function::cuMemAddressReserve, |session| {
        session.state.has_virtual_memory()?;
        check_output(address)?;
        if flags != 0 {
            return Err(INVALID);
        }
        let found = session
            .state
            .memory
            .reserve(size as u64, alignment as u64, at)?;
        // SAFETY: the module's contract.
        unsafe { write_output(address, found) }
    })
}

/// Gives back a whole reservation that has nothing mapped.
pub unsafe extern "C" fn cuMemAddressFree(address: CUdeviceptr, size: usize) -> u32 {
    call(Function::cuMemAddressFree, |session| {
        session.state.has_virtual_memory()?;
        session.state.memory.unreserve(address, size as u64)
    })
}

/// Creates a chunk of physical memory.
pub unsafe extern "C" fn cuMemCreate(
    handle: *mut CUmemGenericAllocationHandle,
    size: usize,
    properties: *const CUmemAllocationProp,
    flags: c_ulonglong,
) -> u32 {
    call(Function::cuMemCreate, |session| {
        session.state.has_virtual_memory()?;
        check_output(handle)?;
        if flags != 0 {
            return Err(INVALID);
        }
        // SAFETY: the module's contract.
        let device = unsafe { home(session, properties)? };
        let created = session.state.memory.create(device, size as u64)?;
        // SAFETY: as above; `home` has looked at it.
        let (kinds, flags) = unsafe {
            (
                (*properties).requestedHandleTypes.0,
                (*properties).allocFlags,
            )
        };
        let chunk = session.state.chunk("cuMemCreate", created)?;
        if let Some(chunk) = session.state.memory.chunk_mut(chunk) {
            // `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
            chunk.exportable = kinds & 1 != 0;
            chunk.rdma = flags.gpuDirectRDMACapable != 0;
        }
        // SAFETY: the module's contract.
        unsafe { write_output(handle, created) }
    })
}

/// Gives up a chunk's handle; its memory goes with the last mapping.
pub unsafe extern "C" fn cuMemRelease(handle: CUmemGenericAllocationHandle) -> u32 {
    call(Function::cuMemRelease, |session| {
        session.state.has_virtual_memory()?;
        let chunk = session.state.chunk("cuMemRelease", handle)?;
        session.state.memory.release(chunk);
        Ok(())
    })
}

/// Maps a whole chunk at free addresses within one reservation. No device may use it yet.
pub unsafe extern "C" fn cuMemMap(
    address: CUdeviceptr,
    size: usize,
    offset: usize,
    handle: CUmemGenericAllocationHandle,
    flags: c_ulonglong,
) -> u32 {
    call(Function::cuMemMap, |session| {
        session.state.has_virtual_memory()?;
        if flags != 0 {
            return Err(INVALID);
        }
        let chunk = session.state.chunk("cuMemMap", handle)?;
        session
            .state
            .memory
            .map(address, size as u64, offset as u64, chunk)
    })
}

/// Takes away the mappings that make up exactly this range. Waits for nothing.
pub unsafe extern "C" fn cuMemUnmap(address: CUdeviceptr, size: usize) -> u32 {
    call(Function::cuMemUnmap, |session| {
        session.state.has_virtual_memory()?;
        for mapping in session.state.memory.whole_mappings(address, size as u64)? {
            session.state.check_unmap("cuMemUnmap", mapping);
            session.state.memory.unmap(mapping);
        }
        Ok(())
    })
}

/// Says which devices may use the mappings that make up exactly this range.
pub unsafe extern "C" fn cuMemSetAccess(
    address: CUdeviceptr,
    size: usize,
    access: *const CUmemAccessDesc,
    count: usize,
) -> u32 {
    call(Function::cuMemSetAccess, |session| {
        session.state.has_virtual_memory()?;
        if access.is_null() || count == 0 {
            return Err(INVALID);
        }
        // SAFETY: the module's contract: `count` descriptions that may be read.
        let access = unsafe { std::slice::from_raw_parts(access, count) };
        let mappings = session.state.memory.whole_mappings(address, size as u64)?;
        for wish in access {
            let device = located(session, wish.location)?;
            let (read, write) = match wish.flags {
                CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE => (false, false),
                CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ => (true, false),
                CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE => (true, true),
                CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_MAX => return Err(INVALID),
            };
            session.state.memory.open(&mappings, device, read, write)?;
        }
        Ok(())
    })
}
