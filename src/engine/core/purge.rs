//! Purging: chunks that have been free for a while leave the free lists. A miss reclaims them; at the timeout
//! they go back to the driver.
//!
//! The fast path does not see purgeable chunks and pays nothing for them. A miss reclaims no more of them
//! than it needs, so what is still purgeable at the timeout has not been used since it became so.
//!
//! Only mapped chunks of the shared arena are purged: a captured graph goes on using the addresses of its
//! private arena, and to free a plain segment would wait for the device.

use super::block::{BlockId, BlockState, NONE};
use super::chunk::ChunkId;
use super::gpu::Gpu;
use super::ids::SHARED_ARENA;
use super::pool::Pool;

impl<G: Gpu> Pool<G> {
    /// Makes free chunks purgeable, to go back to the driver when they are `due`, and gives back those that
    /// are due `now` and idle; times are on the caller's clock. `silent` says that nothing was allocated for
    /// long, so that no capture is likely to be on: only then are events polled, which else the next
    /// allocation does, as it knows its stream. Never waits. Gives back at most `most` chunks; true if there
    /// may be more.
    pub fn purge_idle(&mut self, now: u64, due: u64, silent: bool, most: usize) -> bool {
        if self.granularity == 0 || !self.gpu.may_wait() {
            return false;
        }
        if silent {
            self.cover_arena(SHARED_ARENA);
            self.epochs.poll(&mut self.gpu);
        } else {
            self.epochs.request_poll();
        }
        self.unmap_completed(0, SHARED_ARENA);
        self.make_purgeable(due);
        self.release_due(now, most)
    }

    /// Makes the whole chunks of every free block of the shared arena purgeable.
    fn make_purgeable(&mut self, due: u64) {
        let Self {
            arenas,
            lists,
            blocks,
            counters,
            purge,
            granularity,
            ..
        } = self;
        let chunks = &arenas[SHARED_ARENA as usize].chunks;
        for list in lists.numbers(SHARED_ARENA) {
            let owner = lists.get_mut(list);
            let free_blocks: Vec<BlockId> = owner.bins.ascending(blocks, *granularity).collect();
            for free_block in free_blocks {
                let (start, end) = (blocks[free_block].address, blocks[free_block].end());
                let mut whole = chunks.within(start, end).map(|id| chunks.get(id));
                let Some(first) = whole.next() else { continue };
                let last = whole.last().unwrap_or(first);
                let (from, to) = (first.address, last.address + last.size);
                let freed = blocks[free_block].detail;
                owner.remove(blocks, free_block);
                counters.free_block_removed(end - start);
                if start < from {
                    let left = blocks.split_front(free_block, from - start, list, BlockState::Free);
                    blocks[left].detail = freed;
                    owner.insert(blocks, left);
                    counters.free_block_added(from - start);
                }
                let mut block = free_block;
                if to < end {
                    block = blocks.split_front(free_block, to - from, list, BlockState::Purgeable);
                    blocks[block].detail = freed;
                    owner.insert(blocks, free_block);
                    counters.free_block_added(end - to);
                }
                blocks[block].state = BlockState::Purgeable;
                owner
                    .purgeable
                    .get_or_insert_default()
                    .insert(blocks, block);
                purge.due.insert(block, due);
                counters.free_block_added(to - from);
            }
        }
    }

    /// Reclaims as many purgeable chunks as a request needs, of those that its stream may use at once; all of
    /// all streams where none fit. True if there were any.
    pub(super) fn reclaim(&mut self, size: u64, list: u16) -> bool {
        let own = self.lists.get(list);
        if self.purge.due.is_empty() || own.arena != SHARED_ARENA {
            return false;
        }
        let best = |list: u16| {
            let purgeable = self.lists.get(list).purgeable.as_ref();
            purgeable.map_or(NONE, |bins| bins.best_fit(&self.blocks, size))
        };
        let fitting = [best(list), best(own.idle)]
            .into_iter()
            .filter(|id| *id != NONE);
        let Some(block) = fitting.min_by_key(|id| self.blocks[*id].size) else {
            self.reclaim_all();
            return true;
        };
        let chunks = &self.arenas[SHARED_ARENA as usize].chunks;
        let (start, end) = (self.blocks[block].address, self.blocks[block].end());
        let last = chunks.at(start + size - 1).map(|id| chunks.get(id));
        let needed = last.map_or(end, |last| last.address + last.size) - start;
        self.reclaim_front(block, needed);
        true
    }

