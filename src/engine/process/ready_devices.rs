//! The fast way from a device's number to its pool: devices that the library's own functions have allocated
//! on, so that nothing is left to be initialised or checked before the next allocation.

use crate::device::Device;
use std::ptr;
use std::sync::atomic::{
    AtomicPtr,
    Ordering::{Acquire, Relaxed, Release},
};

/// Devices with higher numbers take the slow way each time.
const DEVICES: usize = 64;

/// By number; null where a device is not ready.
static READY: [AtomicPtr<Device>; DEVICES] = [const { AtomicPtr::new(ptr::null_mut()) }; DEVICES];

/// The device of this number, if it is ready and this process may use it. One acquiring load.
#[inline(always)]
pub fn ready_device(ordinal: i32) -> Option<&'static Device> {
    let ready = READY.get(ordinal as usize)?.load(Acquire);
    // SAFETY: null, or a device of the process's allocator, which is never dropped.
    unsafe { ready.as_ref() }
}

/// Makes a device ready: the process has been initialised, and the device opened.
#[cold]
pub fn add_ready_device(device: &'static Device) {
    if let Some(ready) = READY.get(device.ordinal() as usize) {
        ready.store(ptr::from_ref(device).cast_mut(), Release);
    }
}

/// In a forked child, which may use no device. Async-signal-safe.
pub fn remove_ready_devices() {
    for ready in &READY {
        ready.store(ptr::null_mut(), Relaxed);
    }
}
