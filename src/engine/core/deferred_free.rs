//! Deferred frees: blocks that other streams still use when they are freed, event polling, and synchronizing
//! with the device.

use super::arena::{ArenaId, SHARED_ARENA};
use super::block::{BlockId, BlockState, NONE};
use super::counters::Origin;
use super::gpu::Gpu;
use super::memory_events::MemoryEvent;
use super::pool::{Pool, Unknown};
use super::stream_lists::{ALL_STREAMS, FreeList, StreamKey, UNORDERED};
use std::collections::HashSet;

/// How often a miss asks for an event that it has just recorded: on an idle device it takes a few
/// microseconds to pass, which is less than any other way to memory.
const POLLS: usize = 4;

/// From how many streams on one event of the whole device is recorded rather than one of each.
const SEVERAL: usize = 8;

/// A block that was freed while other streams may still use it.
pub(super) struct Deferred {
    pub block: BlockId,
    /// The epoch of the free.
    pub epoch: u64,
    pub uses: Vec<StreamKey>,
}

impl<G: Gpu> Pool<G> {
    /// Notes that another stream uses the block, so that freeing it waits for that stream's work too;
    /// for [`ALL_STREAMS`] for the whole device's.
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

    /// The stream that is recorded is another device's.
    pub fn add_foreign_stream(&mut self, stream: StreamKey) {
        self.epochs.add_foreign_stream(stream);
    }

    /// Whether the stream is another device's.
    pub fn is_foreign(&self, stream: StreamKey) -> bool {
        self.epochs.is_foreign(stream)
    }

    /// Takes back a block in the order of another stream than its own, which was recorded on it.
    pub fn free_from_other_stream(&mut self, address: u64) -> Result<(), Unknown> {
        self.epochs.off_stream = true;
        let freed = self.free(address);
        self.epochs.off_stream = false;
        freed.map(drop)
    }

    /// A freed block that other streams were recorded on is deferred until their work up to now is done.
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
        // Whom nobody named may be anyone.
        let uses = self
            .stream_uses
            .remove(&id)
            .unwrap_or_else(|| vec![ALL_STREAMS]);
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

    /// What the block is called that was deferred last, as long as it is.
    pub fn last_deferred_epoch(&self) -> Option<u64> {
        self.deferred.last().map(|it| it.epoch)
    }

    /// What its own stream does from now on comes after all that other streams do with a deferred block, by
    /// this name: that stream has it again. Nothing where it is deferred no more.
    pub fn reclaim_deferred(&mut self, name: u64) {
        // No two frees have the same epoch, and they are in its order.
        let found = self.deferred.binary_search_by_key(&name, |it| it.epoch);
        if let Ok(at) = found {
            let block = self.deferred.remove(at).block;
            let list = self.blocks[block].list;
            self.end_deferral(block);
            let epoch = self.new_free_epoch(list);
            self.free_to_list(block, list, epoch);
        }
    }

    /// A stream is about to be destroyed: an event is recorded behind all that it was given.
    pub fn before_stream_destroy(&mut self, stream: StreamKey) {
        let lists = self.lists.iter().filter(|(_, it)| it.key == stream);
        if let Some(freed) = lists.map(|(_, it)| it.freed).max() {
            self.gpu.set_requesting_stream(Some(stream));
            self.epochs.cover(stream, freed, &mut self.gpu);
            self.gpu.set_requesting_stream(None);
        }
    }

    /// Whether the free list's stream has done what it had been given by a free of this epoch.
    pub(super) fn is_completed(&self, list: u16, epoch: u64) -> bool {
        epoch <= self.epochs.completed(self.lists.get(list).key)
    }

