//! Completion: recording and polling events, and synchronizing with the device.
//!
//! Free memory whose work has completed becomes *idle*: it goes to its arena's idle list, from which every
//! stream may take it.

use super::epoch::Epochs;
use super::gpu::Gpu;
use super::ids::{ALL_STREAMS, ArenaId, SHARED_ARENA, StreamKey, UNORDERED};
use super::pool::Pool;
use super::stream_lists::FreeList;
use std::collections::HashSet;

/// How often a miss polls an event that it has just recorded: on an idle device that takes a few microseconds
/// to complete, less than any later rung of the ladder.
const POLLS: usize = 4;

/// From how many streams on one event of the whole device is recorded rather than one on each.
const MANY_STREAMS: usize = 8;

impl<G: Gpu> Pool<G> {
    /// Polls now and then, at an allocation that found a free block: where there are several streams once for
    /// each 16th of the reserved memory that is freed, so that other streams have it soon; while frees are
    /// deferred see [`Self::poll_events`].
    ///
    /// True if a deferred free completed: another free block may be the best fit now.
    #[inline(always)]
    pub(super) fn poll_if_due(&mut self, list: u16, reserved: u64) -> bool {
        let least = (reserved / 16).max(self.granularity);
        self.epochs.freed_since_event > least && self.poll_events(list, least)
    }

    /// While frees are deferred it polls also at every allocation whose number is a power of two, counted
    /// from when the first of them was deferred, or one completed. That is one poll a block where the device
    /// keeps up, and a few in all where it is far behind.
    #[cold]
    #[inline(never)]
    fn poll_events(&mut self, list: u16, least: u64) -> bool {
        let has_deferred = !self.deferred.is_empty();
        self.epochs.set_deferred(has_deferred);
        self.allocations_while_deferred += u64::from(has_deferred);
        let deferred_due = has_deferred
            && self.allocations_while_deferred.is_power_of_two()
            && self.gpu.may_wait();
        let freed_much = self.epochs.has_freed_since_event(least);
        let requested = self.epochs.take_poll_request();
        let all_due = requested || freed_much && (has_deferred || self.lists.several_in_use());
        if !(all_due || deferred_due) {
            if freed_much {
                self.epochs.reset_freed_since_event();
            }
            return false;
        }
        let owner = self.lists.get(list);
        let (key, arena, freed) = (owner.key, owner.arena, owner.freed);
        self.gpu.set_requesting_stream(Some(key));
        match all_due {
            true => self.epochs.poll(&mut self.gpu),
            false => {
                let uses = self.deferred.iter().flat_map(|it| &it.uses);
                let uses: HashSet<StreamKey> = uses.copied().collect();
                for stream in uses {
                    self.epochs.poll_stream(stream, &mut self.gpu);
                }
            }
        }
        let completed = deferred_due && self.complete_deferred();
        if completed {
            // The device keeps up: the count starts again, or it would never do so where some free is always
            // deferred.
            self.allocations_while_deferred = 0;
        }
        if requested {
            self.cover_arena(arena);
        }
        if all_due && (key == UNORDERED || self.epochs.cover(key, freed, &mut self.gpu)) {
            self.epochs.reset_freed_since_event();
        }
        if deferred_due {
            self.epochs.cover_uncovered(&mut self.gpu);
        }
        self.gpu.set_requesting_stream(None);
        completed
    }

    /// Records events behind the work of all streams that have free blocks in the list's arena, polls them,
    /// and applies what has completed. True if any block became idle or free.
    pub(super) fn poll_streams(&mut self, list: u16) -> bool {
        if self.deferred.is_empty() && self.lists.streams() < 2 {
            return false;
        }
        let arena = self.lists.get(list).arena;
        let lists = self.lists.stream_lists_of(arena);
        let lists = lists.filter(|(_, it)| !it.bins.is_empty());
        let streams: Vec<(StreamKey, u64)> = lists.map(|(_, it)| (it.key, it.freed)).collect();
        if streams.len() > MANY_STREAMS {
            // Where this event can be recorded the streams below are covered.
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
            let mut streams = streams.iter();
            let Some((key, _)) = streams.find(|(key, _)| !epochs.has_no_event(*key)) else {
                break;
            };
            epochs.poll_stream(*key, &mut self.gpu);
        }
        self.apply_completed()
    }

    /// Makes a private arena's free blocks idle as far as is known without polling. True if any became so.
    pub(super) fn poll_private_arena(&mut self, id: ArenaId) -> bool {
        id != SHARED_ARENA && self.make_completed_idle(id)
    }

    /// Has events cover the work of all streams that have free memory in an arena.
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

    /// Has an event cover the work that uses the newest of an arena's stale mappings.
    pub(super) fn cover_stale(&mut self, arena: ArenaId) {
        let newest = self.arenas[arena as usize].chunks.stale.back();
        if let Some((stream, until)) = newest.map(|it| (it.stream, it.until)) {
            self.epochs.cover(stream, until, &mut self.gpu);
        }
    }

