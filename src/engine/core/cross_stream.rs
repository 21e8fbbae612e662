//! Cross-stream reuse: memory that another stream freed, before its work has completed. The stream that wants
//! it is made to wait on the GPU for the one that freed it. Nothing waits on the host.
//!
//! CUDA's own pools do the same (`CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES`, on unless turned off).
//! The stream waits for an event that was recorded at that very free: one recorded later might cover work
//! that itself waits for the waiting stream, and never complete. Where there is no such event, memory grows
//! instead.

use super::SMALL;
use super::block::{BlockId, BlockState, NONE};
use super::ids::{ALL_STREAMS, SHARED_ARENA};

use super::gpu::Gpu;
use super::pool::{Deferred, Pool};

/// How many free blocks of another stream are looked at, in the order of best fit.
const LOOKED_AT: usize = 16;

/// A range of another stream's free block that can be reused.
struct Reusable {
    block: BlockId,
    start: u64,
    /// The free that the stream has to wait for.
    epoch: u64,
}

impl<G: Gpu> Pool<G> {
    /// A free block of at least `size` bytes that the stream may use once it waits on the GPU, which it then
    /// does: another stream's, or a pending block.
    pub(super) fn reuse_across_streams(&mut self, size: u64, list: u16) -> Option<BlockId> {
        // The streams of a captured graph wait for nobody.
        if !self.policy.waits || self.lists.get(list).arena != SHARED_ARENA {
            return None;
        }
        let block = self.reuse_free_block(size, list);
        let block = block.or_else(|| self.reuse_deferred_block(size, list));
        let found = u64::from(block.is_some());
        self.counters.hits += found;
        self.counters.cross_stream_reuses += found;
        block
    }

    /// A stream misses while others have free memory: from now on, for a while, large frees get events of
    /// their own that it could wait for.
    pub(super) fn request_free_events(&mut self, list: u16) {
        if self.policy.waits
            && self.lists.get(list).arena == SHARED_ARENA
            && (self.lists.others_with_free(list).next().is_some() || !self.deferred.is_empty())
            && self.epochs.request_free_events(&self.gpu)
        {
            self.arenas[SHARED_ARENA as usize].notes_frees = true;
        }
    }

    /// Whether a block of this size is to be freed at once rather than kept in a stream cache, so that it
    /// gets an event of its own.
    #[inline]
    pub fn needs_free_event(&self, size: u64) -> bool {
        size >= SMALL
            && self.arenas[SHARED_ARENA as usize].notes_frees
            && self.has_several_streams()
    }

    /// Whether the device has other streams, which might want memory.
    pub(super) fn has_several_streams(&self) -> bool {
        self.lists.streams() > 1 || self.gpu.has_several_streams()
    }

    /// Makes the stream's later work wait on the GPU for another stream's up to a free. False where that is
    /// not possible.
    pub(super) fn wait_for(&mut self, list: u16, other: u16, epoch: u64) -> bool {
        let (key, other) = (self.lists.get(list).key, self.lists.get(other).key);
        self.epochs.wait_for(key, other, epoch, &mut self.gpu)
    }

    /// The free that this stream has to wait for to reuse a range of another stream's free block; `None`
    /// where no event is known to cover it.
    pub(super) fn reusable_after(
        &self,
        block: BlockId,
        range: (u64, u64),
        list: u16,
    ) -> Option<u64> {
        let (key, block) = (self.lists.get(list).key, self.blocks[block]);
        let owner = self.lists.get(block.list);
        let can_wait = |epoch: &u64| self.epochs.can_wait_for(key, owner.key, *epoch);
        // An even epoch: freed in one piece, with one event if any.
        Some(block.detail)
            .filter(|epoch| epoch & 1 == 0 && can_wait(epoch))
            .or_else(|| {
                let last = self.epochs.last_free(owner.key, range, owner.freed);
                last.filter(can_wait)
            })
    }

    /// The epoch of memory that this stream has from another one: as if it had freed it just now.
    pub(super) fn new_free_epoch(&mut self, list: u16) -> u64 {
        let epoch = self.epochs.tick(0);
        self.lists.get_mut(list).freed = epoch;
        epoch
    }

