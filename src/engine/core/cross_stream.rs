//! Cross-stream reuse: memory from another stream before its work is done. The stream that wants it is made
//! to wait on the GPU for the stream that freed it. Nothing waits on the host.
//!
//! CUDA's own pools do the same (`CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES`, on unless turned
//! off). What is waited for is an event recorded when the memory was freed, on the streams that used it:
//! a wait that covered anything submitted later might never end, as the later work may itself wait for what
//! the waiting stream has yet to do. Where there is no such event, memory grows instead.

use super::SMALL;
use super::arena::SHARED_ARENA;
use super::block::{BlockId, BlockState, NONE};
use super::deferred_free::Deferred;
use super::gpu::Gpu;
use super::pool::Pool;
use super::stream_lists::ALL_STREAMS;

/// How many free blocks of a stream are looked at for one that another stream can have.
const LOOKED_AT: usize = 16;

/// A part of a free block that another stream can have.
struct Reusable {
    block: BlockId,
    start: u64,
    /// Behind the other stream's work up to this free.
    epoch: u64,
}

impl<G: Gpu> Pool<G> {
    /// A free block of at least `size` bytes that the stream may use behind a wait: another stream's, or one
    /// that was freed while others used it.
    pub(super) fn reuse_across_streams(&mut self, size: u64, list: u16) -> Option<BlockId> {
        // A captured graph's streams are nobody's to hold up.
        if !self.policy.waits || self.lists.get(list).arena != SHARED_ARENA {
            return None;
        }
        let block = self.reuse_free_block(size, list);
        let block = block.or_else(|| self.reuse_deferred_block(size, list));
        self.counters.hits += u64::from(block.is_some());
        block
    }

    /// A stream wants memory, and others have some: from now on large frees get events that could be waited for.
    pub(super) fn request_free_events(&mut self, list: u16) {
        if self.policy.waits
            && self.lists.get(list).arena == SHARED_ARENA
            && (self.lists.others_with_free(list).next().is_some() || !self.deferred.is_empty())
            && self.epochs.request_free_events(&self.gpu)
        {
            self.arenas[SHARED_ARENA as usize].notes_frees = true;
        }
    }

    /// Whether a block of this size is to be freed at once, and not by a stream cache later: an event of its
    /// own tells others when it was.
    #[inline]
    pub fn needs_free_event(&self, size: u64) -> bool {
        size >= SMALL
            && self.arenas[SHARED_ARENA as usize].notes_frees
            && self.has_several_streams()
    }

    /// Whether there is another stream that might want memory.
    pub(super) fn has_several_streams(&self) -> bool {
        self.lists.streams() > 1 || self.gpu.has_several_streams()
    }

    /// The stream's work from now on runs after that of another one up to a free. False where it cannot be
    /// made to.
    pub(super) fn wait_for(&mut self, list: u16, other: u16, epoch: u64) -> bool {
        let (key, other) = (self.lists.get(list).key, self.lists.get(other).key);
        self.epochs.wait_for(key, other, epoch, &mut self.gpu)
    }

    /// The epoch of the other stream's after which this one may have a range of a free block; None where
    /// that cannot be told.
    pub(super) fn reusable_after(
        &self,
        block: BlockId,
        range: (u64, u64),
        list: u16,
    ) -> Option<u64> {
        let (key, block) = (self.lists.get(list).key, self.blocks[block]);
        let owner = self.lists.get(block.list);
        let followable = |epoch: &u64| self.epochs.can_wait_for(key, owner.key, *epoch);
        // Freed in one piece: it has one event, if any.
        Some(block.detail)
            .filter(|epoch| epoch & 1 == 0 && followable(epoch))
            .or_else(|| {
                let last = self.epochs.last_free(owner.key, range, owner.freed);
                last.filter(followable)
            })
    }

    /// What another stream's memory that this one has taken is called: freed by this one just now.
    pub(super) fn new_free_epoch(&mut self, list: u16) -> u64 {
        let epoch = self.epochs.tick(0);
        self.lists.get_mut(list).freed = epoch;
        epoch
    }

    /// The best fit among the free blocks of the arena's other streams. What is left of it stays theirs.
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
    /// what is left stays whole, or else between them, after the earliest free that there is.
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

    /// Makes a part of a free block one of its own, of the same stream.
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

    /// The smallest block that was freed while other streams used it, behind waits for each of them.
    fn reuse_deferred_block(&mut self, size: u64, list: u16) -> Option<BlockId> {
        let key = self.lists.get(list).key;
        let can_wait_for = |it: &Deferred| {
            let owner = self.lists.get(self.blocks[it.block].list);
            let mut streams = it.uses.iter().chain([&owner.key]);
            // What may be used anywhere is nobody's to wait for.
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
