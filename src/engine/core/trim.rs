//! Trimming: giving free chunks back to the driver, and unmapping stale mappings.

use super::block::{BlockId, NONE};
use super::chunk::ChunkId;
use super::gpu::Gpu;
use super::ids::{ArenaId, SHARED_ARENA, StreamKey, UNORDERED};
use super::memory_events::MemoryEvent;
use super::pool::Pool;
use super::stream_lists::FreeList;

impl<G: Gpu> Pool<G> {
    /// Unmaps stale mappings, the oldest first, until at most `bound` are left or the next one may still be
    /// in use. Polls events if it has to.
    pub(super) fn unmap_stale(&mut self, bound: usize, id: ArenaId) {
        if self.unmap_completed(bound, id) {
            self.epochs.poll(&mut self.gpu);
            self.unmap_completed(bound, id);
        }
    }

    /// [`Self::unmap_stale`] without polling. True where the next one may still be in use.
    pub(super) fn unmap_completed(&mut self, bound: usize, id: ArenaId) -> bool {
        let Self {
            epochs,
            gpu,
            counters,
            arenas,
            ..
        } = self;
        let arena = &mut arenas[id as usize];
        if id != SHARED_ARENA && !arena.closing {
            return false;
        }
        while arena.chunks.stale.len() > bound {
            let Some(old) = arena.chunks.stale.front().copied() else {
                return false;
            };
            if epochs.completed(old.stream) < old.until {
                return true;
            }
            arena.chunks.stale.pop_front();
            let size = arena.chunks.get(old.chunk).size;
            if gpu.unmap(old.address, size).is_err() {
                // It stays counted and is tried again later.
                counters.driver_errors += 1;
                arena.chunks.stale.push_back(old);
                return false;
            }
            arena.addresses.mark_unmapped(old.address, size);
            arena.chunks.get_mut(old.chunk).stale -= 1;
            counters.stale -= 1;
            counters.stale_bytes -= size;
        }
        false
    }

    /// Gives wholly free chunks of the shared arena and of closing arenas back to the driver. Waits for the
    /// device first unless all free memory is idle; does nothing in a capture, such as one of the stream that
    /// memory is wanted on, if it is for one. Returns the bytes of the shared arena given back.
    pub fn trim_all(&mut self, wanted_on: Option<StreamKey>) -> u64 {
        self.gpu.set_requesting_stream(wanted_on);
        self.reclaim_all();
        self.synchronize_frees();
        if self.gpu.may_wait() {
            self.retry_closing_arenas();
        }
        self.trim_closing_arenas();
        let bytes = self.trim(SHARED_ARENA);
        self.gpu.set_requesting_stream(None);
        bytes
    }

    /// Like [`Pool::trim_all`], for idle chunks of the shared arena only; never waits.
    pub fn trim_idle(&mut self) -> u64 {
        if self.granularity == 0 || !self.gpu.may_wait() {
            return 0;
        }
        self.reclaim_all();
        self.cover_arena(SHARED_ARENA);
        self.epochs.poll(&mut self.gpu);
        self.apply_completed();
        self.unmap_completed(0, SHARED_ARENA);
        self.release_idle(SHARED_ARENA)
    }

    /// Gives back the idle chunks, or plain segments, of one arena, without waiting. For a closing arena the
    /// caller has waited for the device: a graph may be replaying on streams that the pool does not know.
    pub(super) fn trim(&mut self, id: ArenaId) -> u64 {
        if !self.gpu.may_wait() {
            return 0;
        }
        if id != SHARED_ARENA {
            self.complete_deferred();
            self.make_arena_idle(id);
        }
        if self.is_plain_arena(id) {
            return self.trim_segments(id);
        }
        self.unmap_stale(0, id);
        self.release_idle(id)
    }

    /// Gives back the wholly idle chunks of an arena that have no stale mapping.
    fn release_idle(&mut self, id: ArenaId) -> u64 {
        let arena = &self.arenas[id as usize];
        // Unordered free blocks are idle too, but stay in their list: coalesced with a stream's free block
        // they would be that stream's.
        let is_idle = |at: u16, it: &FreeList| at == it.idle || it.key == UNORDERED;
        let lists = self.lists.of_arena(id);
        let lists = lists.filter(|(at, it)| is_idle(*at, it));
        let free_blocks =
            lists.flat_map(|(_, it)| it.bins.ascending(&self.blocks, self.granularity));
        let inside = |free_block: BlockId| {
            let block = &self.blocks[free_block];
            arena
                .chunks
                .within(block.address, block.end())
                .map(move |chunk| (free_block, chunk))
        };
        let found: Vec<(BlockId, ChunkId)> = free_blocks.flat_map(inside).collect();
        let mut bytes = 0;
        for (free_block, chunk_id) in found {
            let chunk = *self.arenas[id as usize].chunks.get(chunk_id);
            if chunk.stale == 0 && self.release_chunk(free_block, chunk_id, id) {
                bytes += chunk.size;
            }
        }
        self.reset_cursor(id);
        bytes
    }

    /// Where the run that grew is gone, growth goes on from the start of the gap that it leaves.
    pub(super) fn reset_cursor(&mut self, id: ArenaId) {
        let arena = &mut self.arenas[id as usize];
        if arena.tail == NONE {
            arena.cursor = arena.addresses.gap_start(arena.cursor);
        }
    }

    /// Gives a chunk back that lies wholly in an idle free block and has no stale mapping. False where the
    /// driver refuses to unmap it.
    pub(super) fn release_chunk(
        &mut self,
        free_block: BlockId,
        chunk_id: ChunkId,
        id: ArenaId,
    ) -> bool {
        let chunk = *self.arenas[id as usize].chunks.get(chunk_id);
        if self.gpu.unmap(chunk.address, chunk.size).is_err() {
            self.counters.driver_errors += 1;
            return false;
        }
        self.remove_range(free_block, chunk.address, chunk.size);
        self.gpu.release(chunk.handle, chunk.size);
        let arena = &mut self.arenas[id as usize];
        arena.addresses.mark_unmapped(chunk.address, chunk.size);
        arena.chunks.remove(chunk_id);
        arena.reserved -= chunk.size;
        arena.bytes.remove(chunk.size);
        self.counters.chunk_removed(chunk.size);
        self.event_log
            .push(MemoryEvent::SegmentUnmapped(chunk.address, chunk.size));
        true
    }
}
