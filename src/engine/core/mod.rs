//! The pool: which bytes are whose. Pure policy over the [`Gpu`] seam: it neither locks nor calls CUDA. Its
//! unsafe code is the look-up of a node by its id (`block`) and three promises that a type may begin as
//! zeros.
//!
//! Physical memory comes in *chunks*. A chunk is mapped at one address at a time, where it is split into
//! *blocks*, each live, pending, free or purgeable. A wholly free chunk can be *remapped*: it is mapped again
//! where a request needs one contiguous range, and its old, *stale* mapping is unmapped once the work that
//! used it has completed.
//!
//! - `pool`: allocating and freeing; `ladder`: every step of a miss
//! - `bins`, `stream_lists`, `block`, `coalesce`, `address_map`: free blocks by size and by stream, all
//!   blocks in address order and by address
//! - `epoch`, `completion`, `deferred_free`, `cross_stream`: whose work has completed, and who waits for whom
//! - `grow`, `remap`, `chunk`, `address_space`, `plain_segments`: memory from the driver; `purge`, `trim`:
//!   back to it
//! - `arena`, `private_arenas`, `restore`: the shared arena and private pools
//! - `counters`, `inspect`, `segments`, `memory_events`, `check`: what others are shown

#![deny(unsafe_code)]

mod address_map;
mod address_space;
mod arena;
mod arena_bytes;
mod bins;
mod block;
mod check;
mod chunk;
mod coalesce;
mod completion;
mod counters;
mod cross_stream;
mod deferred_free;
mod epoch;
mod event_budget;
mod gpu;
mod grow;
mod ids;
mod inspect;
mod ladder;
mod memory_events;
mod plain_segments;
mod policy;
mod pool;
mod private_arenas;
mod purge;
mod purge_deadlines;
mod remap;
mod remap_budget;
mod reserved_bytes;
mod restore;
mod segments;
mod shortage;
mod stream_lists;
mod trim;

pub use check::Broken;
pub use counters::{Class, Counters, Counts, Origin, PoolStats, Stat, TORCH_COUNTS, Usage};
pub use gpu::{Gpu, Refusal};
pub use ids::{ALL_STREAMS, ArenaId, Event, Handle, SHARED_ARENA, StreamKey, UNORDERED};
pub use inspect::{Allocation, Backing, BlockInfo};
pub use memory_events::{EventLog, MemoryEvent};
pub use policy::{Policy, Tuning};
pub use pool::{Allocated, LiveBlock, Metadata, Pool, Unknown};
pub use reserved_bytes::ReservedBytes;
pub use restore::Occupied;
pub use segments::{Segment, SegmentBlock};
pub use shortage::Shortage;

/// Every block starts at, and is rounded up to, a multiple of this many bytes, as in PyTorch's
/// allocator (`kMinBlockSize` in its `CUDACachingAllocator`).
pub const BLOCK: u64 = 512;

/// Bytes of the block that a request for `size` bytes gets, unless blocks are whole segments.
#[inline(always)]
pub const fn block_size(size: u64) -> u64 {
    let least = if size == 0 { 1 } else { size };
    (least + BLOCK - 1) & !(BLOCK - 1)
}

/// Requests up to this many bytes count as `small_pool` in the statistics, as in PyTorch
/// (`kSmallSize`). Only the statistics and plain segments tell small from large.
pub const SMALL: u64 = 1 << 20;

/// Requests above this fail at once: more bytes than any device has, and far from overflow.
pub const LARGEST_REQUEST: u64 = 1 << 46;