    /// Looks at the events under way, and lets go what they held up. True if any free block changed
    /// hands or any block came free.
    pub(super) fn poll_streams(&mut self, list: u16) -> bool {
        if self.deferred.is_empty() && self.lists.streams() < 2 {
            return false;
        }
        let arena = self.lists.get(list).arena;
        let free = self.lists.stream_lists_of(arena);
        let free = free.filter(|(_, it)| !it.bins.is_empty());
        let streams: Vec<(StreamKey, u64)> = free.map(|(_, it)| (it.key, it.freed)).collect();
        if streams.len() > SEVERAL {
            // Where it can be recorded, none of the others is.
            self.epochs
                .cover(ALL_STREAMS, self.epochs.now, &mut self.gpu);
        }
        for (key, freed) in &streams {
            self.epochs.cover(*key, *freed, &mut self.gpu);
        }
        self.epochs.cover_uncovered(&mut self.gpu);
        self.epochs.poll(&mut self.gpu);
        for _ in 0..POLLS {
            let epochs = &mut self.epochs;
            let Some((key, _)) = streams.iter().find(|(key, _)| !epochs.has_no_event(*key)) else {
                break;
            };
            epochs.poll_stream(*key, &mut self.gpu);
        }
        self.apply_completed()
    }

    /// Has events cover all that was freed in an arena.
    pub(super) fn cover_arena(&mut self, arena: ArenaId) {
        let lists = self
            .lists
            .of_arena(arena)
            .filter(|(at, it)| *at != it.idle && it.key != UNORDERED && it.has_free());
        let lists: Vec<(StreamKey, u64)> = lists.map(|(_, it)| (it.key, it.freed)).collect();
        for (key, freed) in lists {
            self.epochs.cover(key, freed, &mut self.gpu);
        }
        self.epochs.cover_uncovered(&mut self.gpu);
    }

    /// Has an event cover the work that uses the newest of an arena's old mappings.
    pub(super) fn cover_stale(&mut self, arena: ArenaId) {
        let newest = self.arenas[arena as usize].chunks.stale.back();
        if let Some((stream, until)) = newest.map(|it| (it.stream, it.until)) {
            self.epochs.cover(stream, until, &mut self.gpu);
        }
    }

    /// With memory of several streams, or deferred blocks, one event for each 16th of the memory freed, and
    /// at least a chunk of it, lets others have it soon.
    ///
    /// True if a block came free that was deferred: another free block may be the best now.
    #[inline(always)]
    pub(super) fn poll_if_due(&mut self, by: u16, reserved: u64) -> bool {
        let least = (reserved / 16).max(self.granularity);
        self.epochs.freed_since_event > least && self.poll_events(by, least)
    }

    /// While blocks are deferred, also at every allocation whose number is a power of two, counted from when
    /// the first of them was freed, or one came free. That is a question a block where the device keeps up,
    /// and a few questions in all where it is far behind.
    #[cold]
    #[inline(never)]
    fn poll_events(&mut self, by: u16, least: u64) -> bool {
        let deferred = !self.deferred.is_empty();
        self.epochs.set_deferred(deferred);
        self.allocations_while_deferred += u64::from(deferred);
        let due =
            deferred && self.allocations_while_deferred.is_power_of_two() && self.gpu.may_wait();
        let much = self.epochs.has_freed_since_event(least);
        let asked = self.epochs.take_poll_request();
        let wanted = asked || much && (deferred || self.lists.several_in_use());
        if !(wanted || due) {
            if much {
                self.epochs.reset_freed_since_event();
            }
            return false;
        }
        let list = self.lists.get(by);
        let (key, arena, freed) = (list.key, list.arena, list.freed);
        self.gpu.set_requesting_stream(Some(key));
        match wanted {
            true => self.epochs.poll(&mut self.gpu),
            false => {
                let uses = self.deferred.iter().flat_map(|it| &it.uses);
                let uses: HashSet<StreamKey> = uses.copied().collect();
                for stream in uses {
                    self.epochs.poll_stream(stream, &mut self.gpu);
                }
            }
        }
        let came = due && self.complete_deferred();
        if came {
            // It keeps up: so the count begins anew, or where some block is always deferred it would never
            // end.
            self.allocations_while_deferred = 0;
        }
        if asked {
            self.cover_arena(arena);
        }
        if wanted && (key == UNORDERED || self.epochs.cover(key, freed, &mut self.gpu)) {
            self.epochs.reset_freed_since_event();
        }
        if due {
            self.epochs.cover_uncovered(&mut self.gpu);
        }
        self.gpu.set_requesting_stream(None);
        came
    }

    /// What streams have done with becomes free or idle. True if there was any. Of a private pool's that is
    /// looked at when memory is wanted there.
    pub(super) fn apply_completed(&mut self) -> bool {
        if self.arenas[SHARED_ARENA as usize].idle_as_of == self.epochs.advances {
            return false;
        }
        self.epochs.drop_finished_streams();
        self.complete_deferred() | self.make_completed_idle(SHARED_ARENA)
    }

