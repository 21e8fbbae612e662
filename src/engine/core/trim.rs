//! Giving memory back to the driver, and taking old mappings down.

use super::arena::{GroupId, SHARED};
use super::block::{BlockId, NONE};
use super::chunk::ChunkId;
use super::gpu::Gpu;
use super::journal::Happening;
use super::pool::Pool;
use super::stream_lists::{Slot, StreamKey, UNORDERED};

impl<G: Gpu> Pool<G> {
    /// Takes old mappings down, the oldest first, until at most `bound` are left or the next one
    /// may still be in use.
    pub(super) fn unmap_stale(&mut self, bound: usize, id: GroupId) {
        if self.unmap_passed(bound, id) {
            self.epochs.poll(&mut self.gpu);
            self.unmap_passed(bound, id);
        }
    }

    /// The same as far as is known without asking. True where the next one may still be in use.
    pub(super) fn unmap_passed(&mut self, bound: usize, id: GroupId) -> bool {
        let Self {
            epochs,
            gpu,
            counters,
            groups,
            ..
        } = self;
        let group = &mut groups[id as usize];
        if id != SHARED && !group.closing {
            return false;
        }
        while group.chunks.stale.len() > bound {
            let Some(old) = group.chunks.stale.front().copied() else {
                return false;
            };
            if epochs.completed(old.stream) < old.until {
                return true;
            }
            group.chunks.stale.pop_front();
            let size = group.chunks.get(old.chunk).size;
            if gpu.unmap(old.address, size).is_err() {
                // Nothing is lost: the mapping stays counted and is tried again.
                counters.driver_errors += 1;
                group.chunks.stale.push_back(old);
                return false;
            }
            group.space.give(old.address, size);
            group.chunks.get_mut(old.chunk).stale -= 1;
            counters.stale -= 1;
            counters.stale_bytes -= size;
        }
        false
    }

    /// Gives every chunk of everybody's memory, and of groups that are closing, back to the driver
    /// where it is wholly free and idle. Waits for the device first where something free is not
    /// idle yet; does nothing in a capture, such as one of the stream that memory is wanted on, if
    /// it is for one. Returns the bytes given back.
    pub fn trim_all(&mut self, wanted_on: Option<StreamKey>) -> u64 {
        self.gpu.attend(wanted_on);
        self.wake_all();
        self.settle();
        if self.gpu.may_wait() {
            self.let_closing_go();
        }
        self.trim_closing();
        let bytes = self.trim(SHARED);
        self.gpu.attend(None);
        bytes
    }

    /// The same of what is known to be idle now, of everybody's memory. Never waits.
    pub fn trim_idle(&mut self) -> u64 {
        if self.granularity == 0 || !self.gpu.may_wait() {
            return 0;
        }
        self.wake_all();
        self.cover_all(SHARED);
        self.epochs.poll(&mut self.gpu);
        self.let_go();
        self.unmap_passed(0, SHARED);
        self.give_idle_back(SHARED)
    }

    /// The same for one group, without waiting. For a group that is closing the caller has waited
    /// for the device: a graph may be replaying on streams that the pool knows nothing of.
    pub(super) fn trim(&mut self, id: GroupId) -> u64 {
        if !self.gpu.may_wait() {
            return 0;
        }
        if id != SHARED {
            self.let_deferred_go();
            self.release_all(id);
        }
        if self.is_plain_group(id) {
            return self.trim_segments(id);
        }
        self.unmap_stale(0, id);
        self.give_idle_back(id)
    }

    /// Gives back the chunks of a group that are idle as a whole and have no other mapping.
    fn give_idle_back(&mut self, id: GroupId) -> u64 {
        let group = &self.groups[id as usize];
        // Joined with a stream's hole, what no stream orders would be that stream's: it stays where it is.
        let is_idle = |at: u16, it: &Slot| at == it.idle || it.key == UNORDERED;
        let slots = self.slots.of_group(id);
        let slots = slots.filter(|(at, it)| is_idle(*at, it));
        let holes = slots.flat_map(|(_, it)| it.bins.ascending(&self.blocks, self.granularity));
        let inside = |hole: BlockId| {
            let block = &self.blocks[hole];
            group
                .chunks
                .inside(block.address, block.end())
                .map(move |chunk| (hole, chunk))
        };
        let found: Vec<(BlockId, ChunkId)> = holes.flat_map(inside).collect();
        let mut bytes = 0;
        for (hole, chunk_id) in found {
            let chunk = *self.groups[id as usize].chunks.get(chunk_id);
            if chunk.stale == 0 && self.give_back(hole, chunk_id, id) {
                bytes += chunk.size;
            }
        }
        self.start_where_the_gap_does(id);
        bytes
    }

    /// Where the last run is gone, its addresses are used again from where their gap begins.
    pub(super) fn start_where_the_gap_does(&mut self, id: GroupId) {
        let group = &mut self.groups[id as usize];
        if group.tail == NONE {
            group.cursor = group.space.gap_start(group.cursor);
        }
    }

    /// Gives a chunk back that lies wholly in an idle hole and has no other mapping. False where the driver
    /// does not take its mapping down.
    pub(super) fn give_back(&mut self, hole: BlockId, chunk_id: ChunkId, id: GroupId) -> bool {
        let chunk = *self.groups[id as usize].chunks.get(chunk_id);
        if self.gpu.unmap(chunk.home, chunk.size).is_err() {
            self.counters.driver_errors += 1;
            return false;
        }
        self.cut(hole, chunk.home, chunk.size);
        self.gpu.release(chunk.handle, chunk.size);
        let group = &mut self.groups[id as usize];
        group.space.give(chunk.home, chunk.size);
        group.chunks.remove(chunk_id);
        group.reserved -= chunk.size;
        self.counters.chunk_removed(chunk.size);
        self.journal
            .note(Happening::Unmapped(chunk.home, chunk.size));
        true
    }
}
