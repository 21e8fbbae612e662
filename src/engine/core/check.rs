//! The invariant walker: tests call it after every operation. Nothing here runs in production.

use super::arena::{Group, GroupId, SHARED};
use super::block::{BlockId, NONE, State};
use super::counters::Origin;
use super::gpu::Gpu;
use super::pool::Pool;
use super::stream_lists::Slot;
use std::collections::{BTreeMap, HashSet};

/// An invariant that does not hold, in words.
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
    /// Walks everything. Holds when every mapped byte belongs to exactly one block, the links are
    /// in address order, the free lists and the table hold exactly what they should, and the
    /// counters agree with a count made here.
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
        let mut homes: BTreeMap<u64, u64> = BTreeMap::new();
        for group in &self.groups {
            homes.extend(group.chunks.iter().map(|chunk| (chunk.home, chunk.size)));
            homes.extend(&group.segments);
        }
        self.check_links(&by_address)?;
        self.check_cover(&by_address, &homes)?;
        self.check_lists()?;
        self.check_counters(&homes)?;
        let (mut stale, mut stale_count) = (0, 0);
        for (id, group) in self.groups.iter().enumerate() {
            stale += self.check_group(id as u16, group)?;
            stale_count += group.chunks.stale.len() as u64;
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
                    next.state != State::Vacant,
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
                let joinable = block.state == State::Free
                    && next.state == State::Free
                    && block.slot == next.slot;
                hold!(
                    !joinable,
                    "two holes of one stream side by side at {:#x}",
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

    /// Returns the bytes behind the group's old mappings.
    fn check_group(&self, id: GroupId, group: &Group) -> Result<u64, Broken> {
        let idle = |(slot, it): (u16, &Slot)| slot == it.idle || it.bins.is_empty();
        hold!(
            id == SHARED || group.closing || !group.watched || self.slots.of_group(id).all(idle),
            "group {id} has holes that are not idle, and that no one knows of"
        );
        let numbers = self.slots.numbers_of(id);
        hold!(
            numbers.is_sorted() && self.slots.of_group(id).all(|(_, it)| it.is_of(id)),
            "group {id} lists the slots {numbers:?}"
        );
        if group.tail != NONE {
            let tail = &self.blocks[group.tail];
            hold!(tail.state != State::Vacant, "the tail is a vacant node");
            hold!(
                tail.end() == group.cursor,
                "the tail ends at {:#x}, not the cursor",
                tail.end()
            );
        }
        let chunks = &group.chunks;
        for chunk in chunks.iter() {
            let found = chunks.at(chunk.home).map(|id| chunks.get(id).home);
            hold!(
                found == Some(chunk.home),
                "the chunk at {:#x} is not found there",
                chunk.home
            );
            let ups = chunks
                .stale
                .iter()
                .filter(|old| chunks.get(old.chunk).home == chunk.home);
            hold!(
                ups.count() == chunk.stale as usize,
                "stale mappings of {:#x}",
                chunk.home
            );
        }
        let stale: u64 = chunks
            .stale
            .iter()
            .map(|old| chunks.get(old.chunk).size)
            .sum();
        let mapped: u64 = chunks.iter().map(|chunk| chunk.size).sum::<u64>() + stale;
        hold!(
            group.space.unmapped() + mapped + group.abandoned == group.space.reserved(),
            "gaps {} and mappings {mapped} are not the {} bytes of addresses",
            group.space.unmapped(),
            group.space.reserved()
        );
        let live: u64 = self
            .blocks
            .iter()
            .filter(|(_, block)| block.state == State::Live)
            .filter(|(_, block)| self.slots.get(block.slot).group == id)
            .map(|(_, block)| block.size)
            .sum();
        hold!(
            live == group.live,
            "group {id} counts {} live bytes of {live}",
            group.live
        );
        let held = mapped - stale + group.segments.values().sum::<u64>();
        hold!(
            held == group.reserved,
            "group {id} counts {} held bytes of {held}",
            group.reserved
        );
        Ok(stale)
    }

    /// Chunks at home and blocks cover the same bytes, and neither overlap.
    fn check_cover(
        &self,
        by_address: &BTreeMap<u64, BlockId>,
        homes: &BTreeMap<u64, u64>,
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
        let chunks = merge(&mut homes.iter().map(|(start, size)| (*start, start + size)))?;
        hold!(
            blocks == chunks,
            "blocks cover {blocks:x?} but chunks {chunks:x?}"
        );
        Ok(())
    }

    fn check_lists(&self) -> Result<(), Broken> {
        hold!(
            self.blocks.is_none_unchanged(),
            "the node of no block was changed"
        );
        let of_groups = (0..self.groups.len()).map(|id| self.slots.of_group(id as u16).count());
        let used = self.slots.iter().filter(|(_, it)| !it.is_dead()).count();
        hold!(
            of_groups.sum::<usize>() == used,
            "groups do not list {used} slots"
        );
        let mut listed = HashSet::new();
        for (slot, it) in self.slots.iter() {
            hold!(it.bins.is_linked(&self.blocks), "slot {slot}'s lists");
            for id in it.bins.ascending(&self.blocks, super::BLOCK) {
                let block = &self.blocks[id];
                hold!(
                    block.state == State::Free && block.slot == slot,
                    "slot {slot} lists block {id}"
                );
                hold!(
                    slot == it.idle || block.detail <= self.epochs.now | 1,
                    "block {id} was freed in the future"
                );
                hold!(listed.insert(id), "block {id} is listed twice");
            }
            let mut at = it.oldest();
            let mut count = 0;
            while let Some(id) = at {
                hold!(
                    self.blocks[id].slot == slot,
                    "slot {slot} remembers block {id}"
                );
                count += 1;
                at = (self.blocks[id].newer != NONE).then(|| self.blocks[id].newer);
            }
            let holes = it.bins.ascending(&self.blocks, super::BLOCK).count();
            let expected = if it.ordered { holes } else { 0 };
            hold!(
                count == expected,
                "slot {slot} remembers {count} holes of {expected}"
            );
            let resting = it.resting.iter();
            for id in resting.flat_map(|bins| bins.ascending(&self.blocks, super::BLOCK)) {
                let (block, chunks) = (&self.blocks[id], &self.groups[SHARED as usize].chunks);
                hold!(
                    block.state == State::Resting && block.slot == slot && it.group == SHARED,
                    "slot {slot} has block {id} at rest"
                );
                hold!(listed.insert(id), "block {id} is listed twice");
                hold!(self.rest.knows(id), "block {id} rests for ever");
                let inside = chunks.inside(block.address, block.end());
                let whole: u64 = inside.map(|chunk| chunks.get(chunk).size).sum();
                hold!(
                    whole == block.size,
                    "block {id} at rest is not whole chunks"
                );
            }
            let live = self.blocks.iter().filter(|(_, block)| {
                block.slot == slot && matches!(block.state, State::Live | State::Pending)
            });
            let live = live.count() as u64;
            hold!(
                live == it.live,
                "slot {slot} counts {} live blocks of {live}",
                it.live
            );
        }
        let free = self
            .blocks
            .iter()
            .filter(|(_, block)| matches!(block.state, State::Free | State::Resting))
            .count();
        hold!(
            free == listed.len(),
            "{free} holes, {} of them listed",
            listed.len()
        );
        let resting = self
            .blocks
            .iter()
            .filter(|(_, block)| block.state == State::Resting);
        hold!(
            resting.count() == self.rest.len(),
            "{} blocks are known to be at rest",
            self.rest.len()
        );
        let mut live = 0;
        for (id, block) in self
            .blocks
            .iter()
            .filter(|(_, block)| block.state == State::Live)
        {
            hold!(
                self.table.get(&self.blocks, block.address) == id,
                "block {:#x} is not in the table",
                block.address
            );
            live += 1;
        }
        hold!(
            live == self.table.len(),
            "the table has {} entries for {live}",
            self.table.len()
        );
        Ok(())
    }

    fn check_counters(&self, homes: &BTreeMap<u64, u64>) -> Result<(), Broken> {
        let sum = |states: &[State], origin: Option<Origin>| -> (u64, u64) {
            let of = self.blocks.iter().filter(|(_, block)| {
                states.contains(&block.state)
                    && origin.is_none_or(|origin| origin == block.marks.origin())
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
                    &[State::Live][..],
                    Some(origin),
                ),
                (
                    "active",
                    &all.active,
                    &all.active_bytes,
                    &[State::Live, State::Pending],
                    Some(origin),
                ),
                (
                    "inactive",
                    &all.inactive_split,
                    &all.inactive_split_bytes,
                    &[State::Free, State::Resting],
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
            reserved == homes.values().sum::<u64>(),
            "reserved: counted {reserved}"
        );
        hold!(
            segments == homes.len() as u64,
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