    /// Splits the best fit off the free blocks of the arena's other streams.
    fn reuse_free_block(&mut self, size: u64, list: u16) -> Option<BlockId> {
        let found = self.lists.others_with_free(list).filter_map(|(_, it)| {
            let mut fitting = it.bins.ascending(&self.blocks, size).take(LOOKED_AT);
            fitting.find_map(|id| self.reusable_part(id, size, list))
        });
        let found = found.min_by_key(|it| {
            let block = &self.blocks[it.block];
            (block.size, it.epoch, block.address)
        })?;
        let Reusable {
            block,
            start,
            epoch,
        } = found;
        let other = self.blocks[block].list;
        self.wait_for(list, other, epoch)
            .then(|| self.carve_out(block, start, size))
    }

    /// Where in another stream's free block this stream can have `size` bytes: at one of its ends, so that
    /// the rest stays in one piece, or else where the free to wait for is the earliest.
    fn reusable_part(&self, id: BlockId, size: u64, list: u16) -> Option<Reusable> {
        let block = self.blocks[id];
        let key = self.lists.get(block.list).key;
        let (first, last) = (block.address, block.end() - size);
        let free_boundaries = self
            .epochs
            .free_boundaries(key, (block.address, block.end()));
        let beside = free_boundaries
            .iter()
            .flat_map(|at| [*at, at.saturating_sub(size)]);
        let starts = [first, last].into_iter().chain(beside);
        starts
            .filter(|start| (first..=last).contains(start))
            .filter_map(|start| {
                let epoch = self.reusable_after(id, (start, start + size), list)?;
                Some(Reusable {
                    block: id,
                    start,
                    epoch,
                })
            })
            .min_by_key(|it| (it.start != first && it.start != last, it.epoch, it.start))
    }

    /// Splits a free block so that this range is a free block of its own, of the same stream.
    fn carve_out(&mut self, id: BlockId, start: u64, size: u64) -> BlockId {
        let block = self.blocks[id];
        self.lists.get_mut(block.list).remove(&mut self.blocks, id);
        self.counters.free_block_removed(block.size);
        if start > block.address {
            let before = start - block.address;
            let front = self
                .blocks
                .split_front(id, before, block.list, BlockState::Free);
            self.reinsert_rest(front, block.detail);
        }
        let mut part = id;
        if self.blocks[id].size > size {
            part = self
                .blocks
                .split_front(id, size, block.list, BlockState::Free);
            self.reinsert_rest(id, block.detail);
        }
        self.reinsert_rest(part, block.detail);
        part
    }

    /// Frees the smallest pending block that fits to this stream, which waits for each stream that uses it.
    fn reuse_deferred_block(&mut self, size: u64, list: u16) -> Option<BlockId> {
        let key = self.lists.get(list).key;
        let can_wait_for = |it: &Deferred| {
            let owner = self.lists.get(self.blocks[it.block].list);
            let mut streams = it.uses.iter().chain([&owner.key]);
            // No event can be waited for that covers every stream.
            owner.arena == SHARED_ARENA
                && !it.uses.contains(&ALL_STREAMS)
                && self.blocks[it.block].size >= size
                && streams
                    .all(|other| *other == key || self.epochs.can_wait_for(key, *other, it.epoch))
        };
        let fitting = self.deferred.iter().enumerate();
        let fitting = fitting.filter(|(_, it)| can_wait_for(it));
        let (at, _) = fitting.min_by_key(|(_, it)| self.blocks[it.block].size)?;
        let Deferred { block, epoch, uses } = &self.deferred[at];
        let (block, epoch) = (*block, *epoch);
        let owner = self.lists.get(self.blocks[block].list).key;
        for other in uses.iter().chain([&owner]).filter(|other| **other != key) {
            if !self.epochs.wait_for(key, *other, epoch, &mut self.gpu) {
                return None;
            }
        }
        self.deferred.remove(at);
        self.end_deferral(block);
        let epoch = self.new_free_epoch(list);
        self.free_to_list(block, list, epoch);
        Some(self.best_fit(size, list)).filter(|id| *id != NONE)
    }
}
