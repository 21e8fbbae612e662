//! Which stream-ordered blocks are `cudaMallocAsync`'s, on a device whose pool PyTorch uses too.

use super::abi::Answer;
use concertina_engine::device::Device;
use concertina_engine::process::ready_devices::ready_device;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Addresses of `cudaMallocAsync`'s blocks, on devices where PyTorch allocates from the pool too.
static BLOCKS: Mutex<Option<HashSet<u64>>> = Mutex::new(None);
/// Whether there was ever one.
static ANY: AtomicBool = AtomicBool::new(false);

fn blocks() -> MutexGuard<'static, Option<HashSet<u64>>> {
    BLOCKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether stream-ordered blocks of the device may be PyTorch's.
#[inline]
fn is_shared_with_pytorch(device: &Device) -> bool {
    ready_device(device.ordinal()).is_some()
}

/// Notes a block, if it could be taken for a tensor's.
#[inline]
pub fn note(device: &Device, answer: Answer, address: *const u64) -> Answer {
    if answer == Some(0) && is_shared_with_pytorch(device) {
        // SAFETY: the program's place for the address, which was written just now.
        note_all([unsafe { *address }]);
    }
    answer
}

#[cold]
fn note_all(addresses: impl IntoIterator<Item = u64>) {
    let mut noted = blocks();
    noted.get_or_insert_default().extend(addresses);
    ANY.store(true, Relaxed);
}

/// PyTorch is about to allocate from the device's pool: the stream-ordered blocks there now are `cudaMallocAsync`'s.
pub fn note_before_sharing(device: &Device) {
    let blocks = device.stream_ordered_blocks();
    if !is_shared_with_pytorch(device) && !blocks.is_empty() {
        note_all(blocks);
    }
}

/// Whether a stream-ordered block is `cudaMallocAsync`'s.
pub fn is_malloc_async(device: &Device, address: u64) -> bool {
    !is_shared_with_pytorch(device)
        || blocks()
            .as_ref()
            .is_some_and(|noted| noted.contains(&address))
}

/// The block at `address` is being freed.
#[inline]
pub fn forget(address: u64) {
    if ANY.load(Relaxed)
        && let Some(noted) = blocks().as_mut()
    {
        noted.remove(&address);
    }
}

/// All of the device's memory goes.
pub fn forget_device(device: &Device) {
    if let Some(noted) = blocks().as_mut() {
        noted.retain(|address| device.find(*address).is_none());
    }
}

/// Bytes of the device's blocks that are `cudaMallocAsync`'s.
pub fn bytes_in_order(device: &Device) -> u64 {
    if !is_shared_with_pytorch(device) {
        return device.stream_ordered_bytes();
    }
    let noted = blocks();
    let blocks = noted.iter().flatten();
    let found = blocks.filter_map(|address| device.find(*address));
    found.map(|block| block.size).sum()
}
