//! Owner hints: the device and stream that a block most likely belongs to, by its address, for a free that is
//! given nothing else.
//!
//! A hint is written when a block is allocated, into a hash table without locks in which blocks may share an
//! entry. So it may be wrong, which costs time and nothing else. Most blocks are allocated again on the same
//! stream: then nothing is written, and threads do not contend for the cache line.

use crate::core::BLOCK;
use crate::util::hash::fibonacci;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A power of two.
const HINTS: usize = 1 << 13;

/// The stream's handle, which is an address, and above [`DEVICE_SHIFT`] the device's number.
static TABLE: [AtomicU64; HINTS] = [const { AtomicU64::new(0) }; HINTS];

const DEVICE_SHIFT: u32 = 56;

#[inline]
fn entry_of(address: u64) -> &'static AtomicU64 {
    &TABLE[(fibonacci(address / BLOCK) >> (64 - HINTS.trailing_zeros())) as usize]
}

/// Sets the hint of a block that the device (by number) allocated on the stream (by handle).
#[inline]
pub fn set(address: u64, device: i32, stream: u64) {
    let entry = entry_of(address);
    let hint = (device as u64) << DEVICE_SHIFT | stream;
    if entry.load(Relaxed) != hint {
        entry.store(hint, Relaxed);
    }
}

/// The device (by number) and the stream (by handle) of the hint for an address.
#[inline]
pub fn get(address: u64) -> (i32, u64) {
    let hint = entry_of(address).load(Relaxed);
    (
        (hint >> DEVICE_SHIFT) as i32,
        hint & ((1 << DEVICE_SHIFT) - 1),
    )
}
