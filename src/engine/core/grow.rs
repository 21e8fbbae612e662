//! Growth: creating chunks behind mapped memory, how large they are, and where the run that grows goes on.
//!
//! An arena's mapped memory lies in *runs* without a gap. One of them grows: the *cursor* is where its next
//! chunk is mapped, and the *tail* the block that ends there.

use super::block::{BlockId, BlockState, NONE};
use super::gpu::{Gpu, Refusal};
use super::ids::{ArenaId, SHARED_ARENA};
use super::memory_events::MemoryEvent;
use super::pool::Pool;

/// One request need not create more chunks than this, however little is reserved: llama_lora_ckpt then
/// reaches its peak with a quarter less of the driver's time. A larger part of a request costs memory: at 32
/// llama_serve reserves 1.0114 of what is live rather than 1.0090.
const CHUNKS_PER_REQUEST: u64 = 48;

/// The largest chunk that is created for the sake of a large request, in bytes. At 16 MiB llama_lora_ckpt,
/// with late work, reserves 1.012 of what is live rather than 1.009. A request for more than all that is
/// reserved is not bound by it.
const LARGEST_CHUNK: u64 = 8 << 20;

/// What a private arena reserves of addresses at first, in bytes, and each time as many again as it has: a
/// process has 47 bits of them, and a program may have a thousand private pools, one for each CUDA graph.
/// Nothing is remapped there, which would use addresses up.
const PRIVATE_RESERVATION: u64 = 64 << 20;

/// By how much chunks are larger where free memory is not fragmented, as a fraction: a chunk's cost does not
/// depend on its size. At 3/2 the traces take 3 % less of the driver's time from an empty pool; at 2, 5 %,
/// but two programs at once (`tests/workloads`) reserve 1.0304 of what is live rather than 1.0284.
const LARGER_CHUNKS: (u64, u64) = (3, 2);

/// Unfragmented: free bytes outside wholly free chunks are under 1/FRAGMENTED of the slack. At 1
/// prefetch_streams, with late work, reserves 1.011 of what is live rather than 1.009.
const FRAGMENTED: u64 = 2;

/// And 1/FREED_SHARE of what is live has been freed before, as a program that loads its weights is never
/// fragmented. Without it two programs at once reserve 1.032 of what is live rather than 1.026.
const FREED_SHARE: u64 = 2;

/// [`Tuning::share`](super::Tuning::share) under a limit, which makes waste dear: the smallest limit of
/// gpt2_varlen is 1.0043 of what is live, and 1.0055 with seven eighths of this.
const SHARE_UNDER_LIMIT: u64 = 2048;

/// A request of this many chunks goes to the run that misses least of it, or to one of its own, which has
/// addresses to spare behind it: the next request that is a little larger remaps only the difference.
/// llama_lora_ckpt takes 81 ms of driver calls for 15 more passes rather than 201. At 64 llama_serve reserves
/// 1.011 of what is live rather than 1.009.
const OWN_RUN: u64 = 128;

/// How many free blocks of a list are looked at for the run that misses least.
const LOOKED_AT: usize = 64;

/// How far memory may grow past the peak of live memory, as a part of that, where remapping takes too much
/// time: 2000 blocks of up to 16 MiB replaced at random need 1.15 of what is live to need no remapping.
const MAX_PAST_PEAK: u64 = 6;

/// It may only where reserved memory exceeds the slack already by this part of the peak of live memory: where
/// remapping keeps within the slack, it goes on.
const PAST_SLACK: u64 = 32;

/// How far an arena may grow for a request.
#[derive(Clone, Copy)]
pub(super) struct Slack {
    /// The peak of live bytes, this request included.
    peak: u64,
    /// The bytes that may be reserved: the peak and the slack above it.
    ceiling: u64,
    /// By how much memory may grow now to stay below that, in whole granules.
    pub bytes: u64,
}

/// The size of the first of equal chunks that give `bytes` in all, each about `size` and at most half as
/// large again. All are whole granules.
fn even_chunk(bytes: u64, size: u64, granularity: u64) -> u64 {
    let count = ((bytes + size / 2) / size).max(1);
    (bytes / count).next_multiple_of(granularity)
}

impl<G: Gpu> Pool<G> {
    /// How far the arena may grow for a request. Refuses one that cannot be met even with all free memory, so
    /// that it takes nothing first.
    pub(super) fn growth_within_slack(&mut self, size: u64, id: ArenaId) -> Result<Slack, Refusal> {
        let arena = &self.arenas[id as usize];
        let free = arena.reserved - arena.live;
        if size > free + 4 * self.chunk_size(id) {
            self.gpu.has_room(size - free)?;
        }
        let arena = &self.arenas[id as usize];
        let peak = arena.peak_live.max(arena.live + size);
        let ceiling = peak + peak * self.policy.tuning.slack / 1000;
        let bytes = ceiling.saturating_sub(arena.reserved) / self.granularity * self.granularity;
        Ok(Slack {
            peak,
            ceiling,
            bytes,
        })
    }

