//! Memory that nobody wants is put to rest, woken when somebody does, and given back to the driver
//! when nobody did for long.
//!
//! Whole free chunks are taken out of their streams' bins, so that the quick way of an allocation does
//! not see them and pays nothing for it. A request that finds no other hole comes by here before
//! anything else is tried, and wakes no more chunks than it needs. So what is still at rest has been
//! used by nobody since it was put there.
//!
//! Only everybody's memory is put to rest, and only where it is mapped: a captured graph goes on using
//! the addresses of its private pool, and giving a plain segment back would wait for the device.

use super::arena::SHARED;
use super::block::{BlockId, NONE, State};
use super::chunk::ChunkId;
use super::gpu::Gpu;
use super::pool::Pool;
use std::collections::HashMap;

/// When blocks at rest are to be given back, on the caller's clock. The blocks themselves lie in the bins
/// of the streams that freed them.
#[derive(Default)]
pub struct Rest {
    due: HashMap<BlockId, u64>,
}

impl Rest {
    pub fn len(&self) -> usize {
        self.due.len()
    }

    pub fn knows(&self, block: BlockId) -> bool {
        self.due.contains_key(&block)
    }
}

impl<G: Gpu> Pool<G> {
    /// Puts what is free to rest, to be given back when it is `due`, and gives back what is due `now` and
    /// idle; times are on the caller's clock. `silent` says that nobody has asked for anything for long,
    /// so that no capture is likely to be on. Only then is the device asked what is done; else the next
    /// allocation does it, which knows its stream. Never waits. At most `most` chunks are given back;
    /// true if there may be more.
    pub fn tend_idle(&mut self, now: u64, due: u64, silent: bool, most: usize) -> bool {
        if self.granularity == 0 || !self.gpu.may_wait() {
            return false;
        }
        if silent {
            self.cover_all(SHARED);
            self.epochs.poll(&mut self.gpu);
        } else {
            self.epochs.ask();
        }
        self.unmap_passed(0, SHARED);
        self.put_to_rest(due);
        self.give_rested_back(now, most)
    }

    fn put_to_rest(&mut self, due: u64) {
        let Self {
            groups,
            slots,
            blocks,
            counters,
            rest,
            granularity,
            ..
        } = self;
        let chunks = &groups[SHARED as usize].chunks;
        for slot in slots.numbers_of(SHARED) {
            let owner = slots.get_mut(slot);
            let holes: Vec<BlockId> = owner.bins.ascending(blocks, *granularity).collect();
            for hole in holes {
                let (start, end) = (blocks[hole].address, blocks[hole].end());
                let mut whole = chunks.inside(start, end).map(|id| chunks.get(id));
                let Some(first) = whole.next() else { continue };
                let last = whole.last().unwrap_or(first);
                let (from, to) = (first.home, last.home + last.size);
                let freed = blocks[hole].detail;
                owner.remove(blocks, hole);
                counters.hole_removed(end - start);
                if start < from {
                    let left = blocks.split_front(hole, from - start, slot, State::Free);
                    blocks[left].detail = freed;
                    owner.insert(blocks, left);
                    counters.hole_added(from - start);
                }
                let mut block = hole;
                if to < end {
                    block = blocks.split_front(hole, to - from, slot, State::Resting);
                    blocks[block].detail = freed;
                    owner.insert(blocks, hole);
                    counters.hole_added(end - to);
                }
                blocks[block].state = State::Resting;
                owner.resting.get_or_insert_default().insert(blocks, block);
                rest.due.insert(block, due);
                counters.hole_added(to - from);
            }
        }
    }

    /// Wakes as many chunks as a request needs, of those that its stream may use at once. Where none
    /// are enough it wakes everything, whoever's it is. True if there was anything.
    pub(super) fn wake(&mut self, size: u64, slot: u16) -> bool {
        let own = self.slots.get(slot);
        if self.rest.due.is_empty() || own.group != SHARED {
            return false;
        }
        let best = |slot: u16| {
            let resting = self.slots.get(slot).resting.as_ref();
            resting.map_or(NONE, |bins| bins.best(&self.blocks, size))
        };
        let fitting = [best(slot), best(own.idle)]
            .into_iter()
            .filter(|id| *id != NONE);
        let Some(block) = fitting.min_by_key(|id| self.blocks[*id].size) else {
            self.wake_all();
            return true;
        };
        let chunks = &self.groups[SHARED as usize].chunks;
        let (start, end) = (self.blocks[block].address, self.blocks[block].end());
        let last = chunks.at(start + size - 1).map(|id| chunks.get(id));
        let needed = last.map_or(end, |last| last.home + last.size) - start;
        self.wake_front(block, needed);
        true
    }

