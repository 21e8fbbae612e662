//! Hooks of `cudaMallocAsync` and `cudaFreeAsync`: memory that is allocated and freed in stream order.
//!
//! Only where the driver would use the device's default pool: what a program does with pools of its own is passed on.

use super::abi::Answer;
use super::malloc::write_block;
use super::malloc_async_blocks::note;
use super::mem_pools::{default_pool, has_own_pool};
use super::stream_hooks::Stream;
use super::{driver_table, mutation, pointer_attributes, stream_capture, unpooled};
use concertina_engine::core::StreamKey;
use concertina_engine::device::Device;
use concertina_engine::device::OutOfMemory;
use concertina_engine::process::allocator::allocator_in_use;
use std::ffi::c_void;

/// `cuMemAllocAsync`.
#[inline]
pub fn allocate(address: *mut u64, bytes: usize, stream: u64) -> Answer {
    if address.is_null() || bytes == 0 || stream_capture::is_on() {
        return None;
    }
    let stream = Stream::of(stream).ok()?;
    let device = stream.device?;
    if has_own_pool(device.ordinal()) && !mutation::is_on("pools") {
        return None;
    }
    note(
        device,
        write_block(address, block(device, bytes, stream.key(device))),
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
        write_block(address, block(device, bytes, stream.key(device))),
        address,
    )
}

/// A block for the stream.
#[inline]
fn block(device: &Device, bytes: usize, key: StreamKey) -> Result<u64, Box<OutOfMemory>> {
    device.allocate_on_stream(bytes, key)
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

/// Frees a block of any device's pool. `None` if there is none at the address.
#[inline]
fn free_to_pool(address: u64, stream: u64) -> Answer {
    if address == 0 {
        return None;
    }
    let allocator = allocator_in_use()?;
    if stream_capture::is_on() {
        // A graph's own memory, or a free that becomes part of a graph, is the driver's; and it is
        // asked nothing about a stream for memory that is not the pool's.
        let known = allocator
            .devices_in_use()
            .any(|it| it.is_allocated(address));
        if !known || stream_capture::is_captured(stream) {
            return None;
        }
    }
    pointer_attributes::forget_block(address);
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
    let free = |device: &Device| match mutation::is_on("order") {
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
