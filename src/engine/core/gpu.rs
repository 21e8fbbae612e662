//! What the pool asks of a GPU: the seam between policy and the driver. `device` implements it over the
//! driver's functions.

use super::ids::{Event, Handle, StreamKey};
use std::collections::HashSet;

/// Why memory or addresses were refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The device has no memory left.
    OutOfMemory,
    /// The limit that was set for this process would be passed.
    OverLimit,
    /// The driver answered with another error (its `CUresult`).
    Failed(u32),
    /// The arena's memory is supplied from outside; this many bytes more are needed.
    Unsupplied(u64),
}

/// The calls that the pool makes. All sizes are bytes; all addresses are device addresses.
///
/// A call that fails has changed nothing.
pub trait Gpu {
    /// The granule, of which every chunk is a multiple; a power of two. 0 where the device cannot map memory:
    /// then only [`Gpu::allocate`] is used.
    fn granularity(&self) -> u64;
    /// How many bytes of addresses to reserve at a time for the shared arena, where the process may have as
    /// many.
    fn reach(&self) -> u64;

    /// Whether a limit is set on reserved memory.
    fn is_limited(&self) -> bool;
    /// Refuses where `size` more bytes cannot be had, as far as the limit and the device tell beforehand;
    /// asked before large growth, so that a request that must fail takes nothing first.
    fn has_room(&mut self, size: u64) -> Result<(), Refusal>;
    /// Creates a chunk of `size` bytes.
    fn create(&mut self, size: u64) -> Result<Handle, Refusal>;
    /// Releases a chunk. Its memory goes once no mapping of it is left.
    fn release(&mut self, chunk: Handle, size: u64);
    /// Reserves `size` bytes of addresses.
    fn reserve(&mut self, size: u64) -> Result<u64, Refusal>;
    /// Releases reserved addresses where nothing is mapped any more. Where a failed [`Gpu::map`] could not be
    /// undone they go once it is.
    fn unreserve(&mut self, address: u64, size: u64);
    /// Maps a whole chunk at `address`, readable and writable. Does not wait for the GPU.
    fn map(&mut self, address: u64, size: u64, chunk: Handle) -> Result<(), Refusal>;
    /// Unmaps a chunk. No work uses the mapping any more.
    fn unmap(&mut self, address: u64, size: u64) -> Result<(), Refusal>;

    /// Allocates a plain segment.
    fn allocate(&mut self, size: u64) -> Result<u64, Refusal>;
    /// Frees a plain segment that no work uses any more.
    fn free(&mut self, address: u64, size: u64);

    /// Nanoseconds on a monotonic clock; on a simulated GPU it may stand still.
    fn now(&self) -> u64;

    /// The stream that the program is requesting memory on, until the next call. If it is being captured, no
    /// event may be recorded, polled or waited for meanwhile, as that would end the capture.
    fn set_requesting_stream(&mut self, stream: Option<StreamKey>);
    /// Whether the device has more than one stream, as far as is known.
    fn has_several_streams(&self) -> bool;
    /// Whether the stream is known to have completed all its work, without an event. Never waits, and breaks
    /// no capture.
    fn is_idle(&mut self, stream: StreamKey) -> bool;
    /// Records an event behind all work submitted to the stream so far; for [`ALL_STREAMS`] behind all work
    /// of the device, that of destroyed streams too. `None` where that is not possible: in a capture, or
    /// where the stream may be gone. Never waits, and breaks no capture.
    ///
    /// [`ALL_STREAMS`]: super::ALL_STREAMS
    fn record_event(&mut self, stream: StreamKey) -> Option<Event>;
    /// Whether all work before the event has completed. Never waits.
    fn has_completed(&mut self, event: Event) -> bool;
    /// Makes later work of the stream, which the program is using just now, wait on the GPU for the event.
    /// Never waits on the host. False where that is not possible.
    fn stream_wait_event(&mut self, event: Event, stream: StreamKey) -> bool;
    /// The event is not needed any more.
    fn release_event(&mut self, event: Event);
    /// Whether waiting is possible now: not in a capture.
    fn may_wait(&self) -> bool;
    /// Waits until the device is idle, and other devices whose streams use its memory. False where waiting is
    /// not possible (a capture is on).
    fn synchronize(&mut self) -> bool;
    /// Of other devices' streams only these use the device's memory.
    fn retain_foreign(&mut self, streams: &HashSet<StreamKey>);
}
