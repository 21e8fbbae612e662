//! Pointer attributes.

use super::context::handle;
use crate::call::{call, write_output};
use crate::failure::Function;
use crate::memory::AllocationKind;
use crate::run::Session;
use crate::state::DriverResult;
use cudarc::driver::sys::{CUdeviceptr, CUmemorytype, CUpointer_attribute, CUresult};
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// What attributes are made of: host memory has no extent, unknown memory nothing at all.
struct Known {
    start: u64,
    size: u64,
    device: usize,
    id: u64,
    exportable: bool,
    rdma: bool,
    /// `None` for host memory.
    make: Option<Option<AllocationKind>>,
}

fn known(session: &Session<'_>, address: u64) -> Option<Known> {
    let memory = &session.state.memory;
    if let Some(extent) = memory.extent(address) {
        return Some(Known {
            start: extent.start,
            size: extent.size,
            device: extent.device,
            id: extent.id,
            exportable: extent.exportable,
            rdma: extent.rdma,
            make: Some(extent.make),
        });
    }
    let (start, locked) = memory.locked_at(address)?;
    Some(Known {
        start,
        size: locked.size,
        device: locked.device,
        id: start,
        exportable: false,
        rdma: false,
        make: None,
    })
}

/// Writes one attribute.
///
/// # Safety
/// `data` may be written with a value of the attribute's type.
unsafe fn attribute(
    session: &Session<'_>,
    attribute: CUpointer_attribute,
    data: *mut c_void,
    address: u64,
) -> DriverResult {
    use CUpointer_attribute::*;
    let known = known(session, address).ok_or(INVALID)?;
    let on_device = known.make.is_some();
    let managed = known.make == Some(Some(AllocationKind::Managed));
    // SAFETY: the caller's promise.
    unsafe {
        match attribute {
            CU_POINTER_ATTRIBUTE_CONTEXT => {
                let owner = session.state.owner_of(known.start, known.device);
                write_output(data.cast(), handle(owner))
            }
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE => write_output(
                data.cast::<c_uint>(),
                match on_device {
                    true => CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint,
                    false => CUmemorytype::CU_MEMORYTYPE_HOST as c_uint,
                },
            ),
            CU_POINTER_ATTRIBUTE_DEVICE_POINTER => write_output(data.cast::<u64>(), address),
            CU_POINTER_ATTRIBUTE_HOST_POINTER if on_device && !managed => Err(INVALID),
            CU_POINTER_ATTRIBUTE_HOST_POINTER => write_output(data.cast::<u64>(), address),
            CU_POINTER_ATTRIBUTE_SYNC_MEMOPS => write_output(data.cast::<c_uint>(), 0),
            CU_POINTER_ATTRIBUTE_BUFFER_ID => write_output(data.cast::<c_ulonglong>(), known.id),
            CU_POINTER_ATTRIBUTE_IS_MANAGED => write_output(data.cast::<c_uint>(), managed.into()),
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {
                write_output(data.cast::<c_int>(), known.device as c_int)
            }
            CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => write_output(
                data.cast::<c_uint>(),
                (known.make == Some(Some(AllocationKind::Device))).into(),
            ),
            CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => write_output(data.cast::<u64>(), known.start),
            CU_POINTER_ATTRIBUTE_RANGE_SIZE => {
                write_output(data.cast::<usize>(), known.size as usize)
            }
            CU_POINTER_ATTRIBUTE_MAPPED => write_output(data.cast::<c_uint>(), 1),
            CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => {
                write_output(data.cast::<c_ulonglong>(), known.exportable.into())
            }
            CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => {
                write_output(data.cast::<c_uint>(), known.rdma.into())
            }
            CU_POINTER_ATTRIBUTE_ACCESS_FLAGS => write_output(data.cast::<c_uint>(), 3),
            CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => {
                let pool = match known.make {
                    Some(Some(AllocationKind::Pooled(pool))) => {
                        session.state.memory.pools().handle(pool)
                    }
                    _ => 0,
                };
                write_output(data.cast::<u64>(), pool)
            }
            CU_POINTER_ATTRIBUTE_MAPPING_SIZE => {
                write_output(data.cast::<usize>(), known.size as usize)
            }
            CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => write_output(data.cast::<u64>(), known.start),
            CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID => {
                write_output(data.cast::<c_ulonglong>(), known.id)
            }
            _ => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        }
    }
}

/// One attribute of an address.
pub unsafe extern "C" fn cuPointerGetAttribute(
    data: *mut c_void,
    which: CUpointer_attribute,
    address: CUdeviceptr,
) -> u32 {
    call(Function::cuPointerGetAttribute, |session| {
        // SAFETY: the module's contract.
        unsafe { attribute(session, which, data, address) }
    })
}

/// Several attributes of an address; what does not apply to it is zero.
pub unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    which: *mut CUpointer_attribute,
    data: *mut *mut c_void,
    address: CUdeviceptr,
) -> u32 {
    call(Function::cuPointerGetAttributes, |session| {
        if which.is_null() || data.is_null() || count == 0 {
            return Err(INVALID);
        }
        for index in 0..count as usize {
            // SAFETY: the module's contract: `count` entries of each.
            let (which, data) = unsafe { (*which.add(index), *data.add(index)) };
            // SAFETY: as above.
            if unsafe { attribute(session, which, data, address) }.is_err() {
                // SAFETY: as above; these two have a null of their own size.
                unsafe { clear(which, data) };
            }
        }
        Ok(())
    })
}

/// Writes the value that stands for nothing.
///
/// # Safety
/// As [`attribute`].
unsafe fn clear(which: CUpointer_attribute, data: *mut c_void) {
    use CUpointer_attribute::*;
    if data.is_null() {
        return;
    }
    let wide = !matches!(
        which,
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE
            | CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
            | CU_POINTER_ATTRIBUTE_IS_MANAGED
            | CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
            | CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
            | CU_POINTER_ATTRIBUTE_MAPPED
            | CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
            | CU_POINTER_ATTRIBUTE_ACCESS_FLAGS
    );
    let nothing = match which {
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => -2,
        _ => 0,
    };
    // SAFETY: the caller's promise.
    unsafe {
        match wide {
            true => data.cast::<u64>().write(0),
            false => data.cast::<c_int>().write(nothing),
        }
    }
}

/// The allocation, or the mapped chunk, that an address lies in.
pub unsafe extern "C" fn cuMemGetAddressRange_v2(
    start: *mut CUdeviceptr,
    size: *mut usize,
    address: CUdeviceptr,
) -> u32 {
    call(Function::cuMemGetAddressRange_v2, |session| {
        session.state.device()?;
        let not_found = CUresult::CUDA_ERROR_NOT_FOUND;
        let extent = session.state.memory.extent(address).ok_or(not_found)?;
        // SAFETY: the module's contract: either may be null.
        unsafe {
            if !start.is_null() {
                write_output(start, extent.start)?;
            }
            if !size.is_null() {
                write_output(size, extent.size as usize)?;
            }
        }
        Ok(())
    })
}
