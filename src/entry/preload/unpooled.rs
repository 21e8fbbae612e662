//! Unpooled memory: what the driver allocates under a limit where the pool cannot, such as in a capture. It counts
//! towards the limit.

use super::abi::{Answer, OUT_OF_MEMORY};
use super::conf::leaves_malloc_to_cuda;
use super::{driver_table, primary_context, retry_oom, stream_capture};
use concertina_engine::device::Device;
use concertina_engine::process::allocator::allocator_in_use;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// The device and the bytes of each block, by its address.
static BLOCKS: Mutex<Option<HashMap<u64, (i32, u64)>>> = Mutex::new(None);
/// How many there are.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn with_blocks<T>(change: impl FnOnce(&mut HashMap<u64, (i32, u64)>) -> T) -> T {
    let mut blocks = BLOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    let blocks = blocks.get_or_insert_default();
    let result = change(blocks);
    COUNT.store(blocks.len(), Relaxed);
    result
}

/// An allocation that the pool does not serve. `None` where nothing limits it.
#[cold]
#[inline(never)]
pub fn allocate(address: *mut u64, bytes: usize) -> Answer {
    if address.is_null() || bytes == 0 {
        return None;
    }
    let device =
        primary_context::current_device_in_use().filter(|device| device.limit().is_some())?;
    let bytes = bytes as u64;
    // Nothing may wait in a capture.
    let may_wait = !stream_capture::is_on();
    if !device.reserve_unpooled(bytes, may_wait) {
        // In a capture the pool's free memory cannot be returned to the driver, but it can be allocated.
        let kept = !may_wait && !leaves_malloc_to_cuda();
        let block = kept
            .then(|| device.allocate_completed(bytes as usize))
            .flatten();
        let Some(block) = block else {
            return Some(OUT_OF_MEMORY);
        };
        // SAFETY: the program's place for the address, which is not null.
        unsafe { *address = block };
        return Some(0);
    }
    let ask = || driver_table::call!(cuMemAlloc_v2(address, bytes as usize));
    let status = retry_oom::retry(device, ask(), ask);
    match status {
        0 => {
            // SAFETY: the driver wrote the program's place for the address.
            let address = unsafe { *address };
            with_blocks(|blocks| blocks.insert(address, (device.ordinal(), bytes)));
        }
        _ => device.release_unpooled(bytes),
    }
    Some(status)
}

/// A free of what is none of the pool's, which `free` has the driver do. `None` where it was not
/// counted. One relaxed load where nothing was.
#[inline]
pub fn free(address: u64, free: impl FnOnce() -> u32) -> Answer {
    match COUNT.load(Relaxed) {
        0 => None,
        _ => free_counted(address, free),
    }
}

#[cold]
fn free_counted(address: u64, free: impl FnOnce() -> u32) -> Answer {
    // Before the driver can give the address to another thread.
    let (ordinal, bytes) = with_blocks(|blocks| blocks.remove(&address))?;
    let status = free();
    match device(ordinal) {
        Some(device) if status == 0 => device.release_unpooled(bytes),
        _ => _ = with_blocks(|blocks| blocks.insert(address, (ordinal, bytes))),
    }
    Some(status)
}

/// The device's context has ended, and what was allocated in it.
pub fn forget_device(ordinal: i32) {
    if COUNT.load(Relaxed) == 0 {
        return;
    }
    let bytes = with_blocks(|blocks| {
        let here = |of: &(i32, u64)| of.0 == ordinal;
        let bytes = blocks.values().filter(|it| here(it)).map(|it| it.1).sum();
        blocks.retain(|_, it| !here(it));
        bytes
    });
    if let Some(device) = device(ordinal) {
        device.release_unpooled(bytes);
    }
}

fn device(ordinal: i32) -> Option<&'static Device> {
    allocator_in_use()?.device_in_use(ordinal)
}