    /// Deferred blocks that no stream uses any more become free. True if there were any.
    pub(super) fn complete_deferred(&mut self) -> bool {
        let mut done = Vec::new();
        let epochs = &self.epochs;
        self.deferred.retain(|it| {
            let over = it
                .uses
                .iter()
                .all(|use_| it.epoch <= epochs.completed(*use_));
            if over {
                done.push((it.block, it.epoch));
            }
            !over
        });
        for (block, epoch) in &done {
            self.end_deferral(*block);
            let list = self.blocks[*block].list;
            match self.is_completed(list, *epoch) {
                true => self.free_to_list(*block, self.lists.get(list).idle, 0),
                false => self.free_to_list(*block, list, *epoch),
            }
        }
        !done.is_empty()
    }

    /// A block that was freed waits for no other stream any more; it is to become a free block.
    pub(super) fn end_deferral(&mut self, id: BlockId) {
        let block = self.blocks[id];
        let origin = block.flags.origin();
        self.counters
            .deferred_completed(origin, block.size, block.detail);
        // What is written down is PyTorch's history.
        if origin == Origin::Cuda {
            return;
        }
        self.event_log.push(MemoryEvent::FreeCompleted {
            address: block.address,
            size: block.detail,
            stream: self.lists.get(block.list).key.handle,
        });
    }

    /// What no stream orders is idle as it is, and becomes anybody's.
    fn make_unordered_idle(&mut self) {
        let lists = self.lists_not_idle().filter(|(_, it)| it.key == UNORDERED);
        let lists: Vec<u16> = lists.map(|(list, _)| list).collect();
        for list in lists {
            self.make_list_idle(list, u64::MAX);
        }
    }

    /// A free list's free blocks that were freed up to some epoch become idle. True if there were any.
    pub(super) fn make_list_idle(&mut self, list: u16, completed: u64) -> bool {
        let mut changed = false;
        self.lists.get_mut(list).start_order(&mut self.blocks);
        loop {
            let it = self.lists.get_mut(list);
            let Some(id) = it
                .oldest()
                .filter(|id| self.blocks[*id].detail <= completed)
            else {
                it.drop_order();
                return changed;
            };
            it.remove(&mut self.blocks, id);
            let idle = it.idle;
            self.counters.free_block_removed(self.blocks[id].size);
            self.add_free(id, idle, 0);
            changed = true;
        }
    }

    /// Waits until everything that was freed is idle. False where waiting is not possible.
    pub fn synchronize_frees(&mut self) -> bool {
        self.make_unordered_idle();
        let is_idle = |(list, it): (u16, &FreeList)| list == it.idle || it.bins.is_empty();
        if self.deferred.is_empty() && self.lists_not_idle().all(is_idle) {
            self.watch_private_arenas();
            return true;
        }
        self.counters.syncs += 1;
        if !self.gpu.synchronize() {
            return false;
        }
        self.after_synchronize();
        self.apply_completed();
        self.watch_private_arenas();
        true
    }

    /// The device has been waited for.
    pub(super) fn after_synchronize(&mut self) {
        let deferred = self.deferred.iter().map(|it| &it.uses);
        let uses: Vec<&Vec<StreamKey>> = self.stream_uses.values().chain(deferred).collect();
        let recorded = |key: &StreamKey| uses.iter().any(|it| it.contains(key));
        self.epochs.complete_all(&mut self.gpu, recorded);
    }

    /// The free lists of all arenas that may have free blocks which are not idle.
    fn lists_not_idle(&self) -> impl Iterator<Item = (u16, &FreeList)> {
        let arenas = [SHARED_ARENA]
            .into_iter()
            .chain(self.pending.with_frees.iter().copied());
        arenas.flat_map(|id| self.lists.of_arena(id))
    }

    /// All work is done: what private pools have free is idle, until more is freed there.
    fn watch_private_arenas(&mut self) {
        for id in std::mem::take(&mut self.pending.with_frees) {
            self.make_arena_idle(id);
            self.arenas[id as usize].notes_frees = true;
        }
    }
}