    /// Bytes that must be mapped at the cursor before the tail is a free block of `size` bytes that the
    /// stream may use.
    pub(super) fn missing_bytes(&self, size: u64, list: u16) -> u64 {
        let tail = self.arenas[self.lists.get(list).arena as usize].tail;
        match tail != NONE && self.is_usable(tail, list) {
            true => size.saturating_sub(self.blocks[tail].size),
            false => size,
        }
    }

    /// Whether the stream may use a free block at once.
    fn is_usable(&self, id: BlockId, list: u16) -> bool {
        let block = &self.blocks[id];
        block.state == BlockState::Free
            && (block.list == list || block.list == self.lists.get(list).idle)
    }

    /// Remaps free chunks to the tail, as many bytes as growth would exceed the slack by; first finds a run
    /// with addresses for the request.
    pub(super) fn remap_beyond(
        &mut self,
        slack: Slack,
        size: u64,
        list: u16,
    ) -> Result<(), Refusal> {
        let id = self.lists.get(list).arena;
        if self.missing_bytes(size, list) > slack.bytes {
            self.choose_run(size, list);
        }
        let missing = self.missing_bytes(size, list);
        let tail = self.arenas[id as usize].tail;
        let allowed = match missing > slack.bytes && self.prefers_growth(missing, slack, id) {
            true => missing,
            false => slack.bytes,
        };
        let remapped = self.choose_chunks(missing.saturating_sub(allowed), list, tail);
        let created = missing
            .saturating_sub(remapped)
            .next_multiple_of(self.granularity);
        let arena = &self.arenas[id as usize];
        if arena.addresses.gap_at(arena.cursor) < remapped + created {
            self.start_run(size, id)?;
            self.choose_chunks(size.saturating_sub(allowed), list, NONE);
        }
        self.remap_chosen(list)
    }

    /// Remaps free chunks to the tail for all that is missing, as far as there are any.
    pub(super) fn remap_missing(&mut self, size: u64, list: u16) -> Result<(), Refusal> {
        let tail = self.arenas[self.lists.get(list).arena as usize].tail;
        self.choose_chunks(self.missing_bytes(size, list), list, tail);
        self.remap_chosen(list)
    }

    /// Whether to grow past the slack rather than remap: remapping takes too much time, and has not kept
    /// memory within the slack anyway. Never under a limit, which makes memory dear.
    fn prefers_growth(&mut self, missing: u64, slack: Slack, id: ArenaId) -> bool {
        let reserved = self.arenas[id as usize].reserved;
        let past_slack = reserved > slack.ceiling + slack.peak / PAST_SLACK;
        let in_bounds = reserved + missing <= slack.peak + slack.peak / MAX_PAST_PEAK;
        past_slack && in_bounds && id == SHARED_ARENA && !self.gpu.is_limited() && {
            let now = self.gpu.now();
            self.remap_budget
                .is_exceeded(now, self.policy.tuning.remap_share)
        }
    }

    /// For a large request, growth goes on from the largest free block that ends where addresses are free, or
    /// from a new run where that block does not hold a tenth of the request. Not under a limit, where runs
    /// that coalesce with nothing cost more than they spare: the smallest limit of gpt2_varlen would be 1.005
    /// of what is live rather than 1.004.
    fn choose_run(&mut self, size: u64, list: u16) {
        let (id, idle) = (self.lists.get(list).arena, self.lists.get(list).idle);
        let chunk = self.chunk_size(id);
        if id != SHARED_ARENA || size < OWN_RUN * chunk || self.gpu.is_limited() {
            return;
        }
        let mut least = self.missing_bytes(size, list);
        let mut best = NONE;
        for source in [Some(list), Some(idle).filter(|idle| *idle != list)] {
            let bins = source.map(|source| &self.lists.get(source).bins);
            let free_blocks = bins.into_iter().flat_map(|it| it.descending(&self.blocks));
            for free_block in free_blocks.take(LOOKED_AT) {
                let block = &self.blocks[free_block];
                let missing = size.saturating_sub(block.size);
                if missing >= least {
                    break;
                }
                let addresses = &self.arenas[id as usize].addresses;
                if block.next == NONE && addresses.gap_at(block.end()) >= missing + 2 * chunk {
                    (least, best) = (missing, free_block);
                }
            }
        }
        if best != NONE {
            let end = self.blocks[best].end();
            let arena = &mut self.arenas[id as usize];
            (arena.tail, arena.cursor) = (best, end);
        }
        if least > size / 10 * 9 {
            self.start_run_in_middle(size, id);
        }
    }

