//! Hooks of CUDA's stream-ordered memory pools (`cuMemPool…`): which is current, and what they hold.

use super::abi::Answer;
use super::malloc_async_blocks::bytes_in_order;
use super::{driver_table, mutation};
use concertina_engine::process::allocator::allocator_in_use;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Devices, one bit each, whose current pool is one of the program's own.
static OWN_POOL: AtomicU64 = AtomicU64::new(0);

/// Whether the current pool of a device, by its number, is one of the program's own.
#[inline]
pub fn has_own_pool(device: i32) -> bool {
    OWN_POOL.load(Relaxed) >> device & 1 != 0
}

/// The default pool of a device.
pub fn default_pool(device: c_int) -> Option<*mut c_void> {
    let mut pool = ptr::null_mut();
    let status = driver_table::ask!(cuDeviceGetDefaultMemPool(&mut pool, device));
    (status == 0).then_some(pool)
}

/// `cuDeviceSetMemPool`, which the driver answered with `status`.
pub fn set_pool(device: c_int, pool: *mut c_void, status: u32) -> Answer {
    if status == 0 {
        let bit = 1_u64.checked_shl(device as u32).unwrap_or(0);
        match default_pool(device) == Some(pool) {
            true => OWN_POOL.fetch_and(!bit, Relaxed),
            false => OWN_POOL.fetch_or(bit, Relaxed),
        };
    }
    Some(status)
}

/// `cuMemSetMemPool`, which the driver answered with `status`. A location is a kind and a number.
pub fn set_pool_at(location: *const c_int, pool: *mut c_void, status: u32) -> Answer {
    /// `CU_MEM_LOCATION_TYPE_DEVICE`.
    const DEVICE: c_int = 1;
    if status != 0 || location.is_null() {
        return Some(status);
    }
    // SAFETY: the driver read both numbers.
    match unsafe { (*location, *location.add(1)) } {
        (DEVICE, device) => set_pool(device, pool, status),
        _ => Some(status),
    }
}

/// `CUmemPool_attribute` in `cuda.h`: what a pool holds and what is in use, now and at most.
const RESERVED: c_uint = 5;
const RESERVED_HIGH: c_uint = 6;
const USED: c_uint = 7;
const USED_HIGH: c_uint = 8;

/// The driver's pools take memory in steps of this many bytes.
const RESERVE_STEP: u64 = 32 << 20;

/// The most bytes in use of each device's default pool that were seen when somebody asked.
static HIGHEST: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

/// For a device's default pool: the highest bytes in use seen so far, and those in use now.
fn in_use(pool: *mut c_void) -> Option<(&'static AtomicU64, u64)> {
    let mut devices = allocator_in_use()?.devices_in_use();
    let device = devices.find(|device| default_pool(device.ordinal()) == Some(pool))?;
    let highest = HIGHEST.get(device.ordinal() as usize)?;
    let used = bytes_in_order(device);
    highest.fetch_max(used, Relaxed);
    Some((highest, used))
}

/// `cuMemPoolGetAttribute`, which the driver answered with `status`: to what the default pool has, what
/// we have in its place is added.
pub fn attribute(pool: *mut c_void, attribute: c_uint, value: *mut c_void, status: u32) -> Answer {
    if status != 0 || mutation::is_on("pool attributes") {
        return Some(status);
    }
    if let (RESERVED..=USED_HIGH, Some((highest, used))) = (attribute, in_use(pool)) {
        let more = match attribute {
            RESERVED => used.next_multiple_of(RESERVE_STEP),
            RESERVED_HIGH => highest.load(Relaxed).next_multiple_of(RESERVE_STEP),
            USED => used,
            _ => highest.load(Relaxed),
        };
        // SAFETY: the driver wrote these 8 bytes.
        unsafe { *value.cast::<u64>() += more };
    }
    Some(status)
}

/// `cuMemPoolSetAttribute`, which the driver answered with `status`: the highest figures can be set back.
pub fn set_attribute(pool: *mut c_void, attribute: c_uint, status: u32) -> Answer {
    if status == 0
        && let (RESERVED_HIGH | USED_HIGH, Some((highest, used))) = (attribute, in_use(pool))
    {
        highest.store(used, Relaxed);
    }
    Some(status)
}
