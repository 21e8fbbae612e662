//! Hooks of the driver's virtual memory functions: `cuMemCreate`, `cuMemMap` and what belongs to them.

use super::abi::{
    AccessDesc, AllocationProp, Answer, DEVICE, INVALID_VALUE, Location, OUT_OF_MEMORY,
};
use super::vmm_cache::{self, Kind, LARGEST, Mapping, State, with};
use super::{driver_table, mutation, primary_context, retry_oom, stream_capture};
use concertina_engine::device::external_cache::{self, ExternalCache};
use concertina_engine::device::thread_number;
use concertina_engine::process::allocator::allocator_in_use;
use concertina_engine::process::startup;
use std::ffi::c_ulonglong;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What has to be there before anything is cached: a child that is forked has to know itself, and with the pool
/// comes the thread that gives idle memory back, if that is wanted.
fn prepare() {
    static READY: AtomicBool = AtomicBool::new(false);
    if !READY.load(Relaxed) {
        startup::initialize();
        external_cache::register(ExternalCache {
            release_all: vmm_cache::release_all,
            purge: vmm_cache::purge,
        });
        READY.store(primary_context::current_device().is_some(), Relaxed);
    }
}

/// `cuMemCreate`.
pub fn create(
    handle: *mut u64,
    size: usize,
    properties: *const AllocationProp,
    flags: c_ulonglong,
) -> Answer {
    if handle.is_null() || properties.is_null() {
        return None;
    }
    // SAFETY: the program's properties, which the driver would read now.
    let asked = unsafe { *properties };
    let make = || driver_table::call!(cuMemCreate(handle, size, properties, flags));
    let kind = Kind {
        size,
        properties: asked,
    };
    let kind = (flags == 0 && kind.is_plain()).then_some(kind);
    if kind.is_some() {
        prepare();
    }
    let mut status = with(|cache| {
        cache.finish_teardowns();
        match kind.and_then(|kind| cache.take_cached(kind)) {
            Some(cached) => {
                // SAFETY: the program's place for the handle, which is not null.
                unsafe { *handle = cached };
                0
            }
            None => cache.created(kind, handle, make()),
        }
    });
    if status == OUT_OF_MEMORY {
        let again = || with(|cache| cache.created(kind, handle, make()));
        let place = Some(asked.location).filter(|it| it.kind == DEVICE);
        let device = place.and_then(|it| allocator_in_use()?.device_in_use(it.id));
        if let Some(device) = device {
            status = retry_oom::retry(device, status, again);
        }
    }
    Some(status)
}

/// `cuMemAddressReserve`.
pub fn reserve(
    address: *mut u64,
    size: usize,
    alignment: usize,
    wanted: u64,
    flags: c_ulonglong,
) -> Answer {
    if address.is_null() {
        return None;
    }
    let anywhere = wanted == 0 && flags == 0 && size <= LARGEST;
    let status = with(|cache| {
        cache.finish_teardowns();
        if wanted != 0 && !mutation::is_on("kept wanted") {
            cache.forget_range(wanted, size);
        }
        let again = cache.recreated_here(size, alignment).filter(|_| anywhere);
        if let Some(again) = again {
            cache.set_state(again, State::Unmapped);
            // SAFETY: the program's place for the address, which is not null.
            unsafe { *address = again };
            return 0;
        }
        let status =
            driver_table::call!(cuMemAddressReserve(address, size, alignment, wanted, flags));
        if status == 0 && anywhere {
            // SAFETY: written just now.
            cache.reserved.insert(unsafe { *address }, size);
        }
        status
    });
    Some(status)
}

/// `cuMemMap`.
pub fn map(address: u64, size: usize, offset: usize, handle: u64, flags: c_ulonglong) -> Answer {
    let whole = offset == 0 && flags == 0;
    let status = with(|cache| {
        cache.finish_teardowns();
        let again = cache.exactly(address, size, State::Unmapped);
        if again.is_some_and(|mapping| whole && mapping.handle == handle) {
            cache.set_state(address, State::Mapped);
            return 0;
        }
        cache.expose(handle);
        cache.forget_range(address, size);
        let status = driver_table::call!(cuMemMap(address, size, offset, handle, flags));
        if status != 0 {
            return status;
        }
        let kind = cache.created.remove(&handle);
        let reserved = cache.reserved.remove(&address) == Some(size);
        if let Some(kind) = kind.filter(|kind| whole && reserved && kind.size == size) {
            cache.addresses.insert(handle, address);
            let mapping = Mapping {
                kind,
                handle,
                holds: 1,
                access: Vec::new(),
                state: State::Mapped,
            };
            cache.all.insert(address, mapping);
        }
        status
    });
    Some(status)
}

