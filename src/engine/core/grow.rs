//! Growing: room for a request at the end of mapped memory, out of chunks that move there and new ones.

use crate::core::arena::{ArenaId, SHARED_ARENA};
use crate::core::block::{BlockId, BlockState, NONE};
use crate::core::gpu::{Gpu, Refusal};
use crate::core::memory_events::MemoryEvent;
use crate::core::pool::Pool;

/// Growth for one request need not make more chunks than so many, however little is held so far:
/// llama_lora_ckpt then comes to its peak with 2,200 chunks rather than 2,600, a quarter less of the driver's
/// time. A larger share of a request costs memory: with 32, llama_serve holds 1.0114 of what is live rather
/// than 1.0090, and generated training (`tests/workloads`), in its second run, 1.0106 rather than 1.0087.
const CHUNKS_PER_REQUEST: u64 = 48;

/// The largest chunk that is made for the sake of a large request: with 16 MiB llama_lora_ckpt, where work is
/// late, holds 1.012 of what is live rather than 1.009. A request for more than all that is held so far has
/// chunks by what is held afterwards. In larger ones, should it be freed soon, what comes next finds none that
/// can move: with 8 MiB llama_serve behind such a block of 3 GB holds 1.042 of what is live, and in smaller ones
/// than that an arena of most of the device's memory takes a third of a second.
const LARGEST_CHUNK: u64 = 8 << 20;

/// A private pool reserves so many bytes of addresses at first, and each time as many again as it has: a
/// process has 47 bits of them, for the host's memory too, and a program may have a thousand pools, one for
/// each CUDA graph. No chunks move there, which would use addresses up.
const PRIVATE_RESERVATION: u64 = 64 << 20;

/// By how much chunks are larger where memory is whole: what a chunk costs does not depend on its size, and
/// what larger ones lose are the parts of them that lie free beside blocks in use. With 4/3 the traces take
/// 2 % less of the driver's time from an empty pool, with 3/2 3 %, with 2 5 %; but with 2 two programs at once
/// (`tests/workloads`) hold 1.0304 of what is live where work is late, rather than 1.0284.
const LARGER_CHUNKS: (u64, u64) = (3, 2);

/// Memory is whole where whole free chunks are all of what is free but this part of the slack. With all of
/// the slack prefetch_streams, where work is late, holds 1.011 of what is live rather than 1.009; with a
/// quarter of it hardly any memory is whole.
const FRAGMENTED: u64 = 2;

/// And only once this part of what is live has been freed before: while a program loads its weights all
/// memory is. Larger chunks from the start had two programs at once hold 1.032 of what is live in their
/// second run, rather than 1.026.
const FREED_SHARE: u64 = 2;

/// The share of what is held that a chunk has under a limit, which makes waste dear: the smallest limit of
/// gpt2_varlen would be 1.0055 of what is live, rather than 1.0043, with seven eighths of it.
const LIMITED_SHARE: u64 = 2048;

/// For a request of so many chunks it is looked up where least of it is missing, before chunks move, and it
/// gets a run of its own where that is nearly all of it: there are addresses to spare behind such a run, so
/// that the next request that is a little larger has only the difference moved. A job whose largest tensors
/// change from step to step has a few such blocks: llama_lora_ckpt takes 81 ms of driver calls for 15 more
/// passes rather than 201. With half as many chunks, llama_serve holds 1.011 of what is live rather than
/// 1.009, in runs that join with nothing.
const OWN_RUN: u64 = 128;

/// How many free blocks are looked at for one that growth had better go on from.
const LOOKED_AT: usize = 64;

/// How far memory may grow past the highest live figure, as a part of that, where moving takes too much of
/// the program's time. 2000 blocks of up to 16 MiB that are replaced at random need 1.15 of what is live
/// or so for none of them to be moved.
const MAX_PAST_PEAK: u64 = 6;

