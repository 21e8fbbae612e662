//! What PyTorch's memory functions ask, by device number. Nothing here takes a device up: one that
//! was not used yet has nothing to tell.

use crate::entry::guard::guard;
use crate::entry::stats::put;
use concertina_engine::runtime::{Device, allocator_in_use, lifecycle, process_settings, stats};
use std::ffi::{c_char, c_double, c_int};

/// The device, if it was used.
fn used(device: c_int) -> Option<&'static Device> {
    if lifecycle::in_forked_child() {
        return None;
    }
    allocator_in_use()?
        .open_devices()
        .find(|it| it.ordinal() == device)
}

/// `torch.cuda.memory_stats`, a flat JSON object, as [`put`] hands out texts.
pub unsafe extern "C" fn memory_stats(
    device: c_int,
    buffer: *mut c_char,
    capacity: usize,
) -> usize {
    guard(0, || {
        let counters = used(device).map(|it| it.figures().counters);
        let text = stats::memory_stats(&counters.unwrap_or_default());
        let text = serde_json::Value::Object(text).to_string();
        // SAFETY: the caller vouches for the buffer.
        unsafe { put(&text, buffer, capacity) }
    })
}

pub extern "C" fn reset_peaks(device: c_int) {
    guard((), || {
        used(device).into_iter().for_each(Device::reset_peaks)
    });
}

pub extern "C" fn reset_accumulated(device: c_int) {
    guard((), || {
        used(device).into_iter().for_each(Device::reset_accumulated);
    });
}

/// The share of its memory that the device's pool may hold; 1.0 for no limit.
pub extern "C" fn fraction(device: c_int) -> c_double {
    guard(1.0, || match used(device) {
        Some(device) => device.memory_fraction(),
        None => process_settings().per_process_memory_fraction,
    })
}
