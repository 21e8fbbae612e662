//! Memory pools, and memory allocated in the order of a stream.

use super::device::device;
use crate::call::{call, give, wanted};
use crate::failure::Function;
use crate::memory::Make;
use crate::ordered::{Ordered, PoolId, handle};
use crate::run::Session;
use crate::state::Answer;
use crate::work::Work;
use cudarc::driver::sys::{
    CUdevice, CUdeviceptr, CUmemAllocationHandleType, CUmemPool_attribute, CUmemPoolProps,
    CUmemoryPool, CUresult, CUstream,
};
use std::ffi::c_void;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// The pool and the device that a handle means.
fn pool(session: &Session<'_>, pool: CUmemoryPool) -> Answer<(PoolId, usize)> {
    let state = &session.state;
    state.pools.of(pool as u64, state.config.devices)
}

/// Allocates memory from the current pool of the stream's device. It may be used in the stream's
/// order from here on.
pub unsafe extern "C" fn cuMemAllocAsync(
    address: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> u32 {
    call(Function::cuMemAllocAsync, |session| {
        let slot = session.state.stream("cuMemAllocAsync", stream)?;
        let device = session.state.streams.get(slot).device;
        let pool = session.state.pools.current(device);
        // SAFETY: the module's contract.
        unsafe { allocate(session, address, bytes, pool, device) }
    })
}

/// The same from a given pool.
pub unsafe extern "C" fn cuMemAllocFromPoolAsync(
    address: *mut CUdeviceptr,
    bytes: usize,
    from: CUmemoryPool,
    stream: CUstream,
) -> u32 {
    call(Function::cuMemAllocFromPoolAsync, |session| {
        session.state.stream("cuMemAllocFromPoolAsync", stream)?;
        let (pool, device) = pool(session, from)?;
        // SAFETY: the module's contract.
        unsafe { allocate(session, address, bytes, pool, device) }
    })
}

/// # Safety
/// The output is null or may be written.
unsafe fn allocate(
    session: &mut Session<'_>,
    address: *mut CUdeviceptr,
    bytes: usize,
    pool: PoolId,
    device: usize,
) -> Answer {
    wanted(address)?;
    session.state.healthy(device)?;
    let state = &mut *session.state;
    let found = state.memory.allocate(device, bytes as u64, Make::Device)?;
    let size = state.memory.extent(found).map_or(0, |extent| extent.size);
    let block = Ordered {
        pool,
        size,
        freed: false,
    };
    state.pools.blocks.insert(found, block);
    let used = state.pools.used(pool);
    let pool = state.pools.get_mut(pool, device);
    pool.used_high = pool.used_high.max(used);
    // SAFETY: the caller's promise.
    unsafe { give(address, found) }
}

/// Gives memory back when the stream comes to it.
pub unsafe extern "C" fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) -> u32 {
    call(Function::cuMemFreeAsync, |session| {
        let slot = session.state.stream("cuMemFreeAsync", stream)?;
        if address == 0 {
            return Err(INVALID);
        }
        let blocks = &mut session.state.pools.blocks;
        let block = blocks.get_mut(&address).ok_or(INVALID)?;
        if std::mem::replace(&mut block.freed, true) {
            return Err(INVALID);
        }
        let bytes = block.size;
        session.enqueue(slot, Work::Free { address, bytes }, None);
        Ok(())
    })
}

/// The pool that a device has from the beginning.
pub unsafe extern "C" fn cuDeviceGetDefaultMemPool(to: *mut CUmemoryPool, of: CUdevice) -> u32 {
    call(Function::cuDeviceGetDefaultMemPool, |session| {
        let device = device(session, of)?;
        // SAFETY: the module's contract.
        unsafe { give(to, handle(device as PoolId) as CUmemoryPool) }
    })
}

