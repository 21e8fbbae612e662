//! Opening and closing private arenas.
//!
//! A closed arena gives its memory back as soon as no work uses it: at once where the device can be waited
//! for, else at a later miss, once an event recorded behind the close has completed.

use super::arena::Arena;
use super::gpu::Gpu;
use super::ids::{ALL_STREAMS, ArenaId};
use super::pool::Pool;

impl<G: Gpu> Pool<G> {
    /// Opens an arena that shares no memory with others. Its memory is `supplied`
    /// ([`Pool::add_supplied_segment`]) or the driver's. `None` when there are too many.
    pub fn open_arena(&mut self, supplied: bool) -> Option<ArenaId> {
        let vacant = self.vacant_arenas.last().copied();
        let id = match vacant {
            Some(id) => id,
            None => ArenaId::try_from(self.arenas.len()).ok()?,
        };
        let mut arena = Arena::new(self.lists.add_idle(id)?, self.granularity, supplied);
        arena.notes_frees = true;
        match vacant {
            Some(id) => {
                self.vacant_arenas.pop();
                self.arenas[id as usize] = arena;
            }
            None => self.arenas.push(arena),
        }
        Some(id)
    }

    /// Nobody allocates from the arena any more. What is free is given back now if the device can be waited
    /// for, and the rest by later calls of [`Pool::trim_closing_arenas`] and later misses.
    pub fn close_arena(&mut self, id: ArenaId) {
        let arena = &mut self.arenas[id as usize];
        (arena.closing, arena.notes_frees) = (true, true);
        self.pending.to_trim.push(id);
        self.trim_closing_arenas();
    }

    /// Gives back what closing arenas have free, if that may be more than the last time. Waits for the
    /// device; does nothing in a capture.
    pub fn trim_closing_arenas(&mut self) {
        if self.pending.to_trim.is_empty() || !self.gpu.synchronize() {
            return;
        }
        self.after_synchronize();
        self.trim_first_closing(self.pending.to_trim.len());
    }

    /// Like [`Pool::trim_closing_arenas`], for arenas whose work is known to have completed. Never waits.
    pub(super) fn trim_closing_completed(&mut self) {
        if self.pending.to_trim.is_empty() || !self.gpu.may_wait() {
            return;
        }
        if self.pending.trim_epoch == (0, 0) {
            // A graph may have been replayed since the last free: the event has to come after that.
            let epoch = self.epochs.tick(0);
            if !self.epochs.cover(ALL_STREAMS, epoch, &mut self.gpu) {
                return;
            }
            self.pending.trim_epoch = (epoch, self.pending.to_trim.len());
        }
        self.epochs.poll_stream(ALL_STREAMS, &mut self.gpu);
        let (epoch, count) = self.pending.trim_epoch;
        if self.epochs.completed(ALL_STREAMS) >= epoch {
            self.trim_first_closing(count.min(self.pending.to_trim.len()));
        }
    }

    /// Trims the first `count` of the arenas to be trimmed. Their work has completed.
    fn trim_first_closing(&mut self, count: usize) {
        self.pending.trim_epoch = (0, 0);
        let rest = self.pending.to_trim.split_off(count);
        let to_trim = std::mem::replace(&mut self.pending.to_trim, rest);
        for id in to_trim {
            let arena = &self.arenas[id as usize];
            // The id may be another arena's by now.
            if !arena.closing || arena.removed {
                continue;
            }
            if !arena.captured {
                self.trim(id);
                self.remove_if_empty(id);
            }
            let arena = &mut self.arenas[id as usize];
            if !arena.removed && (arena.captured || arena.live == 0) {
                // A captured graph may use it, or the driver refused to unmap a part.
                self.pending.queue_for_later(arena, id);
            }
        }
        // Deferred frees may have completed meanwhile and queued an arena that is gone.
        let arenas = &self.arenas;
        self.pending
            .to_trim
            .retain(|id| !arenas[*id as usize].removed);
    }

    /// Queues every closing arena that still has memory, those with blocks freed in a capture too.
    pub(super) fn retry_closing_arenas(&mut self) {
        for id in std::mem::take(&mut self.pending.to_trim_later) {
            let arena = &mut self.arenas[id as usize];
            (arena.queued_for_trim, arena.captured) = (false, false);
            self.pending.to_trim.push(id);
        }
    }

    /// Removes a closing arena that has no memory any more. Its id is used again.
    fn remove_if_empty(&mut self, id: ArenaId) {
        let arena = &mut self.arenas[id as usize];
        if !arena.closing || arena.removed || arena.reserved > 0 || arena.live > 0 {
            return;
        }
        arena.release_addresses(&mut self.gpu);
        (arena.abandoned, arena.removed) = (0, true);
        self.lists.remove_arena(id);
        self.vacant_arenas.push(id);
    }
}
