//! Memory as `cudaMallocAsync` hands it out: allocated and freed in the order of a stream.
//!
//! Only where the driver would take it from the device's default pool: what a program does with pools
//! of its own is passed on.

use super::breaks::is_broken;
use super::malloc::hand_out;
use super::stream_hooks::Stream;
use super::{Answer, driver_table, pointer_attributes, primary_context, stream_capture, unpooled};
use concertina_engine::core::StreamKey;
use concertina_engine::device::Device;
use concertina_engine::device::OutOfMemory;
use concertina_engine::process::allocator::allocator_in_use;
use concertina_engine::process::ready_devices::ready_device;
use std::collections::HashSet;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Devices, one bit each, whose current pool is one of the program's own.
static OWN_POOL: AtomicU64 = AtomicU64::new(0);

/// A stream as a function that ends in `_ptsz` reads it.
#[inline]
pub fn per_thread(stream: u64) -> u64 {
    match stream {
        0 if !is_broken("per thread") => primary_context::PER_THREAD,
        _ => stream,
    }
}

/// `cuMemAllocAsync`.
#[inline]
pub fn allocate(address: *mut u64, bytes: usize, stream: u64) -> Answer {
    if address.is_null() || bytes == 0 || stream_capture::is_on() {
        return None;
    }
    let stream = Stream::of(stream).ok()?;
    let device = stream.device?;
    if OWN_POOL.load(Relaxed) >> device.ordinal() & 1 != 0 && !is_broken("pools") {
        return None;
    }
    note(
        device,
        hand_out(address, block(device, bytes, stream.key(device))),
        address,
    )
}

/// `cuMemAllocFromPoolAsync`.
pub fn allocate_from(address: *mut u64, bytes: usize, pool: *mut c_void, stream: u64) -> Answer {
    if address.is_null() || bytes == 0 || stream_capture::is_on() {
        return None;
    }
    let stream = Stream::of(stream).ok()?;
    let device = stream.device?;
    if default_pool(device.ordinal()) != Some(pool) {
        return None;
    }
    note(
        device,
        hand_out(address, block(device, bytes, stream.key(device))),
        address,
    )
}

/// What was handed out of devices that hand out others' memory in the order of a stream, too: PyTorch's.
static NOTED: Mutex<Option<HashSet<u64>>> = Mutex::new(None);
/// There was ever one.
static ANY_NOTED: AtomicBool = AtomicBool::new(false);

fn noted() -> MutexGuard<'static, Option<HashSet<u64>>> {
    NOTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether blocks of the device in the order of a stream may be another allocator's.
#[inline]
fn is_mixed(device: &Device) -> bool {
    ready_device(device.ordinal()).is_some()
}

/// Notes what was handed out, if it could be taken for a tensor's.
#[inline]
fn note(device: &Device, answer: Answer, address: *const u64) -> Answer {
    if answer == Some(0) && is_mixed(device) {
        // SAFETY: the program's place for the address, which was written just now.
        note_all([unsafe { *address }]);
    }
    answer
}

#[cold]
fn note_all(blocks: impl IntoIterator<Item = u64>) {
    let mut noted = noted();
    noted.get_or_insert_default().extend(blocks);
    ANY_NOTED.store(true, Relaxed);
}

/// The device will hand out others' memory in the order of a stream, too. What there is, is the program's.
pub fn note_before_others(device: &Device) {
    let blocks = device.stream_ordered();
    if !is_mixed(device) && !blocks.is_empty() {
        note_all(blocks);
    }
}

/// Whether a block in the order of a stream is `cudaMallocAsync`'s.
pub fn is_in_order(device: &Device, address: u64) -> bool {
    !is_mixed(device)
        || noted()
            .as_ref()
            .is_some_and(|noted| noted.contains(&address))
}

/// The block at `address` is being freed.
#[inline]
pub fn forget(address: u64) {
    if ANY_NOTED.load(Relaxed)
        && let Some(noted) = noted().as_mut()
    {
        noted.remove(&address);
    }
}

/// All of the device's memory goes.
pub fn forget_device(device: &Device) {
    if let Some(noted) = noted().as_mut() {
        noted.retain(|address| device.find(*address).is_none());
    }
}

/// Bytes of the device's blocks that are `cudaMallocAsync`'s.
fn bytes_in_order(device: &Device) -> u64 {
    if !is_mixed(device) {
        return device.stream_ordered_bytes();
    }
    let noted = noted();
    let blocks = noted.iter().flatten();
    let found = blocks.filter_map(|address| device.find(*address));
    found.map(|block| block.size).sum()
}

/// A block for the stream; where there is no other memory, after waiting for what was set aside.
#[inline]
fn block(device: &Device, bytes: usize, key: StreamKey) -> Result<u64, Box<OutOfMemory>> {
    device.allocate_on_stream(bytes, key)
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

/// The device whose default pool this is, if it has a pool of ours, and the bytes of it in use.
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
    if status != 0 || is_broken("pool attributes") {
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

/// `cuMemFreeAsync`.
#[inline]
pub fn free(address: u64, stream: u64) -> Answer {
    let answer = free_to_pool(address, stream);
    answer.or_else(|| {
        unpooled::free(address, || {
            driver_table::call!(cuMemFreeAsync(address, stream))
        })
    })
}

/// The same, of memory of any device's pool.
#[inline]
fn free_to_pool(address: u64, stream: u64) -> Answer {
    if address == 0 {
        return None;
    }
    let allocator = allocator_in_use()?;
    if stream_capture::is_on() {
        // A graph's own memory, or a free that becomes part of a graph, is the driver's; and it is
        // asked nothing about a stream for memory that is none of ours.
        let known = allocator
            .devices_in_use()
            .any(|it| it.is_allocated(address));
        if !known || stream_capture::holds(stream) {
            return None;
        }
    }
    pointer_attributes::forget(address);
    let stream = match Stream::of(stream) {
        Ok(stream) => stream,
        Err(status) => {
            // Work has failed, or the stream is none.
            let known = allocator
                .devices_in_use()
                .any(|it| it.is_allocated(address));
            return known.then_some(status);
        }
    };
    let free = |device: &Device| match is_broken("order") {
        true => device.free_completed(address),
        false => device.free_on_stream(address, stream.key(device)),
    };
    if stream.device.is_some_and(|device| free(device).is_ok()) {
        return Some(0);
    }
    let mut others = allocator.devices_in_use();
    others
        .any(|device| {
            device
                .free_on_foreign_stream(address, stream.key(device))
                .is_ok()
        })
        .then_some(0)
}