/// The pool that a device's stream-ordered memory comes from unless told otherwise.
pub unsafe extern "C" fn cuDeviceGetMemPool(to: *mut CUmemoryPool, of: CUdevice) -> u32 {
    call(Function::cuDeviceGetMemPool, |session| {
        let device = device(session, of)?;
        let current = session.state.pools.current(device);
        // SAFETY: the module's contract.
        unsafe { give(to, handle(current) as CUmemoryPool) }
    })
}

/// Changes it.
pub unsafe extern "C" fn cuDeviceSetMemPool(of: CUdevice, to: CUmemoryPool) -> u32 {
    call(Function::cuDeviceSetMemPool, |session| {
        let device = device(session, of)?;
        let (pool, owner) = pool(session, to)?;
        if owner != device {
            return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        session.state.pools.current.insert(device, pool);
        Ok(())
    })
}

/// Creates a pool on a device. Its handles cannot be exported here.
pub unsafe extern "C" fn cuMemPoolCreate(
    to: *mut CUmemoryPool,
    properties: *const CUmemPoolProps,
) -> u32 {
    call(Function::cuMemPoolCreate, |session| {
        wanted(to)?;
        // SAFETY: the module's contract.
        let properties = unsafe { properties.as_ref() }.ok_or(INVALID)?;
        if properties.handleTypes != CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let device = device(session, properties.location.id)?;
        let created = session.state.pools.create(device);
        // SAFETY: the module's contract.
        unsafe { give(to, handle(created) as CUmemoryPool) }
    })
}

/// Ends a pool. What is allocated from it stays until it is freed; a device whose current pool it was
/// has its default one again.
pub unsafe extern "C" fn cuMemPoolDestroy(which: CUmemoryPool) -> u32 {
    call(Function::cuMemPoolDestroy, |session| {
        let (pool, device) = pool(session, which)?;
        if pool == device as PoolId {
            return Err(INVALID);
        }
        let pools = &mut session.state.pools;
        pools.pools.remove(&pool);
        pools.current.retain(|_, current| *current != pool);
        Ok(())
    })
}

/// Gives back what a pool holds beyond what is in use: nothing, as pools here hold nothing.
pub unsafe extern "C" fn cuMemPoolTrimTo(which: CUmemoryPool, _keep: usize) -> u32 {
    call(Function::cuMemPoolTrimTo, |session| {
        pool(session, which).map(drop)
    })
}

/// What a pool is set to, or holds. All that is asked for here has 8 bytes.
pub unsafe extern "C" fn cuMemPoolGetAttribute(
    which: CUmemoryPool,
    attribute: CUmemPool_attribute,
    value: *mut c_void,
) -> u32 {
    call(Function::cuMemPoolGetAttribute, |session| {
        use CUmemPool_attribute::*;
        let (pool, device) = pool(session, which)?;
        let used = session.state.pools.used(pool);
        let pool = session.state.pools.get_mut(pool, device);
        let answer = match attribute {
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => pool.threshold,
            CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT | CU_MEMPOOL_ATTR_USED_MEM_CURRENT => used,
            CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH | CU_MEMPOOL_ATTR_USED_MEM_HIGH => pool.used_high,
            _ => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        };
        // SAFETY: the module's contract.
        unsafe { give(value.cast::<u64>(), answer) }
    })
}

/// Sets the release threshold, or a highest value back to the present one.
pub unsafe extern "C" fn cuMemPoolSetAttribute(
    which: CUmemoryPool,
    attribute: CUmemPool_attribute,
    value: *mut c_void,
) -> u32 {
    call(Function::cuMemPoolSetAttribute, |session| {
        use CUmemPool_attribute::*;
        let (pool, device) = pool(session, which)?;
        wanted(value)?;
        // SAFETY: the module's contract.
        let value = unsafe { value.cast::<u64>().read() };
        let used = session.state.pools.used(pool);
        let pool = session.state.pools.get_mut(pool, device);
        match attribute {
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => pool.threshold = value,
            CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH | CU_MEMPOOL_ATTR_USED_MEM_HIGH if value == 0 => {
                pool.used_high = used;
            }
            _ => return Err(INVALID),
        }
        Ok(())
    })
}
