//! Memory statistics, limits and settings, for `attach.py`, by device number. Nothing here opens a device:
//! one that was not used yet has no figures.

use super::devices::in_use;
use super::json::{JsonCallback, send};
use crate::entry::panic_guard::guard;
use concertina_engine::core::PoolStats;
use concertina_engine::device::Device;
use concertina_engine::process::settings::process_settings;
use concertina_engine::process::stats;
use serde_json::{Value, json};
use std::ffi::{c_double, c_int};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Calls of `empty_cache` before a device was used, by device number, a signed byte in PyTorch. PyTorch's own
/// allocator counts each in `num_sync_all_streams`.
static EMPTIED: [AtomicU64; 128] = [const { AtomicU64::new(0) }; 128];

/// Counts a call of `empty_cache` for devices that were not used yet.
pub fn note_emptied() {
    for (device, emptied) in EMPTIED.iter().enumerate() {
        if in_use(device as c_int).is_none() {
            emptied.fetch_add(1, Relaxed);
        }
    }
}

/// The counters of a device.
pub fn counters(device: c_int) -> PoolStats {
    let counters = in_use(device).map(|it| it.figures().counters);
    let mut counters = counters.unwrap_or_default();
    let emptied = EMPTIED.get(device as usize);
    counters.counts.syncs += emptied.map_or(0, |it| it.load(Relaxed));
    counters
}

/// `torch.cuda.memory_stats` as a flat object.
pub extern "C" fn memory_stats(device: c_int, callback: JsonCallback) {
    guard((), || {
        let stats = stats::memory_stats(&counters(device));
        send(&Value::Object(stats), callback);
    });
}

/// Reserved bytes by private pool, for `attach.py`: lists of the pool's two numbers and of the bytes that are
/// current, at the peak, allocated and freed.
pub extern "C" fn private_pool_bytes(device: c_int, callback: JsonCallback) {
    guard((), || {
        let pools = in_use(device).map(Device::private_pool_bytes);
        let pools = pools.into_iter().flatten().map(|((graph, user), bytes)| {
            let flow = [bytes.current, bytes.peak, bytes.allocated, bytes.freed];
            json!([[graph, user], flow])
        });
        send(&pools.collect(), callback);
    });
}

/// Sets the peaks to the current values.
pub extern "C" fn reset_peaks(device: c_int) {
    guard((), || {
        in_use(device).into_iter().for_each(Device::reset_peaks)
    });
}

/// Sets the counters that only grow to 0.
pub extern "C" fn reset_accumulated(device: c_int) {
    guard((), || {
        in_use(device)
            .into_iter()
            .for_each(Device::reset_accumulated);
        if let Some(emptied) = EMPTIED.get(device as usize) {
            emptied.store(0, Relaxed);
        }
    });
}

/// The fraction of the device's memory that the pool may hold; 1.0 for no limit.
pub extern "C" fn fraction(device: c_int) -> c_double {
    guard(1.0, || match in_use(device) {
        Some(device) => device.memory_fraction(),
        None => process_settings().per_process_memory_fraction,
    })
}

/// Changes settings of PyTorch's that may be changed while the program runs.
///
/// # Safety
/// `text` points to `size` bytes.
pub unsafe extern "C" fn change_settings(text: *const u8, size: usize) {
    guard((), || {
        // SAFETY: as promised by the caller.
        let text = unsafe { std::slice::from_raw_parts(text, size) };
        concertina_engine::process::allocator::change_settings(&String::from_utf8_lossy(text));
    });
}
