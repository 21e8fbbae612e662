//! Memory that the driver hands out where the pool does not, under a limit: it counts towards the limit,
//! so that the program cannot go round it.

use super::malloc::{OUT_OF_MEMORY, is_shareable};
use super::{Answer, driver_table, primary_context, retry_oom, stream_capture};
use concertina_engine::device::Device;
use concertina_engine::process::allocator::allocator_in_use;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// The device and the bytes of each block, by its address.
static BLOCKS: Mutex<Option<HashMap<u64, (i32, u64)>>> = Mutex::new(None);
/// How many there are.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn change<T>(change: impl FnOnce(&mut HashMap<u64, (i32, u64)>) -> T) -> T {
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
    let device = primary_context::known_device().filter(|device| device.limit().is_some())?;
    let bytes = bytes as u64;
    // Nothing may wait in a capture.
    let may_wait = !stream_capture::is_on();
    if !device.reserve_unpooled(bytes, may_wait) {
        // What the pool keeps cannot go back in a capture, but be handed out.
        let kept = !may_wait && !is_shareable();
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
    let status = retry_oom::again(device, ask(), ask);
    match status {
        0 => {
            // SAFETY: the driver wrote the program's place for the address.
            let address = unsafe { *address };
            change(|blocks| blocks.insert(address, (device.ordinal(), bytes)));
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
    // Whoever is handed the address next comes after this.
    let (ordinal, bytes) = change(|blocks| blocks.remove(&address))?;
    let status = free();
    match device(ordinal) {
        Some(device) if status == 0 => device.release_unpooled(bytes),
        _ => _ = change(|blocks| blocks.insert(address, (ordinal, bytes))),
    }
    Some(status)
}

/// The device's context has ended, and what was allocated in it.
pub fn forget(ordinal: i32) {
    if COUNT.load(Relaxed) == 0 {
        return;
    }
    let bytes = change(|blocks| {
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
