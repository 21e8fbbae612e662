//! What PyTorch's memory functions ask, by device number. Nothing here takes a device up: one that
//! was not used yet has nothing to tell.

use super::symbols::Library;
use crate::entry::panic_guard::guard;
use concertina_engine::core::PoolStats;
use concertina_engine::device::Device;
use concertina_engine::process::allocator::allocator_in_use;
use concertina_engine::process::settings::process_settings;
use concertina_engine::process::stats;
use concertina_engine::util::fork;
use serde_json::Value;
use std::ffi::{c_double, c_int, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Takes a text of so many bytes, which is the caller's until it returns.
pub type Take = extern "C" fn(*const u8, usize);

/// Hands over a value as JSON.
pub fn hand_over(value: &Value, take: Take) {
    let text = value.to_string();
    take(text.as_ptr(), text.len());
}

/// The device, if it was used.
pub fn used(device: c_int) -> Option<&'static Device> {
    if fork::in_forked_child() {
        return None;
    }
    allocator_in_use()?
        .devices_in_use()
        .find(|it| it.ordinal() == device)
}

/// The number of this thread's current device. `None` where PyTorch cannot be asked.
pub fn current_device() -> Option<c_int> {
    type Current = unsafe extern "C-unwind" fn(*mut c_int) -> c_int;
    let function = Library::loaded(c"libtorch_cuda.so")?.symbol(c"cudaGetDevice")?;
    let mut device = 0;
    // SAFETY: CUDA's header says what it takes; `device` outlives the call.
    let status = unsafe { transmute::<*mut c_void, Current>(function)(&mut device) };
    (status == 0).then_some(device)
}

/// How often PyTorch has had memory given back before a device was used, by the device's number, which is a
/// signed byte to PyTorch. Its own allocator counts a wait for all streams each time.
static EMPTIED: [AtomicU64; 128] = [const { AtomicU64::new(0) }; 128];

/// PyTorch has memory given back.
pub fn note_emptied() {
    for (device, emptied) in EMPTIED.iter().enumerate() {
        if used(device as c_int).is_none() {
            emptied.fetch_add(1, Relaxed);
        }
    }
}

/// What is counted of a device; of one that was not used yet, no more than those waits.
pub fn counters(device: c_int) -> PoolStats {
    let counters = used(device).map(|it| it.figures().counters);
    let mut counters = counters.unwrap_or_default();
    let emptied = EMPTIED.get(device as usize);
    counters.counts.syncs += emptied.map_or(0, |it| it.load(Relaxed));
    counters
}

/// `torch.cuda.memory_stats` as a flat object.
pub extern "C" fn memory_stats(device: c_int, take: Take) {
    guard((), || {
        let stats = stats::memory_stats(&counters(device));
        hand_over(&Value::Object(stats), take);
    });
}

pub extern "C" fn reset_peaks(device: c_int) {
    guard((), || {
        used(device).into_iter().for_each(Device::reset_peaks)
    });
}

pub extern "C" fn reset_accumulated(device: c_int) {
    guard((), || {
        used(device).into_iter().for_each(Device::reset_accumulated);
        if let Some(emptied) = EMPTIED.get(device as usize) {
            emptied.store(0, Relaxed);
        }
    });
}

/// The share of its memory that the device's pool may hold; 1.0 for no limit.
pub extern "C" fn fraction(device: c_int) -> c_double {
    guard(1.0, || match used(device) {
        Some(device) => device.memory_fraction(),
        None => process_settings().per_process_memory_fraction,
    })
}

/// The running program sets PyTorch's settings anew; `text` has so many bytes.
///
/// # Safety
/// `text` points to so many.
pub unsafe extern "C" fn change_settings(text: *const u8, size: usize) {
    guard((), || {
        // SAFETY: as promised by the caller.
        let text = unsafe { std::slice::from_raw_parts(text, size) };
        concertina_engine::process::allocator::change_settings(&String::from_utf8_lossy(text));
    });
}
