//! The end of a device's primary context: what the pool and the hooks keep there goes with it.

use super::abi::Answer;
use super::primary_context::{DEVICES, pool_of};
use super::{imported_memory, malloc_async_blocks, mutation, stream_capture, unpooled, vmm_cache};
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

/// How many times the program has retained each device's primary context.
static HOLDS: [AtomicI32; DEVICES] = [const { AtomicI32::new(0) }; DEVICES];

/// `cuDevicePrimaryCtxRetain`, which the driver answered with `status`.
pub fn retained(device: i32, status: u32) -> Answer {
    if status == 0
        && let Some(holds) = HOLDS.get(device as usize)
    {
        holds.fetch_add(1, Relaxed);
    }
    Some(status)
}

/// `cuDevicePrimaryCtxRelease`: with the last hold goes what was allocated in the context.
pub fn release(device: i32, release: impl FnOnce() -> u32) -> Answer {
    let holds = HOLDS.get(device as usize)?;
    if holds.load(Relaxed) != 1 {
        let status = release();
        if status == 0 {
            holds.fetch_sub(1, Relaxed);
        }
        return Some(status);
    }
    end(device, release)
}

/// `cuDevicePrimaryCtxReset`: all that was allocated in the context goes, however often it is retained.
pub fn reset(device: i32, reset: impl FnOnce() -> u32) -> Answer {
    end(device, reset)
}

/// The end of a primary context, which `end` makes: the pool gives back all it has. Where the work of
/// the context has failed that is not possible before the end, so it is done after it.
fn end(device: i32, end: impl FnOnce() -> u32) -> Answer {
    let pool = pool_of(device).filter(|_| !mutation::is_on("reset"));
    // To wait for the context's work is an error while any of it is being captured.
    let captured = stream_capture::remove_device(device);
    let works = !captured && pool.is_some_and(|pool| pool.synchronize() == 0);
    pool.into_iter().for_each(imported_memory::close_all);
    pool.into_iter()
        .for_each(malloc_async_blocks::forget_device);
    if works || pool.is_none() {
        vmm_cache::forget_everything();
    }
    if works {
        pool.into_iter().for_each(|pool| pool.reset(false));
    }
    let status = end();
    if !works && status == 0 {
        pool.into_iter().for_each(|pool| pool.reset(true));
        vmm_cache::forget_everything();
    }
    if status == 0 {
        unpooled::forget_device(device);
        if let Some(holds) = HOLDS.get(device as usize) {
            holds.store(0, Relaxed);
        }
    }
    Some(status)
}
