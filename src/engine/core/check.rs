//! The invariant walker, which tests run after every operation. Nothing here runs in production.

use super::arena::Arena;
use super::block::{BlockId, BlockState, NONE};
use super::counters::Origin;
use super::gpu::Gpu;
use super::ids::{ArenaId, SHARED_ARENA};
use super::pool::Pool;
use super::stream_lists::FreeList;
use std::collections::{BTreeMap, HashSet};

/// A broken invariant, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken(pub String);

macro_rules! hold {
    ($condition:expr, $($message:tt)*) => {
        if !$condition {
            return Err(Broken(format!($($message)*)));
        }
    };
}

impl<G: Gpu> Pool<G> {
    /// Checks that every mapped byte belongs to exactly one block, the links are in address order, free lists
    /// and the address map have exactly the blocks that they should, and the counters agree with a count.
    pub fn check(&self) -> Result<(), Broken> {
        let mut by_address: BTreeMap<u64, BlockId> = BTreeMap::new();
        for (id, block) in self.blocks.iter() {
            hold!(
                block.size > 0 && block.size % super::BLOCK == 0,
                "block {id} has size {}",
                block.size
            );
            hold!(
                by_address.insert(block.address, id).is_none(),
                "two blocks at {:#x}",
                block.address
            );
        }
        let mut chunk_starts: BTreeMap<u64, u64> = BTreeMap::new();
        for arena in &self.arenas {
            chunk_starts.extend(arena.chunks.iter().map(|chunk| (chunk.address, chunk.size)));
            chunk_starts.extend(&arena.segments);
        }
        self.check_links(&by_address)?;
        self.check_cover(&by_address, &chunk_starts)?;
        self.check_lists()?;
        self.check_counters(&chunk_starts)?;
        let (mut stale, mut stale_count) = (0, 0);
        for (id, arena) in self.arenas.iter().enumerate() {
            stale += self.check_arena(id as u16, arena)?;
            stale_count += arena.chunks.stale.len() as u64;
        }
        hold!(self.counters.stale_bytes == stale, "stale bytes");
        hold!(self.counters.stale == stale_count, "stale mappings");
        Ok(())
    }

    fn check_links(&self, by_address: &BTreeMap<u64, BlockId>) -> Result<(), Broken> {
        for (&address, &id) in by_address {
            let block = &self.blocks[id];
            if block.next != NONE {
                let next = &self.blocks[block.next];
                hold!(
                    next.state != BlockState::Vacant,
                    "block {address:#x} is followed by a vacant node"
                );
                hold!(
                    next.prev == id,
                    "the block after {address:#x} does not point back"
                );
                hold!(
                    next.address == block.end(),
                    "a gap after {address:#x} is linked over"
                );
                let joinable = block.state == BlockState::Free
                    && next.state == BlockState::Free
                    && block.list == next.list;
                hold!(
                    !joinable,
                    "two free blocks of one stream side by side at {:#x}",
                    next.address
                );
            }
            if block.prev != NONE {
                hold!(
                    self.blocks[block.prev].next == id,
                    "the block before {address:#x} differs"
                );
            }
        }
        Ok(())
    }

