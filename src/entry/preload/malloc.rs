//! Hooks of `cudaMalloc` and `cudaFree` (`cuMemAlloc`, `cuMemFree`): any stream may use the memory, and freeing it waits
//! for the device.

use super::abi::{Answer, INVALID_VALUE, OUT_OF_MEMORY};
use super::{
    conf, driver_table, mutation, pointer_attributes, primary_context, stream_capture, unpooled,
};
use concertina_engine::core::Refusal;
use concertina_engine::device::Device;
use concertina_engine::device::OutOfMemory;
use concertina_engine::process::allocator::Allocator;
use concertina_engine::process::allocator::allocator_in_use;
use std::collections::HashMap;
use std::ffi::c_uint;
use std::sync::{Mutex, PoisonError};

/// The default stream.
const DEFAULT: u64 = 0;

/// `cuMemAlloc`.
#[inline]
pub fn allocate(address: *mut u64, bytes: usize) -> Answer {
    let answer = allocate_from_pool(address, bytes);
    answer.or_else(|| unpooled::allocate(address, bytes))
}

/// The same, from the pool.
#[inline]
fn allocate_from_pool(address: *mut u64, bytes: usize) -> Answer {
    if address.is_null() || stream_capture::is_on() || mutation::is_on("pool") {
        return None;
    }
    if bytes == 0 && !mutation::is_on("zero") {
        return None;
    }
    let device = match mutation::is_on("health") {
        false => primary_context::device_of_stream_context(
            primary_context::of_stream(DEFAULT).ok()?,
            DEFAULT,
        )?,
        true => primary_context::current_device()?,
    };
    if conf::leaves_malloc_to_cuda() {
        return None;
    }
    let block = match mutation::is_on("apart") {
        true => device.allocate(bytes, 0),
        false if conf::is_free_relaxed() => device.allocate_relaxed(bytes),
        false => device.allocate_unordered(bytes),
    };
    write_block(address, block)
}

/// Writes the block's address for the program. Past the limit it gets CUDA's out-of-memory error; where the device is
/// out of memory the driver is asked, which says so.
#[inline]
pub fn write_block(to: *mut u64, block: Result<u64, Box<OutOfMemory>>) -> Answer {
    match block {
        Ok(address) => {
            // SAFETY: the program's place for the address, which is not null.
            unsafe { *to = address };
            Some(0)
        }
        Err(shortage) if shortage.shortage.refusal == Refusal::OverLimit => Some(OUT_OF_MEMORY),
        Err(_) => None,
    }
}

