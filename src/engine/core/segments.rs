//! A snapshot of the pool's memory, segment by segment, for PyTorch's memory snapshots.

use super::block::{BlockState, NONE};
use super::counters::Origin;
use super::gpu::Gpu;
use super::ids::ArenaId;
use super::pool::Pool;

/// One block of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentBlock {
    /// Where it begins.
    pub address: u64,
    /// Its bytes.
    pub size: u64,
    /// Bytes requested; 0 where it is free.
    pub requested: u64,
    /// The handle of the stream that it was allocated on or freed by last; 0 for idle memory.
    pub stream: u64,
    /// Allocated and not freed.
    pub live: bool,
    /// Freed while other streams may still use it.
    pub pending: bool,
    /// By which functions a live or pending block was allocated.
    pub origin: Origin,
}

/// Memory without a gap: chunks mapped side by side, or one plain segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The arena that it belongs to.
    pub arena: ArenaId,
    /// Made of mapped chunks.
    pub expandable: bool,
    /// In address order; never empty.
    pub blocks: Vec<SegmentBlock>,
}

impl<G: Gpu> Pool<G> {
    /// All reserved memory, in no order.
    pub fn segments(&self) -> Vec<Segment> {
        let firsts = self.blocks.iter().filter(|(_, block)| block.prev == NONE);
        firsts
            .map(|(first, block)| {
                let mut blocks = Vec::new();
                let mut at = first;
                while at != NONE {
                    let block = &self.blocks[at];
                    let free = matches!(block.state, BlockState::Free | BlockState::Purgeable);
                    blocks.push(SegmentBlock {
                        address: block.address,
                        size: block.size,
                        requested: if free { 0 } else { block.detail },
                        stream: self.lists.get(block.list).key.handle,
                        live: block.state == BlockState::Live,
                        pending: block.state == BlockState::Pending,
                        origin: block.flags.origin(),
                    });
                    at = block.next;
                }
                let arena = self.lists.get(block.list).arena;
                Segment {
                    arena,
                    expandable: !self.arenas[arena as usize]
                        .segments
                        .contains_key(&block.address),
                    blocks,
                }
            })
            .collect()
    }

    /// The log of memory events.
    pub fn event_log_mut(&mut self) -> &mut super::memory_events::EventLog {
        &mut self.event_log
    }
}