/// `cuMemSetAccess`.
pub fn set_access(address: u64, size: usize, access: *const AccessDesc, count: usize) -> Answer {
    if access.is_null() || count == 0 {
        return None;
    }
    // SAFETY: the program's list, which the driver would read now.
    let wanted = unsafe { slice::from_raw_parts(access, count) };
    let status = with(|cache| {
        cache.finish_teardowns();
        let set = || driver_table::call!(cuMemSetAccess(address, size, access, count));
        let mapping = cache.all.get_mut(&address);
        let whole = |it: &&mut Mapping| it.kind.size == size && it.state == State::Mapped;
        let Some(mapping) = mapping.filter(whole) else {
            cache.forget_range(address, size);
            return set();
        };
        if wanted.iter().all(|it| mapping.access.contains(it)) {
            return 0;
        }
        let status = set();
        for right in wanted {
            mapping.access.retain(|it| it.location != right.location);
            if status == 0 {
                mapping.access.push(*right);
            }
        }
        status
    });
    Some(status)
}

/// Waits for a device that has access to a mapping. False where its work has failed, or it is none that can be
/// waited for.
fn is_idle(place: Location) -> bool {
    match primary_context::pool_of(place.id) {
        _ if place.kind != DEVICE => false,
        Some(device) => device.synchronize() == 0,
        None => !primary_context::is_active(place.id),
    }
}

/// `cuMemUnmap`.
pub fn unmap(address: u64, size: usize) -> Answer {
    let users = with(|cache| {
        cache.finish_teardowns();
        let mapping = cache.exactly(address, size, State::Mapped);
        mapping.map(|mapping| mapping.access.clone())
    });
    // Waited for without the lock. What failed before is the driver's to say.
    let are_idle = |users: Vec<AccessDesc>| users.iter().all(|it| is_idle(it.location));
    let idle = !stream_capture::is_on() && users.is_some_and(are_idle);
    with(|cache| {
        if idle && cache.exactly(address, size, State::Mapped).is_some() {
            cache.set_state(address, State::Unmapped);
            return Some(0);
        }
        cache.forget_range(address, size);
        None
    })
}

/// `cuMemRelease`.
pub fn release(handle: u64) -> Answer {
    with(|cache| {
        cache.finish_teardowns();
        let Some(address) = cache.addresses.get(&handle).copied() else {
            cache.created.remove(&handle);
            return None;
        };
        let mapping = cache.all.get_mut(&address)?;
        match mapping.state {
            State::Mapped | State::Unmapped if mapping.holds > 1 => {
                let status = driver_table::call!(cuMemRelease(handle));
                mapping.holds -= u32::from(status == 0);
                Some(status)
            }
            State::Mapped => {
                // The mapping alone holds the memory from now on, and nothing will name it again.
                cache.forget_mapping(address);
                None
            }
            State::Unmapped => {
                let thread = thread_number();
                cache.last = Some((thread, address));
                if cache.frees_in_order {
                    cache.set_state(address, State::Released(thread));
                    return Some(0);
                }
                cache.forget_mapping(address);
                cache.created.remove(&handle);
                None
            }
            State::Recreated(_) => {
                cache.add(address);
                Some(0)
            }
            State::Released(_) | State::Cached(_) => Some(INVALID_VALUE),
        }
    })
}

/// `cuMemAddressFree`.
pub fn free_addresses(address: u64, size: usize) -> Answer {
    with(|cache| {
        cache.frees_in_order |= cache.last.take() == Some((thread_number(), address));
        let mapping = cache.all.get(&address);
        match mapping.map(|mapping| (mapping.state, mapping.kind.size)) {
            Some((State::Released(_), whole)) if whole == size => {
                cache.add(address);
                cache.finish_teardowns();
                return Some(0);
            }
            Some((State::Recreated(_) | State::Cached(_), _)) => return Some(INVALID_VALUE),
            _ => {}
        }
        cache.finish_teardowns();
        cache.forget_range(address, size);
        cache.reserved.remove(&address);
        None
    })
}

/// `cuMemRetainAllocationHandle`, of memory that is none of the pool's.
pub fn retain(handle: *mut u64, address: u64) -> Answer {
    if handle.is_null() {
        return None;
    }
    with(|cache| {
        cache.finish_teardowns();
        let at = cache.mapping_around(address)?;
        if cache.all[&at].state != State::Mapped {
            cache.forget_mapping(at);
            return None;
        }
        let status = driver_table::call!(cuMemRetainAllocationHandle(handle, address));
        let mapping = cache.all.get_mut(&at)?;
        // SAFETY: the program's place for the handle, written where the call succeeded.
        if status == 0 && unsafe { *handle } == mapping.handle {
            mapping.holds += 1;
        } else if status == 0 {
            cache.forget_mapping(at);
        }
        Some(status)
    })
}

/// Something is done to the handle that makes its memory another's, too.
pub fn expose(handle: u64) -> Answer {
    if !mutation::is_on("kept shared") {
        with(|cache| {
            cache.finish_teardowns();
            cache.expose(handle);
            cache.created.remove(&handle);
        });
    }
    None
}

/// The same to the memory at these addresses.
pub fn expose_at(address: u64, size: usize) -> Answer {
    with(|cache| {
        cache.finish_teardowns();
        cache.forget_range(address, size);
    });
    None
}

/// The same to handles that are named in a way which is not followed here.
pub fn expose_all() -> Answer {
    vmm_cache::forget_everything();
    None
}

/// The same, of a question that the driver answers then.
pub fn ask_first(address: u64) -> Answer {
    vmm_cache::check_address(address);
    None
}