/// `cuMemAllocPitch`. How far apart the rows lie is the driver's to say: the first allocation of each
/// width is its own, and those after it do as it did. Under a limit it is asked with a single row.
pub fn allocate_pitch(
    address: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> Answer {
    /// Pitches by width and element size; no more widths than this are remembered.
    const WIDTHS: usize = 4096;
    static PITCHES: Mutex<Option<HashMap<(usize, c_uint), usize>>> = Mutex::new(None);

    if address.is_null() || pitch.is_null() || stream_capture::is_on() {
        return None;
    }
    let mut pitches = PITCHES.lock().unwrap_or_else(PoisonError::into_inner);
    let known = pitches.get_or_insert_default();
    let kind = (width, element);
    let room = known.len() < WIDTHS;
    let row = match known.get(&kind).copied() {
        Some(row) => row,
        None if room && conf::is_limited() && primary_context::current_device().is_some() => {
            *known.entry(kind).or_insert(pitch_of(width, element)?)
        }
        None => {
            let status =
                driver_table::call!(cuMemAllocPitch_v2(address, pitch, width, height, element));
            if status == OUT_OF_MEMORY {
                // The caller asks again.
                return None;
            }
            if status == 0 && room {
                // SAFETY: the driver wrote it just now.
                known.insert(kind, unsafe { *pitch });
            }
            return Some(status);
        }
    };
    drop(pitches);
    let row = if mutation::is_on("pitch") { width } else { row };
    let answer = allocate(address, row.checked_mul(height)?);
    if answer == Some(0) {
        // SAFETY: the program's place for the pitch, which is not null.
        unsafe { *pitch = row };
    }
    answer
}

/// Bytes of `height` rows of the pitch that a successful call wrote.
#[inline]
pub fn rows(pitch: *const usize, height: usize) -> usize {
    // SAFETY: the program's place for the pitch, if it is not null; the call has written it.
    unsafe { pitch.as_ref() }.map_or(0, |pitch| pitch.saturating_mul(height))
}

/// What the driver makes of one row.
fn pitch_of(width: usize, element: c_uint) -> Option<usize> {
    let (mut address, mut pitch) = (0, 0);
    let status = driver_table::call!(cuMemAllocPitch_v2(
        &mut address,
        &mut pitch,
        width,
        1,
        element
    ));
    if status != 0 {
        return None;
    }
    driver_table::call!(cuMemFree_v2(address));
    Some(pitch)
}

/// `cuMemFree`.
#[inline]
pub fn free(address: u64) -> Answer {
    let answer = free_to_any_pool(address);
    answer.or_else(|| unpooled::free(address, || driver_table::call!(cuMemFree_v2(address))))
}

/// Frees a block of any device's pool. `None` if there is none at the address.
#[inline]
fn free_to_any_pool(address: u64) -> Answer {
    if address == 0 {
        return None;
    }
    let allocator = allocator_in_use()?;
    pointer_attributes::forget_block(address);
    if mutation::is_on("leak") {
        return Some(0);
    }
    // Nobody waits, in no context. In a capture an event would be as wrong as a wait, and not tell the
    // program so.
    let relaxed = conf::is_free_relaxed()
        && !stream_capture::is_on()
        && !mutation::is_on("wait")
        && !mutation::is_on("relaxed");
    let mut devices = allocator.devices_in_use();
    if relaxed && devices.any(|device| device.free_relaxed(address).is_ok()) {
        return Some(0);
    }
    let here = primary_context::current_device_in_use();
    if let Some(status) = here.and_then(|device| free_to_pool(device, address)) {
        return Some(status);
    }
    if mutation::is_on("unknown") {
        return Some(0);
    }
    if mutation::is_on("elsewhere") {
        return None;
    }
    free_to_other_pool(allocator, here, address)
}

/// Frees a block of a device that is not the current one.
#[cold]
fn free_to_other_pool(allocator: &Allocator, here: Option<&Device>, address: u64) -> Answer {
    let others = allocator
        .devices_in_use()
        .filter(|other| here.is_none_or(|here| here.ordinal() != other.ordinal()));
    for device in others {
        if device.find(address).is_some()
            && let Some(status) = free_to_pool(device, address)
        {
            return Some(status);
        }
    }
    // Freed already, or the middle of a block: the driver must not take it for the pool's own.
    let mut devices = allocator.devices_in_use();
    devices
        .any(|device| device.is_in_segment(address))
        .then_some(INVALID_VALUE)
}

/// Waits for the device, as `cudaFree` promises, and frees a block to its pool. `None` if the device has no block at
/// the address; the wait's status where that fails, because work has failed or a capture forbids to wait, as the
/// driver's own function would answer.
#[inline]
fn free_to_pool(device: &Device, address: u64) -> Answer {
    let waits = !(mutation::is_on("wait") || conf::is_free_relaxed() && mutation::is_on("relaxed"));
    if waits {
        let status = device.synchronize_as_free();
        if status != 0 {
            let found = device.find(address).filter(|it| it.start == address);
            return found.map(|_| status);
        }
        // A double free: with `free:relaxed` the block may still lie in a magazine or the depot.
        if conf::is_free_relaxed() && !device.is_allocated(address) {
            return None;
        }
    }
    device.free_completed(address).ok().map(|()| 0)
}
