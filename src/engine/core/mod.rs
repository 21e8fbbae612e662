//! The pool: which bytes are whose. Pure policy over the [`Gpu`] seam: nothing here locks or calls CUDA. Of
//! unsafe code there is what finds a node by its name (`block`), and two promises: a node and a free list may begin
//! as zeros.
//!
//! Physical memory and addresses are two things. Physical memory comes in *chunks*; a chunk is
//! mapped at one *home* address at a time, where its bytes are carved into *blocks*. Chunks whose
//! bytes are all free can move: they are mapped a second time where a large request needs one
//! contiguous range, and the old mapping is taken down later, when the work that used it is done.

#![deny(unsafe_code)]

mod address_map;
mod address_space;
mod arena;
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
mod inspect;
mod ladder;
mod memory_events;
mod plain_segments;
mod policy;
mod pool;
mod private_arenas;
mod purge;
mod remap;
mod remap_budget;
mod restore;
mod segments;
mod stream_lists;
mod trim;

pub use arena::{ArenaId, SHARED_ARENA};
pub use check::Broken;
pub use counters::{Class, Counters, Counts, Origin, PoolStats, Stat, TORCH_COUNTS, Usage};
pub use gpu::{Event, Gpu, Handle, Refusal};
pub use inspect::{Allocation, Backing, BlockInfo};
pub use ladder::Shortage;
pub use memory_events::{EventLog, MemoryEvent};
pub use policy::{Policy, Tuning};
pub use pool::{Allocated, LiveBlock, Metadata, Pool, Unknown};
pub use restore::Occupied;
pub use segments::{Segment, SegmentBlock};
pub use stream_lists::{ALL_STREAMS, StreamKey, UNORDERED};

/// Every block starts at, and is rounded up to, a multiple of this many bytes, as in PyTorch's
/// allocator (`kMinBlockSize` in its `CUDACachingAllocator`).
pub const BLOCK: u64 = 512;

/// Bytes of the block that a request for `size` bytes gets, where no free block is handed out whole.
#[inline(always)]
pub const fn block_size(size: u64) -> u64 {
    let least = if size == 0 { 1 } else { size };
    (least + BLOCK - 1) & !(BLOCK - 1)
}

/// Requests up to this many bytes count as `small_pool` in the statistics, as in PyTorch
/// (`kSmallSize`). The pool itself makes no difference between small and large.
pub const SMALL: u64 = 1 << 20;

/// No request above this is looked at: more than any device has, and far from overflow.
pub const LARGEST_REQUEST: u64 = 1 << 46;