    /// A stream is about to be destroyed: has an event cover all its work.
    pub fn before_stream_destroy(&mut self, stream: StreamKey) {
        let lists = self.lists.iter().filter(|(_, it)| it.key == stream);
        if let Some(freed) = lists.map(|(_, it)| it.freed).max() {
            self.gpu.set_requesting_stream(Some(stream));
            self.epochs.cover(stream, freed, &mut self.gpu);
            self.gpu.set_requesting_stream(None);
        }
    }

    /// Whether the list's stream has completed its work up to the free of this epoch.
    pub(super) fn is_completed(&self, list: u16, epoch: u64) -> bool {
        epoch <= self.epochs.completed(self.lists.get(list).key)
    }

    /// Applies what events have told: deferred frees complete, and free blocks of the shared arena become
    /// idle. True if there were any. Private arenas follow when memory is wanted there.
    pub(super) fn apply_completed(&mut self) -> bool {
        if self.arenas[SHARED_ARENA as usize].idle_as_of == self.epochs.advances {
            return false;
        }
        self.epochs.drop_finished_streams();
        self.complete_deferred() | self.make_completed_idle(SHARED_ARENA)
    }

    /// Makes an arena's free blocks idle whose work has completed, if any work has since the last call. True
    /// if there were any.
    pub(super) fn make_completed_idle(&mut self, id: ArenaId) -> bool {
        let advances = self.epochs.advances;
        std::mem::replace(&mut self.arenas[id as usize].idle_as_of, advances) != advances
            && self.make_lists_idle(id, |epochs, key| epochs.completed(key))
    }

    /// Makes all free blocks of an arena idle: the device has completed all its work.
    pub(super) fn make_arena_idle(&mut self, id: ArenaId) -> bool {
        self.make_lists_idle(id, |_, _| u64::MAX)
    }

    fn make_lists_idle(
        &mut self,
        id: ArenaId,
        completed: impl Fn(&Epochs, StreamKey) -> u64,
    ) -> bool {
        let lists = self.lists.stream_lists_of(id);
        let lists = lists.filter(|(_, it)| !it.bins.is_empty());
        let lists: Vec<(u16, u64)> = lists
            .map(|(list, it)| (list, completed(&self.epochs, it.key)))
            .collect();
        let mut changed = false;
        for (list, completed) in lists {
            changed |= self.make_list_idle(list, completed);
        }
        changed
    }

    /// Makes the free blocks of a list idle that were freed up to an epoch. True if there were any.
    fn make_list_idle(&mut self, list: u16, completed: u64) -> bool {
        let mut changed = false;
        self.lists.get_mut(list).start_order(&mut self.blocks);
        loop {
            let it = self.lists.get_mut(list);
            let oldest = it.oldest();
            let Some(id) = oldest.filter(|id| self.blocks[*id].detail <= completed) else {
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

    /// Makes free blocks idle that no stream orders; they are from the start.
    fn make_unordered_idle(&mut self) {
        let lists = self.lists_not_idle().filter(|(_, it)| it.key == UNORDERED);
        let lists: Vec<u16> = lists.map(|(list, _)| list).collect();
        for list in lists {
            self.make_list_idle(list, u64::MAX);
        }
    }

    /// Synchronizes with the device unless all free memory is idle, so that it is afterwards. False where
    /// waiting is not possible.
    pub fn synchronize_frees(&mut self) -> bool {
        self.make_unordered_idle();
        let is_idle = |(list, it): (u16, &FreeList)| list == it.idle || it.bins.is_empty();
        if self.deferred.is_empty() && self.lists_not_idle().all(is_idle) {
            self.settle_private_arenas();
            return true;
        }
        self.counters.syncs += 1;
        if !self.gpu.synchronize() {
            return false;
        }
        self.after_synchronize();
        self.apply_completed();
        self.settle_private_arenas();
        true
    }

    /// The device has been synchronized with: all work up to now has completed.
    pub(super) fn after_synchronize(&mut self) {
        let deferred = self.deferred.iter().map(|it| &it.uses);
        let uses: Vec<&Vec<StreamKey>> = self.stream_uses.values().chain(deferred).collect();
        let is_recorded = |key: &StreamKey| uses.iter().any(|it| it.contains(key));
        self.epochs.complete_all(&mut self.gpu, is_recorded);
    }

    /// The lists of all arenas that may have free blocks which are not idle.
    fn lists_not_idle(&self) -> impl Iterator<Item = (u16, &FreeList)> {
        let arenas = [SHARED_ARENA]
            .into_iter()
            .chain(self.pending.with_frees.iter().copied());
        arenas.flat_map(|id| self.lists.of_arena(id))
    }

    /// All work has completed: what private arenas have free is idle, until more is freed there.
    fn settle_private_arenas(&mut self) {
        for id in std::mem::take(&mut self.pending.with_frees) {
            self.make_arena_idle(id);
            self.arenas[id as usize].notes_frees = true;
        }
    }
}