/// Such growth is for memory that is held past the ceiling already by this part of the highest live figure:
/// where moving keeps the ceiling, it goes on.
const PAST_CEILING: u64 = 32;

/// One of the chunks, each half again as large as `size` at most, that give so many bytes, whole granules.
/// What is left over where no whole number of that size does makes them larger, or smaller, by the same: a
/// chunk of its own would cost as much as any.
fn even_chunk(bytes: u64, size: u64, granularity: u64) -> u64 {
    let count = ((bytes + size / 2) / size).max(1);
    (bytes / count).next_multiple_of(granularity)
}

impl<G: Gpu> Pool<G> {
    /// The size of a chunk to create now. A setting's is the largest; the pool's own is to the nearest
    /// granule, from two granules on.
    pub(super) fn chunk_size(&self, arena: ArenaId) -> u64 {
        let reserved = self.arenas[arena as usize].reserved;
        match self.policy.chunk {
            0 if self.gpu.is_limited() => self.round_to_granule(reserved / LIMITED_SHARE),
            0 => self.chunk_size_of(reserved),
            chunk => self.round_to_granule(chunk.min(crate::core::LARGEST_REQUEST)),
        }
    }

    /// The pool's own choice where so much is held.
    fn chunk_size_of(&self, held: u64) -> u64 {
        let share = held / self.policy.tuning.share;
        match share < 2 * self.granularity {
            true => self.granularity,
            false => self.round_to_granule(share + self.granularity / 2),
        }
    }

    /// Whether a chunk may be larger than [`Self::chunk_size`]: not where a setting says how large they may
    /// be, or a limit makes waste dear.
    fn may_be_larger(&self) -> bool {
        self.policy.chunk == 0 && !self.gpu.is_limited()
    }

    /// The size of a chunk for growth by so many bytes at once.
    fn chunk_size_for(&self, bytes: u64, arena: ArenaId) -> u64 {
        let size = self.chunk_size(arena);
        if !self.may_be_larger() {
            return size;
        }
        // That is to look at many free blocks: only where it can spare a chunk.
        let several = bytes > size && size > self.granularity;
        let reserved = self.arenas[arena as usize].reserved;
        let size = match several && self.is_unfragmented(arena) {
            true => self.chunk_size_of(reserved * LARGER_CHUNKS.0 / LARGER_CHUNKS.1),
            false => size,
        };
        size.max(match bytes >= reserved {
            true => self.chunk_size_of(reserved + bytes),
            false => self
                .round_to_granule(bytes / CHUNKS_PER_REQUEST)
                .min(LARGEST_CHUNK),
        })
    }

    /// Whether little of the arena's free memory is cut up, and enough was freed to know.
    fn is_unfragmented(&self, id: ArenaId) -> bool {
        let arena = &self.arenas[id as usize];
        // The free blocks are looked at last, as there may be many.
        let lost = || arena.reserved - arena.live - self.free_chunks(id);
        id == SHARED_ARENA
            && self.epochs.freed() >= arena.live / FREED_SHARE
            && lost() * 1000 * FRAGMENTED < arena.reserved * self.policy.tuning.slack
    }

    /// Bytes of the arena's whole free chunks.
    fn free_chunks(&self, id: ArenaId) -> u64 {
        let chunks = &self.arenas[id as usize].chunks;
        let lists = self.lists.of_arena(id);
        let free_blocks = lists.flat_map(|(_, it)| it.all_free(&self.blocks, self.granularity));
        free_blocks
            .flat_map(|free_block| chunks.within(free_block.address, free_block.end()))
            .map(|chunk| chunks.get(chunk).size)
            .sum()
    }

    /// The least that the chunks of one growth have while it goes on. They are equal, as far as it may be and
    /// where what is held does not grow to twice as much and more.
    fn least_chunk_size(&self, arena: ArenaId) -> u64 {
        match self.may_be_larger() {
            true => self.chunk_size(arena) / 2,
            false => self.chunk_size(arena),
        }
    }