    /// Starts a run in the middle of the largest gap, if that is large enough, so that there are addresses
    /// behind this run and the one before it.
    fn start_run_in_middle(&mut self, size: u64, id: ArenaId) {
        let arena = &mut self.arenas[id as usize];
        let wanted = 4 * size.next_multiple_of(self.granularity) + (2 << 30);
        if let Some((start, length)) = arena.addresses.largest_gap().filter(|it| it.1 >= wanted) {
            arena.cursor = start + (length / 2).next_multiple_of(self.granularity);
            arena.tail = NONE;
        }
    }

    /// Starts a run in a gap that holds `size` bytes, and some more in the shared arena, where chunks are
    /// remapped. Reserves addresses where there is no such gap.
    fn start_run(&mut self, size: u64, id: ArenaId) -> Result<(), Refusal> {
        let size = size.next_multiple_of(self.granularity);
        let reserved = self.arenas[id as usize].addresses.reserved();
        let (wanted, least, reach) = match id {
            SHARED_ARENA => {
                let wanted = size * 2 + (1 << 30);
                (wanted, wanted.next_power_of_two(), self.gpu.reach())
            }
            _ => {
                let reach = (size * 2).max(reserved).max(PRIVATE_RESERVATION);
                (size, size, reach.next_power_of_two())
            }
        };
        let fits = |(_, length): &(u64, u64)| *length >= wanted;
        let largest = |pool: &Self| {
            pool.arenas[id as usize]
                .addresses
                .largest_gap()
                .filter(fits)
        };
        let mut gap = largest(self);
        if gap.is_none() {
            self.unmap_stale(0, id);
            gap = largest(self);
        }
        let arena = &mut self.arenas[id as usize];
        let start = match gap {
            Some((start, _)) => start,
            None => {
                let (start, length) = reserve(&mut self.gpu, least, reach)?;
                arena.addresses.add(start, length);
                arena.chunks.add_range(start, length);
                start
            }
        };
        arena.cursor = start;
        arena.tail = NONE;
        Ok(())
    }

    /// Creates and maps chunks at the cursor until the tail holds `size` free bytes. What was created before
    /// a refusal stays.
    pub(super) fn create_chunks(&mut self, size: u64, list: u16) -> Result<(), Refusal> {
        let (id, idle) = (self.lists.get(list).arena, self.lists.get(list).idle);
        let mut missing = self.missing_bytes(size, list);
        if missing > 4 * self.chunk_size(id) {
            self.gpu.has_room(missing)?;
        }
        if missing > 0 {
            self.counters.growths += 1;
        }
        let size_for_all = self.chunk_size_for(missing, id);
        while missing > 0 {
            let bytes = self.next_chunk(missing, size_for_all.max(self.least_chunk_size(id)));
            let arena = &mut self.arenas[id as usize];
            if arena.addresses.gap_at(arena.cursor) < bytes {
                return Err(Refusal::OutOfMemory);
            }
            let handle = self.gpu.create(bytes)?;
            if let Err(refusal) = self.gpu.map(arena.cursor, bytes, handle) {
                self.gpu.release(handle, bytes);
                arena.abandon(bytes);
                return Err(refusal);
            }
            arena.addresses.mark_mapped(arena.cursor, bytes);
            arena.chunks.add(handle, bytes, arena.cursor);
            arena.reserved += bytes;
            arena.bytes.add(bytes);
            self.counters.chunk_added(bytes);
            let event = MemoryEvent::SegmentMapped(arena.cursor, bytes);
            self.event_log.push(event);
            self.append_free(bytes, idle, 0, list);
            missing = self.missing_bytes(size, list);
        }
        Ok(())
    }

    /// The size of a chunk that is created now. A setting's is the largest allowed; the pool's own choice is
    /// rounded to the nearest granule, from two granules on.
    pub(super) fn chunk_size(&self, arena: ArenaId) -> u64 {
        let reserved = self.arenas[arena as usize].reserved;
        match self.policy.chunk {
            0 if self.gpu.is_limited() => self.whole_granules(reserved / SHARE_UNDER_LIMIT),
            0 => self.chunk_size_at(reserved),
            chunk => self.whole_granules(chunk.min(super::LARGEST_REQUEST)),
        }
    }