    /// Everything is as if nothing had been put to rest.
    pub(super) fn wake_all(&mut self) {
        for block in self.in_order(self.rest.due.keys()) {
            self.wake_front(block, self.blocks[block].size);
        }
    }

    /// By address, so that it is the same in every run.
    fn in_order<'a>(&self, blocks: impl Iterator<Item = &'a BlockId>) -> Vec<BlockId> {
        let mut blocks: Vec<BlockId> = blocks.copied().collect();
        blocks.sort_unstable_by_key(|id| self.blocks[*id].address);
        blocks
    }

    /// The first `size` bytes of a block at rest, which are whole chunks, are a hole again.
    fn wake_front(&mut self, block: BlockId, size: u64) {
        let front = self.take_from_rest(block, size);
        self.make_hole(front);
    }

    /// Takes the first `size` bytes, which are whole chunks, out of a block at rest. They belong to no
    /// list then.
    fn take_from_rest(&mut self, block: BlockId, size: u64) -> BlockId {
        let Self {
            blocks,
            slots,
            counters,
            rest,
            ..
        } = self;
        let whole = blocks[block];
        let resting = slots.get_mut(whole.slot).resting.get_or_insert_default();
        resting.remove(blocks, block);
        counters.hole_removed(whole.size);
        if size == whole.size {
            rest.due.remove(&block);
            return block;
        }
        let front = blocks.split_front(block, size, whole.slot, State::Resting);
        blocks[front].detail = whole.detail;
        resting.insert(blocks, block);
        counters.hole_added(whole.size - size);
        front
    }

    /// Makes what was taken from rest a hole of its stream, or an idle one if its work is done.
    fn make_hole(&mut self, block: BlockId) {
        let (slot, freed) = (self.blocks[block].slot, self.blocks[block].detail);
        let idle = self.groups[SHARED as usize].idle;
        if slot == idle || self.is_completed(slot, freed) {
            self.add_hole(block, idle, 0);
        } else {
            self.add_hole(block, slot, freed);
        }
    }

    fn give_rested_back(&mut self, now: u64, most: usize) -> bool {
        let idle = self.groups[SHARED as usize].idle;
        let over = self.rest.due.iter().filter(|(id, due)| {
            let block = &self.blocks[**id];
            **due <= now && (block.slot == idle || self.is_completed(block.slot, block.detail))
        });
        let mut left = most;
        for block in self.in_order(over.map(|(id, _)| id)) {
            let (start, end) = (self.blocks[block].address, self.blocks[block].end());
            let chunks = &self.groups[SHARED as usize].chunks;
            let chunks: Vec<ChunkId> = chunks.inside(start, end).collect();
            for chunk in chunks {
                if left == 0 {
                    break;
                }
                left -= usize::from(self.give_front_back(block, chunk));
            }
        }
        self.start_where_the_gap_does(SHARED);
        left == 0
    }

    /// Gives the first chunk of a block at rest back. False where that is not possible, and the chunk
    /// is a hole again.
    fn give_front_back(&mut self, block: BlockId, chunk: ChunkId) -> bool {
        let idle = self.groups[SHARED as usize].idle;
        let size = self.groups[SHARED as usize].chunks.get(chunk).size;
        let front = self.take_from_rest(block, size);
        // A hole of its own for the moment: what lies beside it stays.
        let hole = &mut self.blocks[front];
        (hole.state, hole.slot, hole.detail) = (State::Free, idle, 0);
        self.slots.get_mut(idle).insert(&mut self.blocks, front);
        self.counters.hole_added(size);
        let unused = self.groups[SHARED as usize].chunks.get(chunk).stale == 0;
        let gone = unused && self.give_back(front, chunk, SHARED);
        if !gone {
            self.slots.get_mut(idle).remove(&mut self.blocks, front);
            self.counters.hole_removed(size);
            self.make_hole(front);
        }
        gone
    }
}