    /// Checks an arena's chunks, gaps and sums. Returns the bytes behind its stale mappings.
    fn check_arena(&self, id: ArenaId, arena: &Arena) -> Result<u64, Broken> {
        let is_idle = |(list, it): (u16, &FreeList)| list == it.idle || it.bins.is_empty();
        hold!(
            id == SHARED_ARENA
                || arena.closing
                || !arena.notes_frees
                || self.lists.of_arena(id).all(is_idle),
            "arena {id} has free blocks that are not idle, and that no one knows of"
        );
        let numbers = self.lists.numbers(id);
        hold!(
            numbers.is_sorted() && self.lists.of_arena(id).all(|(_, it)| it.is_of(id)),
            "arena {id} lists {numbers:?}"
        );
        if arena.tail != NONE {
            let tail = &self.blocks[arena.tail];
            hold!(
                tail.state != BlockState::Vacant,
                "the tail is a vacant node"
            );
            hold!(
                tail.end() == arena.cursor,
                "the tail ends at {:#x}, not the cursor",
                tail.end()
            );
        }
        let chunks = &arena.chunks;
        for chunk in chunks.iter() {
            let found = chunks.at(chunk.address).map(|id| chunks.get(id).address);
            hold!(
                found == Some(chunk.address),
                "the chunk at {:#x} is not found there",
                chunk.address
            );
            let ups = chunks
                .stale
                .iter()
                .filter(|old| chunks.get(old.chunk).address == chunk.address);
            hold!(
                ups.count() == chunk.stale as usize,
                "stale mappings of {:#x}",
                chunk.address
            );
        }
        let stale: u64 = chunks
            .stale
            .iter()
            .map(|old| chunks.get(old.chunk).size)
            .sum();
        let mapped: u64 = chunks.iter().map(|chunk| chunk.size).sum::<u64>() + stale;
        hold!(
            arena.addresses.unmapped() + mapped + arena.abandoned == arena.addresses.reserved(),
            "gaps {} and mappings {mapped} are not the {} bytes of addresses",
            arena.addresses.unmapped(),
            arena.addresses.reserved()
        );
        let live: u64 = self
            .blocks
            .iter()
            .filter(|(_, block)| block.state == BlockState::Live)
            .filter(|(_, block)| self.lists.get(block.list).arena == id)
            .map(|(_, block)| block.size)
            .sum();
        hold!(
            live == arena.live,
            "arena {id} counts {} live bytes of {live}",
            arena.live
        );
        let reserved = mapped - stale + arena.segments.values().sum::<u64>();
        hold!(
            reserved == arena.reserved,
            "arena {id} counts {} reserved bytes of {reserved}",
            arena.reserved
        );
        Ok(stale)
    }

    /// Chunks and blocks cover the same bytes, and neither overlap.
    fn check_cover(
        &self,
        by_address: &BTreeMap<u64, BlockId>,
        chunk_starts: &BTreeMap<u64, u64>,
    ) -> Result<(), Broken> {
        let merge = |parts: &mut dyn Iterator<Item = (u64, u64)>| {
            let mut runs: Vec<(u64, u64)> = Vec::new();
            for (start, end) in parts {
                match runs.last_mut() {
                    Some(last) if start < last.1 => {
                        return Err(Broken(format!("overlap at {start:#x}")));
                    }
                    Some(last) if start == last.1 => last.1 = end,
                    _ => runs.push((start, end)),
                }
            }
            Ok(runs)
        };
        let blocks = merge(&mut by_address.values().map(|id| {
            let block = &self.blocks[*id];
            (block.address, block.end())
        }))?;
        let chunks = merge(
            &mut chunk_starts
                .iter()
                .map(|(start, size)| (*start, start + size)),
        )?;
        hold!(
            blocks == chunks,
            "blocks cover {blocks:x?} but chunks {chunks:x?}"
        );
        Ok(())
    }

