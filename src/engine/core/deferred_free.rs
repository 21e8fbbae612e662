//! Deferred frees: a block that other streams use is free only once their work up to the free has completed.
//!
//! `record_use` names those streams, as `record_stream` does in PyTorch. Until then the block is *pending*.

use super::block::{BlockId, BlockState, NONE};
use super::counters::Origin;
use super::gpu::Gpu;
use super::ids::{ALL_STREAMS, StreamKey};
use super::memory_events::MemoryEvent;
use super::pool::{Deferred, Pool, Unknown};

impl<G: Gpu> Pool<G> {
    /// Records that another stream uses the block, so that freeing it is deferred until that stream's work
    /// has completed; for [`ALL_STREAMS`] the whole device's.
    pub fn record_use(&mut self, address: u64, stream: StreamKey) -> Result<(), Unknown> {
        let id = self.address_map.get(&self.blocks, address);
        if id == NONE {
            return Err(Unknown);
        }
        if self.lists.get(self.blocks[id].list).key != stream {
            self.blocks[id].flags.set_multi_stream(true);
            let uses = self.stream_uses.entry(id).or_default();
            if !uses.contains(&stream) {
                uses.push(stream);
            }
        }
        Ok(())
    }

    /// A recorded stream is another device's: events of this device do not cover its work.
    pub fn add_foreign_stream(&mut self, stream: StreamKey) {
        self.epochs.add_foreign_stream(stream);
    }

    /// Whether the stream is another device's.
    pub fn is_foreign(&self, stream: StreamKey) -> bool {
        self.epochs.is_foreign(stream)
    }

    /// Frees a block in the order of another stream than its own, one that was recorded on it.
    pub fn free_from_other_stream(&mut self, address: u64) -> Result<(), Unknown> {
        self.epochs.off_stream = true;
        let freed = self.free(address);
        self.epochs.off_stream = false;
        freed.map(drop)
    }

    /// Defers the free of a block that other streams use.
    #[cold]
    #[inline(never)]
    pub(super) fn defer(&mut self, id: BlockId) {
        let block = self.blocks[id];
        self.blocks[id].state = BlockState::Pending;
        self.counters
            .deferred(block.flags.origin(), block.size, block.detail);
        let epoch = self.epochs.tick(block.size);
        if self.deferred.is_empty() {
            self.allocations_while_deferred = 0;
        }
        self.epochs.set_deferred(true);
        // Marked without a name (`mark_multi_stream`): any stream may use it.
        let uses = self.stream_uses.remove(&id);
        let uses = uses.unwrap_or_else(|| vec![ALL_STREAMS]);
        for stream in &uses {
            self.epochs
                .record_free(*stream, (0, 0), true, &mut self.gpu);
        }
        let list = self.lists.get_mut(block.list);
        let before = std::mem::replace(&mut list.freed, epoch);
        if self.arenas[list.arena as usize].notes_frees {
            self.record_free(id, before);
        }
        self.deferred.push(Deferred {
            block: id,
            epoch,
            uses,
        });
    }

    /// The epoch of the last deferred free that is still pending; it names the block for
    /// [`Pool::reclaim_deferred`].
    pub fn last_deferred_epoch(&self) -> Option<u64> {
        self.deferred.last().map(|it| it.epoch)
    }

    /// Frees a pending block, if it still is, to its own stream without waiting for the others: the caller
    /// knows that what its stream does from now on comes after their work.
    pub fn reclaim_deferred(&mut self, epoch: u64) {
        let found = self.deferred.binary_search_by_key(&epoch, |it| it.epoch);
        if let Ok(at) = found {
            let block = self.deferred.remove(at).block;
            let list = self.blocks[block].list;
            self.end_deferral(block);
            let epoch = self.new_free_epoch(list);
            self.free_to_list(block, list, epoch);
        }
    }

    /// Frees the pending blocks whose streams' work has completed. True if there were any.
    pub(super) fn complete_deferred(&mut self) -> bool {
        let mut completed = Vec::new();
        let epochs = &self.epochs;
        self.deferred.retain(|it| {
            let mut uses = it.uses.iter();
            let is_completed = uses.all(|stream| it.epoch <= epochs.completed(*stream));
            if is_completed {
                completed.push((it.block, it.epoch));
            }
            !is_completed
        });
        for (block, epoch) in &completed {
            self.end_deferral(*block);
            let list = self.blocks[*block].list;
            match self.is_completed(list, *epoch) {
                true => self.free_to_list(*block, self.lists.get(list).idle, 0),
                false => self.free_to_list(*block, list, *epoch),
            }
        }
        !completed.is_empty()
    }

    /// Counts and logs that a block is pending no more. The caller makes it a free block.
    pub(super) fn end_deferral(&mut self, id: BlockId) {
        let block = self.blocks[id];
        let origin = block.flags.origin();
        self.counters
            .deferred_completed(origin, block.size, block.detail);
        // The log is for PyTorch's memory history.
        if origin == Origin::Cuda {
            return;
        }
        self.event_log.push(MemoryEvent::FreeCompleted {
            address: block.address,
            size: block.detail,
            stream: self.lists.get(block.list).key.handle,
        });
    }

    /// Makes a block that no other stream uses a free block of `list`, which is its own stream's, the idle
    /// one of its arena, or that of a stream that waits for its own; `epoch` is of that list's stream.
    pub(super) fn free_to_list(&mut self, id: BlockId, list: u16, epoch: u64) {
        let owner = self.lists.get_mut(self.blocks[id].list);
        owner.live -= 1;
        let arena = &mut self.arenas[owner.arena as usize];
        if arena.notes_frees && owner.arena != super::SHARED_ARENA {
            self.pending.on_free(arena, owner.arena, &self.gpu);
        }
        self.add_free(id, list, epoch);
    }
}