    /// The next chunk of those that give so many bytes, [`even_chunk`] where they may be.
    fn next_chunk(&self, bytes: u64, size: u64) -> u64 {
        let bytes = bytes.next_multiple_of(self.granularity);
        match self.may_be_larger() {
            true => even_chunk(bytes, size, self.granularity),
            false => bytes.min(size),
        }
    }

    /// Whole granules, one at least.
    fn round_to_granule(&self, bytes: u64) -> u64 {
        (bytes / self.granularity * self.granularity).max(self.granularity)
    }

    /// Makes a free block of at least `size` bytes at the end of mapped memory.
    pub(super) fn extend(&mut self, size: u64, list: u16) -> Result<BlockId, Refusal> {
        let id = self.lists.get(list).arena;
        if self.arenas[id as usize].supplied {
            return Err(Refusal::Unsupplied(self.segment_size(size, id)));
        }
        if self.granularity == 0 {
            return self.add_segment(size, id);
        }
        let arena = &self.arenas[id as usize];
        // What must fail takes nothing first.
        let free = arena.reserved - arena.live;
        if size > free + 4 * self.chunk_size(id) {
            self.gpu.has_room(size - free)?;
        }
        let arena = &self.arenas[id as usize];
        let highest = arena.peak_live.max(arena.live + size);
        let ceiling = highest + highest * self.policy.tuning.slack / 1000;
        let allowed = ceiling.saturating_sub(arena.reserved) / self.granularity * self.granularity;
        // A wait on the GPU costs less than mapping: in a run of prefetch_streams (H100) 38 waits rather
        // than 16 spared 700 of 1,300 chunks their move.
        if self.missing_bytes(size, list) > allowed
            && let Some(free_block) = self.reuse_across_streams(size, list)
        {
            return Ok(free_block);
        }
        // Under a limit runs that join with nothing cost more than they spare: the smallest limit of
        // gpt2_varlen would be 1.005 of what is live rather than 1.004.
        if self.missing_bytes(size, list) > allowed
            && id == SHARED_ARENA
            && size >= OWN_RUN * self.chunk_size(id)
            && !self.gpu.is_limited()
        {
            self.move_to_best_run(size, list);
        }
        let missing = self.missing_bytes(size, list);
        let tail = self.arenas[id as usize].tail;
        let allowed = match missing > allowed && self.prefers_growth(missing, highest, ceiling, id)
        {
            true => missing,
            false => allowed,
        };
        let moved = self.choose_chunks(missing.saturating_sub(allowed), list, tail);
        let grown = missing
            .saturating_sub(moved)
            .next_multiple_of(self.granularity);
        let arena = &self.arenas[id as usize];
        if arena.addresses.gap_at(arena.cursor) < moved + grown {
            self.start_run(size, id)?;
            self.choose_chunks(size.saturating_sub(allowed), list, NONE);
        }
        self.remap_chosen(list)?;
        if self.create_chunks(size, list).is_err() {
            // The limit, or the device, has no more: everything that can be moved is.
            let (missing, tail) = (
                self.missing_bytes(size, list),
                self.arenas[id as usize].tail,
            );
            self.choose_chunks(missing, list, tail);
            self.remap_chosen(list)?;
            self.create_chunks(size, list)?;
        }
        Ok(self.arenas[id as usize].tail)
    }

    /// Whether growth past the ceiling is the smaller evil: moving takes too much time, and has not held the
    /// ceiling anyway.
    fn prefers_growth(&mut self, missing: u64, highest: u64, ceiling: u64, id: ArenaId) -> bool {
        let reserved = self.arenas[id as usize].reserved;
        let cut_up = reserved > ceiling + highest / PAST_CEILING;
        let calm = reserved + missing <= highest + highest / MAX_PAST_PEAK;
        // Under a limit memory is what is dear.
        cut_up && calm && id == SHARED_ARENA && !self.gpu.is_limited() && {
            let now = self.gpu.now();
            self.remap_budget
                .is_exceeded(now, self.policy.tuning.patience)
        }
    }