    fn check_lists(&self) -> Result<(), Broken> {
        hold!(self.blocks.is_sentinel_intact(), "the sentinel was changed");
        let of_arenas = (0..self.arenas.len()).map(|id| self.lists.of_arena(id as u16).count());
        let used = self.lists.iter().filter(|(_, it)| !it.is_dead()).count();
        hold!(
            of_arenas.sum::<usize>() == used,
            "arenas do not list {used} lists"
        );
        let mut listed = HashSet::new();
        for (list, it) in self.lists.iter() {
            hold!(it.bins.is_linked(&self.blocks), "list {list}'s bins");
            for id in it.bins.ascending(&self.blocks, super::BLOCK) {
                let block = &self.blocks[id];
                hold!(
                    block.state == BlockState::Free && block.list == list,
                    "list {list} lists block {id}"
                );
                hold!(
                    list == it.idle || block.detail <= self.epochs.now | 1,
                    "block {id} was freed in the future"
                );
                hold!(listed.insert(id), "block {id} is listed twice");
            }
            let mut at = it.oldest();
            let mut count = 0;
            while let Some(id) = at {
                hold!(
                    self.blocks[id].list == list,
                    "list {list} remembers block {id}"
                );
                count += 1;
                at = (self.blocks[id].newer != NONE).then(|| self.blocks[id].newer);
            }
            let free_blocks = it.bins.ascending(&self.blocks, super::BLOCK).count();
            let expected = if it.ordered { free_blocks } else { 0 };
            hold!(
                count == expected,
                "list {list} remembers {count} free blocks of {expected}"
            );
            let purgeable = it.purgeable.iter();
            for id in purgeable.flat_map(|bins| bins.ascending(&self.blocks, super::BLOCK)) {
                let (block, chunks) =
                    (&self.blocks[id], &self.arenas[SHARED_ARENA as usize].chunks);
                hold!(
                    block.state == BlockState::Purgeable
                        && block.list == list
                        && it.arena == SHARED_ARENA,
                    "list {list} has block {id} as purgeable"
                );
                hold!(listed.insert(id), "block {id} is listed twice");
                hold!(self.purge.contains(id), "block {id} is purgeable for ever");
                let inside = chunks.within(block.address, block.end());
                let whole: u64 = inside.map(|chunk| chunks.get(chunk).size).sum();
                hold!(
                    whole == block.size,
                    "purgeable block {id} is not whole chunks"
                );
            }
            let live = self.blocks.iter().filter(|(_, block)| {
                block.list == list && matches!(block.state, BlockState::Live | BlockState::Pending)
            });
            let live = live.count() as u64;
            hold!(
                live == it.live,
                "list {list} counts {} live blocks of {live}",
                it.live
            );
        }
        let free = self
            .blocks
            .iter()
            .filter(|(_, block)| matches!(block.state, BlockState::Free | BlockState::Purgeable))
            .count();
        hold!(
            free == listed.len(),
            "{free} free blocks, {} of them listed",
            listed.len()
        );
        let purgeable = self
            .blocks
            .iter()
            .filter(|(_, block)| block.state == BlockState::Purgeable);
        hold!(
            purgeable.count() == self.purge.len(),
            "{} blocks are known to be purgeable",
            self.purge.len()
        );
        let mut live = 0;
        for (id, block) in self
            .blocks
            .iter()
            .filter(|(_, block)| block.state == BlockState::Live)
        {
            hold!(
                self.address_map.get(&self.blocks, block.address) == id,
                "block {:#x} is not in the address map",
                block.address
            );
            live += 1;
        }
        hold!(
            live == self.address_map.len(),
            "the address map has {} entries for {live}",
            self.address_map.len()
        );
        Ok(())
    }

    fn check_counters(&self, chunk_starts: &BTreeMap<u64, u64>) -> Result<(), Broken> {
        let sum = |states: &[BlockState], origin: Option<Origin>| -> (u64, u64) {
            let of = self.blocks.iter().filter(|(_, block)| {
                states.contains(&block.state)
                    && origin.is_none_or(|origin| origin == block.flags.origin())
            });
            of.fold((0, 0), |(count, bytes), (_, block)| {
                (count + 1, bytes + block.size)
            })
        };
        let origins = [Origin::Allocator, Origin::Cuda];
        let [all, of_cuda] = origins.map(|origin| self.counters.read(origin).all);
        for (origin, all) in origins.into_iter().zip([&all, &of_cuda]) {
            for (name, count, bytes, states, origin) in [
                (
                    "allocated",
                    &all.allocation,
                    &all.allocated_bytes,
                    &[BlockState::Live][..],
                    Some(origin),
                ),
                (
                    "active",
                    &all.active,
                    &all.active_bytes,
                    &[BlockState::Live, BlockState::Pending],
                    Some(origin),
                ),
                (
                    "inactive",
                    &all.inactive_split,
                    &all.inactive_split_bytes,
                    &[BlockState::Free, BlockState::Purgeable],
                    None,
                ),
            ] {
                let (now, found) = ((count.current, bytes.current), sum(states, origin));
                hold!(
                    now == found,
                    "{name} ({origin:?}): counted {now:?}, found {found:?}"
                );
            }
        }
        let (reserved, segments) = (all.reserved_bytes.current, all.segment.current);
        hold!(
            reserved == chunk_starts.values().sum::<u64>(),
            "reserved: counted {reserved}"
        );
        hold!(
            segments == chunk_starts.len() as u64,
            "segments: counted {segments}"
        );
        let active = all.active_bytes.current + of_cuda.active_bytes.current;
        hold!(
            reserved == active + all.inactive_split_bytes.current,
            "reserved is not active plus inactive"
        );
        Ok(())
    }
}
