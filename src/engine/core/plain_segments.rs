//! Plain segments, as PyTorch's allocator has without `expandable_segments`: for devices that cannot map
//! memory, for settings that ask for them, and for private pools whose memory is supplied by another
//! allocator.

use super::block::{BlockId, BlockState};
use super::gpu::{Gpu, Refusal};
use super::ids::ArenaId;
use super::memory_events::MemoryEvent;
use super::pool::Pool;

impl<G: Gpu> Pool<G> {
    /// Whether an arena's memory is plain segments rather than chunks.
    pub(super) fn is_plain_arena(&self, id: ArenaId) -> bool {
        self.granularity == 0 || self.arenas[id as usize].supplied
    }

    /// From now on each block of an arena of plain segments is a whole segment.
    pub fn use_whole_segments(&mut self, id: ArenaId) {
        self.arenas[id as usize].whole_segments = self.is_plain_arena(id);
    }

    /// The size of a segment for a request, as in PyTorch: 2 MiB for small requests, 20 MiB below 10 MiB,
    /// else the request rounded up to 2 MiB (`kSmallBuffer`, `kLargeBuffer`, `kMinLargeAlloc`).
    pub(super) fn segment_size(&self, size: u64, id: ArenaId) -> u64 {
        if self.arenas[id as usize].whole_segments {
            size.next_multiple_of(2 << 20)
        } else if size <= super::SMALL {
            2 << 20
        } else if size < 10 << 20 {
            20 << 20
        } else {
            size.next_multiple_of(2 << 20)
        }
    }

    /// Takes a plain segment for a request from the driver; refuses where it has to be supplied.
    pub(super) fn add_segment(&mut self, size: u64, id: ArenaId) -> Result<BlockId, Refusal> {
        let bytes = self.segment_size(size, id);
        if self.arenas[id as usize].supplied {
            return Err(Refusal::Unsupplied(bytes));
        }
        let address = self.gpu.allocate(bytes)?;
        Ok(self.add_segment_block(address, bytes, id))
    }

    /// Adds `bytes` at `address`, both multiples of 512, to an arena whose memory is supplied. The pool owns
    /// them until [`Pool::pop_returned_segment`] returns them.
    pub fn add_supplied_segment(&mut self, address: u64, bytes: u64, id: ArenaId) {
        self.add_segment_block(address, bytes, id);
    }

    /// A supplied segment that is not needed any more, by address and size; no work uses it. The caller owns
    /// it from now on.
    pub fn pop_returned_segment(&mut self) -> Option<(u64, u64)> {
        self.returned_segments.pop()
    }

    /// Makes a segment one idle free block.
    fn add_segment_block(&mut self, address: u64, bytes: u64, id: ArenaId) -> BlockId {
        let arena = &mut self.arenas[id as usize];
        arena.segments.insert(address, bytes);
        arena.reserved += bytes;
        arena.bytes.add(bytes);
        let idle = arena.idle;
        self.counters.growths += 1;
        self.counters.chunk_added(bytes);
        self.event_log
            .push(MemoryEvent::SegmentAllocated(address, bytes));
        let block = self.blocks.add(address, bytes, idle, BlockState::Free);
        self.counters.free_block_added(bytes);
        self.lists.get_mut(idle).insert(&mut self.blocks, block);
        block
    }

    /// Gives plain segments back that are wholly free and idle. Returns their bytes.
    pub(super) fn trim_segments(&mut self, id: ArenaId) -> u64 {
        // To free them waits for the device.
        if !self.gpu.may_wait() {
            return 0;
        }
        let Self {
            blocks,
            lists,
            gpu,
            counters,
            arenas,
            event_log,
            returned_segments,
            ..
        } = self;
        let arena = &mut arenas[id as usize];
        let idle = lists.get_mut(arena.idle);
        let whole = |id: &BlockId| {
            let free_block = &blocks[*id];
            arena.segments.get(&free_block.address) == Some(&free_block.size)
        };
        let whole: Vec<BlockId> = idle.bins.descending(blocks).filter(whole).collect();
        let mut bytes = 0;
        for id in whole {
            let free_block = blocks[id];
            idle.remove(blocks, id);
            counters.free_block_removed(free_block.size);
            blocks.remove(id);
            arena.segments.remove(&free_block.address);
            arena.reserved -= free_block.size;
            arena.bytes.remove(free_block.size);
            match arena.supplied {
                true => returned_segments.push((free_block.address, free_block.size)),
                false => gpu.free(free_block.address, free_block.size),
            }
            counters.chunk_removed(free_block.size);
            event_log.push(MemoryEvent::SegmentFreed(
                free_block.address,
                free_block.size,
            ));
            bytes += free_block.size;
        }
        bytes
    }
}
