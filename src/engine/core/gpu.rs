//! What the pool asks of a GPU. The runtime implements it over a driver table; tests over a toy.

use super::stream_lists::StreamKey;
use std::collections::HashSet;

/// A chunk of physical memory, as the driver names it.
pub type Handle = u64;

/// A point on a stream that can be asked about.
pub type Event = u64;

/// Why a call that would take memory or addresses did not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The device has no memory left.
    OutOfMemory,
    /// The limit that was set for this process would be passed.
    OverLimit,
    /// The driver answered with another error (its `CUresult`).
    Failed(u32),
    /// The arena's memory is supplied by somebody else, who is to be asked for so many bytes more.
    Unsupplied(u64),
}

/// The calls that the pool makes. All sizes are bytes; all addresses are device addresses.
///
/// A call that fails has changed nothing.
pub trait Gpu {
    /// The smallest chunk, and what every chunk is a multiple of; a power of two.
    /// 0 where the device cannot map memory: then only [`Gpu::allocate`] is used.
    fn granularity(&self) -> u64;
    /// How many bytes of addresses to reserve at a time for the shared arena, where the process may have as
    /// many.
    fn reach(&self) -> u64;

    /// Whether a limit is set on what may be held.
    fn is_limited(&self) -> bool;
    /// Whether `size` more bytes can be had at all, as far as the limit and the device tell
    /// beforehand; for large growth, so that a request that must fail takes nothing first.
    fn has_room(&mut self, size: u64) -> Result<(), Refusal>;
    /// Takes `size` bytes of physical memory.
    fn create(&mut self, size: u64) -> Result<Handle, Refusal>;
    /// Gives a chunk back. Its memory is free once no mapping of it is left.
    fn release(&mut self, chunk: Handle, size: u64);
    /// Reserves `size` bytes of addresses.
    fn reserve(&mut self, size: u64) -> Result<u64, Refusal>;
    /// Gives reserved addresses back; nothing is mapped there any more, unless a [`Gpu::map`] that failed could
    /// not be undone: then they go once it is.
    fn unreserve(&mut self, address: u64, size: u64);
    /// Maps a whole chunk at `address`, readable and writable. Does not wait for the GPU.
    fn map(&mut self, address: u64, size: u64, chunk: Handle) -> Result<(), Refusal>;
    /// Takes a mapping down. The caller knows that no work uses it any more.
    fn unmap(&mut self, address: u64, size: u64) -> Result<(), Refusal>;

    /// Takes plain device memory, where memory cannot be mapped or the user does not want it.
    fn allocate(&mut self, size: u64) -> Result<u64, Refusal>;
    /// Gives plain device memory back. The caller knows that no work uses it any more.
    fn free(&mut self, address: u64, size: u64);

    /// Nanoseconds on a clock that never goes back; one that stands still where calls take no time that
    /// means anything.
    fn now(&self) -> u64;

    /// The program is asking for memory on this stream, until the next call. If the stream is being
    /// captured, nothing may be recorded, asked or waited for meanwhile: it would end the capture.
    fn set_requesting_stream(&mut self, stream: Option<StreamKey>);
    /// Whether the device has more than one stream, as far as is known.
    fn has_several_streams(&self) -> bool;
    /// Whether the stream is known to have done all that it was given, without an event: that is work to who
    /// asks whether the stream has any. Never waits, and breaks no capture.
    fn is_idle(&mut self, stream: StreamKey) -> bool;
    /// Records an event behind all that the stream was given so far; for [`ALL_STREAMS`] behind all work of
    /// the device, streams included that have been destroyed. `None` where that is not possible just now:
    /// in a capture, or where the stream may be gone. Never waits, and breaks no capture.
    ///
    /// [`ALL_STREAMS`]: super::ALL_STREAMS
    fn record_event(&mut self, stream: StreamKey) -> Option<Event>;
    /// Whether all work before the event is done. Never waits.
    fn has_completed(&mut self, event: Event) -> bool;
    /// Makes the work that is submitted to the stream from now on run after all work before the event.
    /// The program is using the stream just now. Never waits. False where that is not possible.
    fn stream_wait_event(&mut self, event: Event, stream: StreamKey) -> bool;
    /// The event is not needed any more.
    fn release_event(&mut self, event: Event);
    /// Whether waiting is possible now: not in a capture.
    fn may_wait(&self) -> bool;
    /// Waits until the device is idle, and other devices whose streams use its memory. False where waiting is
    /// not possible (a capture is on).
    fn synchronize(&mut self) -> bool;
    /// Of the streams of other devices no others than these use the device's memory.
    fn retain_foreign(&mut self, streams: &HashSet<StreamKey>);
}