    /// Takes memory ahead of need: one idle free block of at least `size` bytes, which any stream may have.
    pub fn preallocate(&mut self, size: u64) -> Result<(), Refusal> {
        if size > crate::core::LARGEST_REQUEST {
            return Err(Refusal::OutOfMemory);
        }
        let idle = self.arenas[SHARED_ARENA as usize].idle;
        self.extend(size.next_multiple_of(crate::core::BLOCK), idle)
            .map(drop)
    }

    /// Whether the stream may use a free block at once.
    fn usable(&self, id: BlockId, list: u16) -> bool {
        let block = &self.blocks[id];
        block.state == BlockState::Free
            && (block.list == list || block.list == self.lists.get(list).idle)
    }

    /// Bytes that must be mapped behind the cursor before the tail holds `size` free ones.
    fn missing_bytes(&self, size: u64, list: u16) -> u64 {
        let tail = self.arenas[self.lists.get(list).arena as usize].tail;
        match tail != NONE && self.usable(tail, list) {
            true => size.saturating_sub(self.blocks[tail].size),
            false => size,
        }
    }

    /// Growth goes on from the largest free block of those that end where addresses are free, or from a new place
    /// where the largest does not hold a tenth of the request.
    fn move_to_best_run(&mut self, size: u64, list: u16) {
        let (id, idle) = (self.lists.get(list).arena, self.lists.get(list).idle);
        let chunk = self.chunk_size(id);
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

    /// Starts a new run of mapped memory in the middle of the largest gap, if that is large enough, so that
    /// there is room behind this run and the one before it.
    fn start_run_in_middle(&mut self, size: u64, id: ArenaId) {
        let arena = &mut self.arenas[id as usize];
        let wanted = 4 * size.next_multiple_of(self.granularity) + (2 << 30);
        if let Some((start, length)) = arena.addresses.largest_gap().filter(|it| it.1 >= wanted) {
            arena.cursor = start + (length / 2).next_multiple_of(self.granularity);
            arena.tail = NONE;
        }
    }

    /// Starts a new run of mapped memory in a gap that holds `size` bytes, and some more where it is
    /// everybody's: chunks may move there.
    fn start_run(&mut self, size: u64, id: ArenaId) -> Result<(), Refusal> {
        let size = size.next_multiple_of(self.granularity);
        let taken = self.arenas[id as usize].addresses.reserved();
        let (wanted, least, reach) = match id {
            SHARED_ARENA => {
                let wanted = size * 2 + (1 << 30);
                (wanted, wanted.next_power_of_two(), self.gpu.reach())
            }
            _ => {
                let reach = (size * 2).max(taken).max(PRIVATE_RESERVATION);
                (size, size, reach.next_power_of_two())
            }
        };
        let fits = |(_, length): &(u64, u64)| *length >= wanted;
        let mut gap = self.arenas[id as usize]
            .addresses
            .largest_gap()
            .filter(fits);
        if gap.is_none() {
            self.unmap_stale(0, id);
            gap = self.arenas[id as usize]
                .addresses
                .largest_gap()
                .filter(fits);
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

    /// Creates and maps chunks behind the cursor until the tail holds `size` free bytes.
    fn create_chunks(&mut self, size: u64, list: u16) -> Result<(), Refusal> {
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
            self.counters.chunk_added(bytes);
            self.event_log
                .push(MemoryEvent::SegmentMapped(arena.cursor, bytes));
            self.append_free(bytes, idle, 0, list);
            missing = self.missing_bytes(size, list);
        }
        Ok(())
    }
}

/// Reserves addresses, `reach` bytes where there are as many, and `least` or more; answers where and how many.
/// A process whose address space is limited (`ulimit -v`, valgrind) gets by with fewer.
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