    /// Reclaims all purgeable chunks.
    pub(super) fn reclaim_all(&mut self) {
        for block in self.in_order(self.purge.due.keys()) {
            self.reclaim_front(block, self.blocks[block].size);
        }
    }

    /// Blocks by address, so that every run is the same.
    fn in_order<'a>(&self, blocks: impl Iterator<Item = &'a BlockId>) -> Vec<BlockId> {
        let mut blocks: Vec<BlockId> = blocks.copied().collect();
        blocks.sort_unstable_by_key(|id| self.blocks[*id].address);
        blocks
    }

    /// Reclaims the first `size` bytes of a purgeable block, which are whole chunks.
    fn reclaim_front(&mut self, block: BlockId, size: u64) {
        let front = self.split_purgeable(block, size);
        self.make_free(front);
    }

    /// Splits the first `size` bytes, which are whole chunks, off a purgeable block. They are in no list
    /// then.
    fn split_purgeable(&mut self, block: BlockId, size: u64) -> BlockId {
        let Self {
            blocks,
            lists,
            counters,
            purge,
            ..
        } = self;
        let whole = blocks[block];
        let purgeable = lists.get_mut(whole.list).purgeable.get_or_insert_default();
        purgeable.remove(blocks, block);
        counters.free_block_removed(whole.size);
        if size == whole.size {
            purge.due.remove(&block);
            return block;
        }
        let front = blocks.split_front(block, size, whole.list, BlockState::Purgeable);
        blocks[front].detail = whole.detail;
        purgeable.insert(blocks, block);
        counters.free_block_added(whole.size - size);
        front
    }

    /// Makes a block that was purgeable a free block of its stream, or an idle one if its work has completed.
    fn make_free(&mut self, block: BlockId) {
        let (list, freed) = (self.blocks[block].list, self.blocks[block].detail);
        let idle = self.arenas[SHARED_ARENA as usize].idle;
        if list == idle || self.is_completed(list, freed) {
            self.add_free(block, idle, 0);
        } else {
            self.add_free(block, list, freed);
        }
    }

    /// Gives back idle chunks that are due, at most `most`. True if there may be more.
    fn release_due(&mut self, now: u64, most: usize) -> bool {
        let idle = self.arenas[SHARED_ARENA as usize].idle;
        let over = self.purge.due.iter().filter(|(id, due)| {
            let block = &self.blocks[**id];
            **due <= now && (block.list == idle || self.is_completed(block.list, block.detail))
        });
        let mut left = most;
        for block in self.in_order(over.map(|(id, _)| id)) {
            let (start, end) = (self.blocks[block].address, self.blocks[block].end());
            let chunks = &self.arenas[SHARED_ARENA as usize].chunks;
            let chunks: Vec<ChunkId> = chunks.within(start, end).collect();
            for chunk in chunks {
                if left == 0 {
                    break;
                }
                left -= usize::from(self.release_front(block, chunk));
            }
        }
        self.reset_cursor(SHARED_ARENA);
        left == 0
    }

    /// Gives the first chunk of a purgeable block back. False where that is not possible; it is a free block
    /// then.
    fn release_front(&mut self, block: BlockId, chunk: ChunkId) -> bool {
        let idle = self.arenas[SHARED_ARENA as usize].idle;
        let size = self.arenas[SHARED_ARENA as usize].chunks.get(chunk).size;
        let front = self.split_purgeable(block, size);
        // For the moment a free block that is not coalesced with its neighbours.
        let free_block = &mut self.blocks[front];
        (free_block.state, free_block.list, free_block.detail) = (BlockState::Free, idle, 0);
        self.lists.get_mut(idle).insert(&mut self.blocks, front);
        self.counters.free_block_added(size);
        let unused = self.arenas[SHARED_ARENA as usize].chunks.get(chunk).stale == 0;
        let gone = unused && self.release_chunk(front, chunk, SHARED_ARENA);
        if !gone {
            self.lists.get_mut(idle).remove(&mut self.blocks, front);
            self.counters.free_block_removed(size);
            self.make_free(front);
        }
        gone
    }
}