    /// The pool's own choice with this many bytes reserved.
    fn chunk_size_at(&self, reserved: u64) -> u64 {
        let share = reserved / self.policy.tuning.share;
        match share < 2 * self.granularity {
            true => self.granularity,
            false => self.whole_granules(share + self.granularity / 2),
        }
    }

    /// Whether chunks may be larger than [`Self::chunk_size`]: not where a setting says how large they may
    /// be, or a limit makes waste dear.
    fn may_be_larger(&self) -> bool {
        self.policy.chunk == 0 && !self.gpu.is_limited()
    }

    /// The size of chunks for growth by this many bytes.
    fn chunk_size_for(&self, bytes: u64, arena: ArenaId) -> u64 {
        let size = self.chunk_size(arena);
        if !self.may_be_larger() {
            return size;
        }
        // To look for fragmentation is to walk many free blocks: only where it can spare a chunk.
        let several = bytes > size && size > self.granularity;
        let reserved = self.arenas[arena as usize].reserved;
        let size = match several && self.is_unfragmented(arena) {
            true => self.chunk_size_at(reserved * LARGER_CHUNKS.0 / LARGER_CHUNKS.1),
            false => size,
        };
        size.max(match bytes >= reserved {
            true => self.chunk_size_at(reserved + bytes),
            false => self
                .whole_granules(bytes / CHUNKS_PER_REQUEST)
                .min(LARGEST_CHUNK),
        })
    }

    /// Whether little of the arena's free memory is fragmented, and enough was freed to know.
    fn is_unfragmented(&self, id: ArenaId) -> bool {
        let arena = &self.arenas[id as usize];
        let fragmented = || arena.reserved - arena.live - self.free_chunk_bytes(id);
        id == SHARED_ARENA
            && self.epochs.freed() >= arena.live / FREED_SHARE
            && fragmented() * 1000 * FRAGMENTED < arena.reserved * self.policy.tuning.slack
    }

    /// Bytes of the arena's wholly free chunks. Walks all free blocks.
    fn free_chunk_bytes(&self, id: ArenaId) -> u64 {
        let chunks = &self.arenas[id as usize].chunks;
        let lists = self.lists.of_arena(id);
        let free_blocks = lists.flat_map(|(_, it)| it.all_free(&self.blocks, self.granularity));
        free_blocks
            .flat_map(|free_block| chunks.within(free_block.address, free_block.end()))
            .map(|chunk| chunks.get(chunk).size)
            .sum()
    }

    /// The least size of the later chunks of one growth: as equal as may be, unless it doubles what is
    /// reserved.
    fn least_chunk_size(&self, arena: ArenaId) -> u64 {
        match self.may_be_larger() {
            true => self.chunk_size(arena) / 2,
            false => self.chunk_size(arena),
        }
    }

    /// The next of the chunks that give this many bytes; [`even_chunk`] where they may be larger than `size`.
    fn next_chunk(&self, bytes: u64, size: u64) -> u64 {
        let bytes = bytes.next_multiple_of(self.granularity);
        match self.may_be_larger() {
            true => even_chunk(bytes, size, self.granularity),
            false => bytes.min(size),
        }
    }

    /// Rounds down to whole granules, one at least.
    fn whole_granules(&self, bytes: u64) -> u64 {
        (bytes / self.granularity * self.granularity).max(self.granularity)
    }
}

/// Reserves addresses: `reach` bytes, or where the process may not have as many (`ulimit -v`, valgrind) half,
/// and so on down to `least`. Returns the start and the size.
fn reserve(gpu: &mut impl Gpu, least: u64, reach: u64) -> Result<(u64, u64), Refusal> {
    let mut length = reach.max(least);
    loop {
        match gpu.reserve(length) {
            Ok(start) => return Ok((start, length)),
            Err(Refusal::OutOfMemory) if length > least => length = (length / 2).max(least),
            Err(refusal) => return Err(refusal),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::even_chunk;

    #[test]
    fn chunks_give_what_is_wanted_and_no_more() {
        for size in (2..=64).step_by(2) {
            for wanted in (2..=2000).step_by(2) {
                let (mut left, mut count) = (wanted, 0);
                while left > 0 {
                    let chunk = even_chunk(left, size, 2);
                    assert!(
                        chunk > 0 && chunk.is_multiple_of(2),
                        "{chunk} of {wanted}, size {size}"
                    );
                    assert!(
                        chunk <= left && 2 * chunk <= 3 * size,
                        "{chunk} of {wanted}, size {size}"
                    );
                    (left, count) = (left - chunk, count + 1);
                }
                assert!(
                    count <= wanted / size + 1,
                    "{count} for {wanted}, size {size}"
                );
            }
        }
    }
}
