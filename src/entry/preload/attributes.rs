//! What a program can ask about an address: it is told about its own block, not about the chunks of
//! memory that the block is cut from.

use super::breaks::is_broken;
use super::memory::INVALID_VALUE;
use super::ordered::default_pool;
use super::{Answer, real, sharing};
use concertina_engine::runtime::sharing as shared;
use concertina_engine::runtime::{Device, Found, allocator_in_use};
use std::collections::HashMap;
use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// `CUpointer_attribute` in `cuda.h`.
const CONTEXT: c_uint = 1;
const BUFFER_ID: c_uint = 7;
const LEGACY_IPC: c_uint = 10;
const RANGE_START: c_uint = 11;
const RANGE_SIZE: c_uint = 12;
const HANDLE_TYPES: c_uint = 14;
const MEMORY_POOL: c_uint = 17;
const MAPPING_SIZE: c_uint = 18;
const MAPPING_BASE: c_uint = 19;

/// Those that are not simply the driver's to answer. Others are asked for at each launch of a kernel, by
/// Triton for one.
const OURS: [c_uint; 9] = [
    CONTEXT,
    BUFFER_ID,
    LEGACY_IPC,
    RANGE_START,
    RANGE_SIZE,
    HANDLE_TYPES,
    MEMORY_POOL,
    MAPPING_SIZE,
    MAPPING_BASE,
];

/// The block in use around an address, also one of another process that is open here, and its device.
pub fn block(address: u64) -> Option<(&'static Device, Found)> {
    let mut devices = allocator_in_use()?.open_devices();
    let own = devices.find_map(|device| Some((device, device.find(address)?)));
    own.or_else(|| sharing::around(address))
}

/// `cuPointerGetAttribute`.
pub fn one(value: *mut c_void, attribute: c_uint, address: u64) -> Answer {
    if value.is_null() || !OURS.contains(&attribute) {
        return None;
    }
    let (device, found) = block(address)?;
    if matches!(attribute, LEGACY_IPC | HANDLE_TYPES) {
        let status = real::call!(cuPointerGetAttribute(value, attribute, address));
        if status == 0 {
            // SAFETY: the driver has written it.
            unsafe { amend(&found, attribute, value) };
        }
        return Some(status);
    }
    // SAFETY: the program's place for a value of the attribute's type.
    unsafe { answer(device, &found, attribute, value) }.then_some(0)
}

/// `cuPointerGetAttributes`: the driver's answers, with ours in their place.
pub fn several(
    count: c_uint,
    attributes: *const c_uint,
    values: *const *mut c_void,
    address: u64,
) -> Answer {
    let status = real::call!(cuPointerGetAttributes(count, attributes, values, address));
    if status != 0 || attributes.is_null() {
        return Some(status);
    }
    // SAFETY: the driver has read so many.
    let asked = unsafe { std::slice::from_raw_parts(attributes, count as usize) };
    if asked.iter().any(|attribute| OURS.contains(attribute))
        && let Some((device, found)) = block(address)
    {
        for (at, attribute) in asked.iter().enumerate() {
            // SAFETY: the driver has written to as many places.
            unsafe {
                let value = *values.add(at);
                if !value.is_null() {
                    amend(&found, *attribute, value);
                    answer(device, &found, *attribute, value);
                }
            }
        }
    }
    Some(status)
}

/// Writes what is different for a block of the pool from what the driver would say. False where it
/// says the same, or nothing.
///
/// # Safety
/// `value` can be written with a value of the attribute's type.
unsafe fn answer(device: &Device, found: &Found, attribute: c_uint, value: *mut c_void) -> bool {
    let word = match attribute {
        _ if is_broken("attributes") => return false,
        CONTEXT => device.context() as u64,
        BUFFER_ID => buffer_id(found.start),
        RANGE_START | MAPPING_BASE => found.start,
        RANGE_SIZE | MAPPING_SIZE => found.requested,
        MEMORY_POOL if Device::is_stream_ordered(found) => {
            default_pool(device.ordinal()).map_or(0, |pool| pool as u64)
        }
        MEMORY_POOL => 0,
        _ => return false,
    };
    // SAFETY: all of these are 8 bytes wide.
    unsafe { ptr::write(value.cast::<u64>(), word) };
    true
}

/// Sets what the driver has written right, without regard to how wide it is: the block can be shared by
/// `cudaIpcGetMemHandle`, and in no other way.
///
/// # Safety
/// The driver has written the attribute's value.
unsafe fn amend(found: &Found, attribute: c_uint, value: *mut c_void) {
    let byte = match attribute {
        _ if is_broken("attributes") => return,
        LEGACY_IPC if sharing::around(found.start).is_some() => return,
        LEGACY_IPC => u8::from(!Device::is_stream_ordered(found)),
        HANDLE_TYPES => 0,
        _ => return,
    };
    // SAFETY: the lowest byte, which comes first.
    unsafe { ptr::write(value.cast::<u8>(), byte) };
}

/// Numbers of the blocks that were asked for theirs, by address.
static BUFFER_IDS: Mutex<Option<HashMap<u64, u64>>> = Mutex::new(None);
/// The next number: far from the driver's own, which count up from 1.
static NEXT_ID: AtomicU64 = AtomicU64::new(FIRST_ID);
const FIRST_ID: u64 = 1 << 62;

/// A number that no other block ever had, also not at the same address.
fn buffer_id(address: u64) -> u64 {
    let mut ids = BUFFER_IDS.lock().unwrap_or_else(PoisonError::into_inner);
    let ids = ids.get_or_insert_default();
    *ids.entry(address)
        .or_insert_with(|| NEXT_ID.fetch_add(1, Relaxed))
}

/// The block at `address` is being freed: the next one there has another number, and no process opens
/// this one any more. A relaxed load each where nobody asked for such things.
#[inline]
pub fn forget(address: u64) {
    if !is_broken("ipc freed") {
        shared::forget(address);
    }
    if NEXT_ID.load(Relaxed) > FIRST_ID {
        let mut ids = BUFFER_IDS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ids) = ids.as_mut() {
            ids.remove(&address);
        }
    }
}

/// `cuMemRetainAllocationHandle`: to the program its block is no memory that it created and mapped.
pub fn refuse_handle(_handle: *mut u64, address: u64) -> Answer {
    if is_broken("handles") {
        return None;
    }
    let refused = is_broken("own handles") || block(address).is_some();
    refused.then_some(INVALID_VALUE)
}
