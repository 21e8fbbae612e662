//! Out-of-memory observers (`torch._C._cuda_attach_out_of_memory_observer`).

use concertina_engine::device::Device;
use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

/// Called with the device, the bytes requested, the limit there and the bytes that are free. It is
/// Python's, which may end the thread there.
type Observer = extern "C-unwind" fn(c_int, u64, u64, u64);

static OBSERVER: Mutex<Option<Observer>> = Mutex::new(None);

/// Called by `attach.py`, whose observer calls those of the program.
pub extern "C" fn set_observer(observer: Observer) {
    *OBSERVER.lock().unwrap_or_else(PoisonError::into_inner) = Some(observer);
}

/// Calls the observers. No lock is held: they may do anything.
pub fn notify(device: &Device, requested: usize, limit: u64, free: u64) {
    let observer = *OBSERVER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(observer) = observer {
        observer(device.ordinal(), requested as u64, limit, free);
    }
}
