//! Memory allocated and freed in the order of a stream, and the pools that it comes from.

use super::device::device;
use crate::call::{call, check_output, write_output};
use crate::failure::Function;
use crate::memory::{AllocationKind, Pool};
use crate::run::Session;
use crate::state::DriverResult;
use crate::work::Work;
use cudarc::driver::sys::{
    CUdevice, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType,
    CUmemLocation, CUmemLocationType, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUresult,
    CUstream,
};
use std::ffi::{c_int, c_ulonglong, c_void};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// The pool that a handle means.
fn pool(session: &Session<'_>, handle: CUmemoryPool) -> DriverResult<u32> {
    let index = session.state.memory.pools().index(handle as u64);
    let open = |index: &u32| {
        let pool = session.state.memory.pools().get(*index);
        pool.is_some_and(|pool| !pool.closed)
    };
    index.filter(open).ok_or(INVALID)
}

/// The pool that a device's plain asynchronous allocations come from.
fn current(session: &Session<'_>, device: usize) -> u32 {
    let chosen = session.state.devices[device].pool;
    chosen.unwrap_or(device as u32)
}

fn handle(session: &Session<'_>, pool: u32) -> CUmemoryPool {
    session.state.memory.pools().handle(pool) as CUmemoryPool
}

/// # Safety
/// The output is null or may be written.
unsafe fn allocate(
    session: &mut Session<'_>,
    function: Function,
    (address, bytes): (*mut CUdeviceptr, usize),
    pool: Option<u32>,
    stream: CUstream,
) -> DriverResult {
    check_output(address)?;
    let slot = session.state.stream(function.name(), stream)?;
    let on = session.state.streams.get(slot).device;
    session.state.check_not_faulted(on)?;
    let pool = pool.unwrap_or_else(|| current(session, on));
    let home = session
        .state
        .memory
        .pools()
        .get(pool)
        .ok_or(INVALID)?
        .device;
    let make = AllocationKind::Pooled(pool);
    let bytes = bytes as u64;
    let mut found = session.state.memory.allocate(home, bytes, make);
    let captured = session.state.streams.get(slot).capture;
    if found == Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY) && captured.is_none() {
        // What other streams have freed but not reached yet may do.
        session.finish_all(Some(home));
        found = session.state.memory.allocate(home, bytes, make);
    }
    let found = found?;
    // A graph's allocation lives as long as the graph.
    let state = &mut *session.state;
    if let Some(capture) = captured.and_then(|it| state.captures.get(it))
        && let Some(graph) = state.graphs.get_mut(capture.graph)
    {
        graph.owned.push(found);
    }
    session.enqueue(slot, Work::Mark, None);
    // SAFETY: the caller's promise.
    unsafe { write_output(address, found) }
}

/// Allocates from the current pool of the stream's device.
pub unsafe extern "C" fn cuMemAllocAsync(
    address: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> u32 {
    call(Function::cuMemAllocAsync, |session| {
        let what = (address, bytes);
        // SAFETY: the module's contract.
        unsafe { allocate(session, Function::cuMemAllocAsync, what, None, stream) }
    })
}

/// Allocates from a pool.
pub unsafe extern "C" fn cuMemAllocFromPoolAsync(
    address: *mut CUdeviceptr,
    bytes: usize,
    from: CUmemoryPool,
    stream: CUstream,
) -> u32 {
    call(Function::cuMemAllocFromPoolAsync, |session| {
        let (what, from) = ((address, bytes), pool(session, from)?);
        // SAFETY: the module's contract.
        unsafe {
            allocate(
                session,
                Function::cuMemAllocFromPoolAsync,
                what,
                Some(from),
                stream,
            )
        }
    })
}

/// Frees an allocation of a pool when the stream gets there.
pub unsafe extern "C" fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) -> u32 {
    call(Function::cuMemFreeAsync, |session| {
        let slot = session.state.stream("cuMemFreeAsync", stream)?;
        if address == 0 {
            return Err(INVALID);
        }
        let state = &mut *session.state;
        if let Some(capture) = state.streams.get(slot).capture {
            // The graph that it is from frees it in the end; another memory can't be freed by one.
            let graph = state.captures.get(capture).map(|capture| capture.graph);
            let graph = graph.and_then(|graph| state.graphs.get(graph));
            return match graph.is_some_and(|graph| graph.owned.contains(&address)) {
                true => {
                    session.enqueue(slot, Work::Mark, None);
                    Ok(())
                }
                false => Err(INVALID),
            };
        }
        let bytes = state.memory.begin_free(address)?;
        session.enqueue(slot, Work::Free { address, bytes }, None);
        Ok(())
    })
}

