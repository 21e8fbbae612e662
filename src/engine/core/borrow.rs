//! Memory from other streams before their work is done: the stream that wants it is made to wait for
//! them, on the GPU. Nothing waits on the host.
//!
//! CUDA's own pools have the stream wait for the one that freed the memory
//! (`CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES`, on unless turned off). Here it waits for all work
//! that was submitted to the device by then: the stream that freed may be gone, and a handle of a stream
//! that is gone must not be touched. Behind a kernel that never ends such a wait does not end either,
//! which is why there is a setting against it.

use super::block::{BlockId, NONE};
use super::gpu::Gpu;
use super::group::SHARED;
use super::pool::Pool;

impl<G: Gpu> Pool<G> {
    /// A hole that holds `size` bytes and that the stream may use behind a wait: another stream's, or
    /// one that appears when blocks are let go that streams may still use.
    pub(super) fn borrow(&mut self, size: u64, slot: u16) -> Option<BlockId> {
        // A captured graph's streams are nobody's to hold up.
        if self.slots.get(slot).group != SHARED {
            return None;
        }
        let hole = self.lend(size, slot);
        let hole = hole.or_else(|| self.take_over_pending(size, slot));
        self.counters.hits += u64::from(hole.is_some());
        hole
    }

    /// The stream's work from now on runs after all work before what was freed up to `until`. False
    /// where it cannot be made to.
    pub(super) fn follow(&mut self, slot: u16, until: u64) -> bool {
        let stream = self.slots.get(slot);
        if until <= stream.follows.max(self.clock.passed) {
            return true;
        }
        if !self.policy.waits {
            return false;
        }
        let key = stream.key;
        match self.clock.covering(until, &mut self.gpu) {
            Some((event, covered)) if self.gpu.order(event, key) => {
                self.slots.get_mut(slot).follows = covered;
                true
            }
            _ => false,
        }
    }

    /// The best fit among the holes of the group's other streams. What the block leaves of the hole
    /// stays the other stream's.
    fn lend(&mut self, size: u64, slot: u16) -> Option<BlockId> {
        let others = self.slots.beside(slot);
        let hole = others
            .map(|(_, it)| it.bins.best(&self.blocks, size))
            .filter(|id| *id != NONE)
            .min_by_key(|id| (self.blocks[*id].size, self.blocks[*id].address))?;
        self.follow(slot, self.blocks[hole].detail).then_some(hole)
    }

    /// Freed blocks that other streams may still use become the stream's, the oldest first, until one
    /// of them makes a hole that is large enough.
    fn take_over_pending(&mut self, size: u64, slot: u16) -> Option<BlockId> {
        let group = self.slots.get(slot).group;
        let mut at = 0;
        while let Some(pending) = self.pending.get(at).copied() {
            if self.slots.get(self.blocks[pending.block].slot).group != group {
                at += 1;
                continue;
            }
            if !self.follow(slot, pending.until) {
                return None;
            }
            self.pending.remove(at);
            self.complete(pending.block);
            self.retire_to(pending.block, slot, pending.until);
            let hole = self.fit(size, slot);
            if hole != NONE {
                return Some(hole);
            }
        }
        None
    }
}
