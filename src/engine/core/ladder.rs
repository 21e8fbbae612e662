//! The ladder: every step of a request that no free block meets, in the order in which they are tried.
//!
//! Above it stand the steps that need more than one pool (`device`); below it the fast path, which hands out
//! the best fit of the free blocks ([`Pool::allocate_free`]).

use super::block::BlockId;
use super::counters::Origin;
use super::gpu::{Gpu, Refusal};
use super::ids::{ArenaId, SHARED_ARENA};
use super::pool::Pool;
use super::shortage::Shortage;

impl<G: Gpu> Pool<G> {
    /// Finds or makes a free block of at least `size` bytes that the stream may use at once. Waits for the
    /// device as the last resort, and not in a capture.
    #[cold]
    #[inline(never)]
    pub(super) fn find_or_make_free(&mut self, size: u64, list: u16) -> Result<BlockId, Shortage> {
        let (key, arena) = (self.lists.get(list).key, self.lists.get(list).arena);
        self.gpu.set_requesting_stream(Some(key));
        let found = self.climb(size, list);
        self.gpu.set_requesting_stream(None);
        found.map_err(|refusal| self.shortage(size, arena, refusal))
    }

    /// Rungs 1 to 3, 9 and 10; [`Self::extend`] has 4 to 8. After each comment stands what counts the rung,
    /// besides `hits` for a free block that was found.
    fn climb(&mut self, size: u64, list: u16) -> Result<BlockId, Refusal> {
        let arena = self.lists.get(list).arena;
        // 1. Reclaim purged chunks: as many as are needed, or all where none fit. `reclaims`
        if self.reclaim(size, list)
            && let Some(free_block) = self.find_free(size, list)
        {
            self.counters.reclaims += 1;
            return Ok(free_block);
        }
        // 2. Poll events: what other streams freed becomes idle once their work has completed. `polls`
        if (self.poll_streams(list) | self.poll_private_arena(arena))
            && let Some(free_block) = self.find_free(size, list)
        {
            self.counters.polls += 1;
            return Ok(free_block);
        }
        self.request_free_events(list);
        // 3. Closed private arenas give back what no work uses any more. `device_frees`
        self.trim_closing_completed();
        // 4 to 8. Memory from the driver, from other streams, or remapped.
        match self.extend(size, list) {
            Ok(free_block) => return Ok(free_block),
            Err(refusal @ Refusal::Unsupplied(_)) => return Err(refusal),
            Err(Refusal::Failed(_)) => self.counters.driver_errors += 1,
            Err(_) => {}
        }
        // 9. Cross-stream reuse, also where 5 was skipped because growth was still within the slack.
        // `cross_stream_reuses`
        if let Some(free_block) = self.reuse_across_streams(size, list) {
            return Ok(free_block);
        }
        // 10. Synchronize with the device, so that all free memory is idle; free plain segments go back to
        // the driver. Then 4 to 8 again. `alloc_retries`, `syncs`
        self.counters.alloc_retries += 1;
        self.synchronize_frees();
        if let Some(free_block) = self.find_free(size, list) {
            return Ok(free_block);
        }
        if self.granularity == 0 && arena == SHARED_ARENA {
            self.trim_segments(arena);
        }
        self.extend(size, list)
    }

    /// Rungs 4 to 8: makes a free block of at least `size` bytes. In an arena of mapped memory that is the
    /// tail, the last block of the run that grows.
    pub(super) fn extend(&mut self, size: u64, list: u16) -> Result<BlockId, Refusal> {
        let arena = self.lists.get(list).arena;
        // 4. Where memory is not mapped, a plain segment: the driver's, or one that is supplied. `growths`
        if self.is_plain_arena(arena) {
            return self.add_segment(size, arena);
        }
        let slack = self.growth_within_slack(size, arena)?;
        // 5. Cross-stream reuse, where growth would exceed the slack. A wait on the GPU costs less than
        // mapping: in a run of prefetch_streams (H100) 38 waits rather than 16 spared 700 of 1,300 chunks
        // their remap. `cross_stream_reuses`
        if self.missing_bytes(size, list) > slack.bytes
            && let Some(free_block) = self.reuse_across_streams(size, list)
        {
            return Ok(free_block);
        }
        // 6. Remap whole free chunks to the tail, for what growth would exceed the slack by. `stitches`
        self.remap_beyond(slack, size, list)?;
        // 7. Create chunks for what is still missing: within the slack, or beyond it where too few chunks are
        // free or remapping takes too much time. `growths`
        if self.create_chunks(size, list).is_ok() {
            return Ok(self.arenas[arena as usize].tail);
        }
        // 8. The device or the limit has no more: remap every free chunk that helps, and create chunks for
        // the rest. `growth_refusals`
        self.counters.growth_refusals += 1;
        self.remap_missing(size, list)?;
        self.create_chunks(size, list)?;
        Ok(self.arenas[arena as usize].tail)
    }

    /// Makes one idle free block of at least `size` bytes ahead of need; any stream may have it.
    pub fn preallocate(&mut self, size: u64) -> Result<(), Refusal> {
        if size > super::LARGEST_REQUEST {
            return Err(Refusal::OutOfMemory);
        }
        let idle = self.arenas[SHARED_ARENA as usize].idle;
        self.extend(size.next_multiple_of(super::BLOCK), idle)
            .map(drop)
    }

    /// What the pool looks like to a request that it cannot meet. Walks all free blocks, except where the
    /// arena's memory is to be supplied first.
    pub fn shortage(&self, requested: u64, arena: ArenaId, refusal: Refusal) -> Shortage {
        let [live, live_cuda] =
            [Origin::Allocator, Origin::Cuda].map(|origin| self.counters.in_use(origin));
        let reserved = self.counters.reserved();
        if let Refusal::Unsupplied(_) = refusal {
            return Shortage {
                asked: requested,
                live,
                live_cuda,
                reserved,
                largest: 0,
                other_arenas: 0,
                chunk: 0,
                refusal,
            };
        }
        let others = self.arenas.iter().enumerate();
        let others = others.filter(|(at, _)| *at != arena as usize);
        Shortage {
            asked: requested,
            live: live + live_cuda,
            live_cuda,
            reserved,
            largest: self.largest_free(),
            other_arenas: others.map(|(_, it)| it.reserved - it.live).sum(),
            chunk: match self.granularity > 0 && arena == SHARED_ARENA {
                true => self.chunk_size(arena),
                false => 0,
            },
            refusal,
        }
    }
}
