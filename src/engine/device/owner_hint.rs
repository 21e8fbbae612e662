//! Where a block most likely belongs, for whoever frees it and knows its address alone.
//!
//! A note is made when a block is handed out, in a place by its address that other blocks may share. So
//! what is found there is only a guess, and a wrong one costs time, no more. Most blocks come back to the
//! stream that had them before; then nothing is written, and threads do not meet here.

use crate::core::BLOCK;
use crate::util::hash::fibonacci;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const NOTES: usize = 1 << 13;

/// A stream's handle, which is an address, and in the uppermost byte its device's number.
static LIKELY: [AtomicU64; NOTES] = [const { AtomicU64::new(0) }; NOTES];

const DEVICE: u32 = 56;

#[inline]
fn note_of(address: u64) -> &'static AtomicU64 {
    &LIKELY[(fibonacci(address / BLOCK) >> (64 - NOTES.trailing_zeros())) as usize]
}

/// The device, by its number, handed the block out on the stream, by its handle.
#[inline]
pub fn note(address: u64, device: i32, stream: u64) {
    let note = note_of(address);
    let now = (device as u64) << DEVICE | stream;
    if note.load(Relaxed) != now {
        note.store(now, Relaxed);
    }
}

/// The device, by its number, and the stream, by its handle, that a block most likely is of.
#[inline]
pub fn owner(address: u64) -> (i32, u64) {
    let note = note_of(address).load(Relaxed);
    ((note >> DEVICE) as i32, note & ((1 << DEVICE) - 1))
}