/// The pool that a device has from the start.
pub unsafe extern "C" fn cuDeviceGetDefaultMemPool(to: *mut CUmemoryPool, of: CUdevice) -> u32 {
    call(Function::cuDeviceGetDefaultMemPool, |session| {
        let device = device(session, of)?;
        // SAFETY: the module's contract.
        unsafe { write_output(to, handle(session, device as u32)) }
    })
}

/// The pool that a device's plain asynchronous allocations come from.
pub unsafe extern "C" fn cuDeviceGetMemPool(to: *mut CUmemoryPool, of: CUdevice) -> u32 {
    call(Function::cuDeviceGetMemPool, |session| {
        let pool = current(session, device(session, of)?);
        // SAFETY: the module's contract.
        unsafe { write_output(to, handle(session, pool)) }
    })
}

/// Chooses the pool that a device's plain asynchronous allocations come from.
pub unsafe extern "C" fn cuDeviceSetMemPool(of: CUdevice, to: CUmemoryPool) -> u32 {
    call(Function::cuDeviceSetMemPool, |session| {
        let (device, index) = (device(session, of)?, pool(session, to)?);
        let pool = session.state.memory.pools().get(index).ok_or(INVALID)?;
        if pool.device != device {
            return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        session.state.devices[device].pool = Some(index);
        Ok(())
    })
}

/// Makes a pool on a device.
pub unsafe extern "C" fn cuMemPoolCreate(
    to: *mut CUmemoryPool,
    properties: *const CUmemPoolProps,
) -> u32 {
    call(Function::cuMemPoolCreate, |session| {
        check_output(to)?;
        // SAFETY: the module's contract.
        let properties = unsafe { properties.as_ref() }.ok_or(INVALID)?;
        if properties.handleTypes != CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE {
            // No pool can be handed to another process here.
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let location = properties.location;
        if location.type_ != CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE {
            return Err(INVALID);
        }
        let device = device(session, location.id)?;
        let pools = session.state.memory.pools_mut();
        let pool = pools.insert(Pool::new(device, true));
        // SAFETY: the module's contract.
        unsafe { write_output(to, handle(session, pool)) }
    })
}

/// Ends a pool, with its last allocation. A device that it was chosen for has its default again.
pub unsafe extern "C" fn cuMemPoolDestroy(which: CUmemoryPool) -> u32 {
    call(Function::cuMemPoolDestroy, |session| {
        let index = pool(session, which)?;
        let state = &mut *session.state;
        let pool = state.memory.pools_mut().get_mut(index).ok_or(INVALID)?;
        if !pool.explicit {
            return Err(INVALID);
        }
        pool.closed = true;
        let idle = pool.used == 0;
        for device in &mut state.devices {
            device.pool.take_if(|chosen| *chosen == index);
        }
        if idle {
            state.memory.pools_mut().remove(index);
        }
        Ok(())
    })
}

/// Has nothing to give back: no pool keeps what is not in use.
pub unsafe extern "C" fn cuMemPoolTrimTo(which: CUmemoryPool, _keep: usize) -> u32 {
    call(Function::cuMemPoolTrimTo, |session| {
        pool(session, which).map(drop)
    })
}

/// An attribute of a pool.
pub unsafe extern "C" fn cuMemPoolGetAttribute(
    which: CUmemoryPool,
    attribute: CUmemPool_attribute,
    value: *mut c_void,
) -> u32 {
    use CUmemPool_attribute::*;
    call(Function::cuMemPoolGetAttribute, |session| {
        let index = pool(session, which)?;
        let pool = session.state.memory.pools().get(index).ok_or(INVALID)?;
        let number = match attribute {
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => pool.release_threshold,
            CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT | CU_MEMPOOL_ATTR_USED_MEM_CURRENT => pool.used,
            CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => pool.reserved_high,
            CU_MEMPOOL_ATTR_USED_MEM_HIGH => pool.used_high,
            CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES
            | CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC
            | CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
                // SAFETY: the module's contract.
                return unsafe {
                    write_output(value.cast::<c_int>(), pool.reuse[attribute as usize - 1])
                };
            }
        };
        // SAFETY: the module's contract.
        unsafe { write_output(value.cast::<c_ulonglong>(), number) }
    })
}

/// Sets an attribute of a pool. Highest figures can only be set to 0: they count anew.
pub unsafe extern "C" fn cuMemPoolSetAttribute(
    which: CUmemoryPool,
    attribute: CUmemPool_attribute,
    value: *mut c_void,
) -> u32 {
    use CUmemPool_attribute::*;
    call(Function::cuMemPoolSetAttribute, |session| {
        let index = pool(session, which)?;
        check_output(value)?;
        let pools = session.state.memory.pools_mut();
        let pool = pools.get_mut(index).ok_or(INVALID)?;
        // SAFETY: the module's contract: a number of the attribute's size.
        let wide = || unsafe { value.cast::<c_ulonglong>().read() };
        match attribute {
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => pool.release_threshold = wide(),
            CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH if wide() == 0 => pool.reserved_high = pool.used,
            CU_MEMPOOL_ATTR_USED_MEM_HIGH if wide() == 0 => pool.used_high = pool.used,
            CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES
            | CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC
            | CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES => {
                // SAFETY: as above.
                pool.reuse[attribute as usize - 1] = unsafe { value.cast::<c_int>().read() };
            }
            _ => return Err(INVALID),
        }
        Ok(())
    })
}

/// Who may use a pool's memory: here every device that can reach another's may.
pub unsafe extern "C" fn cuMemPoolGetAccess(
    flags: *mut CUmemAccess_flags,
    which: CUmemoryPool,
    location: *mut CUmemLocation,
) -> u32 {
    call(Function::cuMemPoolGetAccess, |session| {
        let index = pool(session, which)?;
        // SAFETY: the module's contract.
        let location = unsafe { location.as_ref() }.ok_or(INVALID)?;
        let asker = device(session, location.id)?;
        let pool = session.state.memory.pools().get(index).ok_or(INVALID)?;
        let answer = match pool.device == asker || session.state.config.peers {
            true => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            false => CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
        };
        // SAFETY: the module's contract.
        unsafe { write_output(flags, answer) }
    })
}

/// Says who may use a pool's memory. A device can't be refused its own.
pub unsafe extern "C" fn cuMemPoolSetAccess(
    which: CUmemoryPool,
    access: *const CUmemAccessDesc,
    count: usize,
) -> u32 {
    call(Function::cuMemPoolSetAccess, |session| {
        let index = pool(session, which)?;
        if access.is_null() || count == 0 {
            return Err(INVALID);
        }
        // SAFETY: the module's contract: `count` descriptions that may be read.
        for wish in unsafe { std::slice::from_raw_parts(access, count) } {
            let asker = device(session, wish.location.id)?;
            let pool = session.state.memory.pools().get(index).ok_or(INVALID)?;
            let own = pool.device == asker;
            if own && wish.flags != CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE {
                return Err(INVALID);
            }
            if !own && !session.state.config.peers {
                return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
            }
        }
        Ok(())
    })
}
