//! Moving chunks: whole free ones are mapped a second time where a request needs one range.

use super::arena::SHARED;
use super::block::{BlockId, NONE, State};
use super::chunk::{Chunk, ChunkId, Stale};
use super::gpu::{Gpu, Refusal};
use super::journal::Happening;
use super::pool::{Pool, join};

/// How many old mappings stay up, for each chunk that is held and at the least. They cost addresses, of
/// which eight times the device's memory is reserved at once, and taking one down costs two thirds of what
/// mapping a chunk does: llama_serve, from an empty pool, takes a fifth less of the driver's time than with
/// half a mapping a chunk.
const STALE: usize = 4;
const STALE_AT_LEAST: usize = 256;

impl<G: Gpu> Pool<G> {
    /// Chooses whole free chunks, at least `wanted` bytes of them if there are so many; none of the hole
    /// `except`. Those that the stream may use come first, then those of other streams, behind a wait on
    /// the GPU; for idle memory's own slot there are no others. The smallest holes give theirs first:
    /// large ones can still meet large requests as they are. Returns the bytes chosen.
    pub(super) fn choose(&mut self, wanted: u64, slot: u16, except: BlockId) -> u64 {
        let mut chosen = std::mem::take(&mut self.chosen);
        chosen.clear();
        let mut bytes = 0;
        let own = self.slots.get(slot);
        let chunks = &self.groups[own.group as usize].chunks;
        // A captured graph goes on using the addresses of its private pool: nothing moves there.
        let wanted = if own.group == SHARED { wanted } else { 0 };
        let (idle, group) = (own.idle, own.group);
        let own = [Some(slot), Some(idle).filter(|idle| *idle != slot)];
        let others = self.slots.beside(slot).filter(|_| slot != idle);
        let mut owned = 0;
        let mut sources: Vec<(u16, u64)> = Vec::new();
        'search: for source in own.into_iter().flatten().chain(others.map(|(at, _)| at)) {
            let bins = &self.slots.get(source).bins;
            for id in bins.ascending(&self.blocks, self.granularity) {
                if bytes >= wanted {
                    break 'search;
                }
                if id == except {
                    continue;
                }
                let hole = &self.blocks[id];
                for chunk in chunks.inside(hole.address, hole.end()) {
                    if bytes >= wanted {
                        break 'search;
                    }
                    let Chunk { home, size, .. } = *chunks.get(chunk);
                    if source == slot || source == idle {
                        owned = chosen.len() + 1;
                    } else {
                        let Some(epoch) = self.reusable_after(id, (home, home + size), slot) else {
                            continue;
                        };
                        match sources.iter_mut().find(|(at, _)| *at == source) {
                            Some((_, until)) => *until = epoch.max(*until),
                            None => sources.push((source, epoch)),
                        }
                    }
                    bytes += size;
                    chosen.push((id, chunk));
                }
            }
        }
        if !sources
            .iter()
            .all(|(other, until)| self.follow(slot, *other, *until))
        {
            chosen.truncate(owned);
            let chunks = &self.groups[group as usize].chunks;
            bytes = chosen.iter().map(|(_, it)| chunks.get(*it).size).sum();
        }
        self.chosen = chosen;
        bytes
    }

    /// Maps the chosen chunks behind the cursor. Nothing waits: the stream that may use their
    /// bytes orders its own work, and the old mappings stay up until that is done.
    pub(super) fn move_chosen(&mut self, slot: u16) -> Result<(), Refusal> {
        let id = self.slots.get(slot).group;
        let began = self.gpu.now();
        let chosen = std::mem::take(&mut self.chosen);
        let mut result = Ok(());
        for (hole, chunk) in &chosen {
            result = self.move_chunk(*hole, *chunk, slot);
            if result.is_err() {
                break;
            }
        }
        if !chosen.is_empty() {
            self.cover_stale(id);
            let bound = (self.groups[id as usize].chunks.len() * STALE).max(STALE_AT_LEAST);
            self.unmap_stale(bound, id);
            self.effort.spend(self.gpu.now() - began);
        }
        self.chosen = chosen;
        result
    }

    fn move_chunk(&mut self, hole: BlockId, id: ChunkId, slot: u16) -> Result<(), Refusal> {
        let Self {
            groups,
            blocks,
            slots,
            gpu,
            counters,
            journal,
            ..
        } = self;
        let group_id = slots.get(slot).group;
        let group = &mut groups[group_id as usize];
        let chunk = *group.chunks.get(id);
        if group.space.gap_at(group.cursor) < chunk.size {
            return Ok(());
        }
        if let Err(refusal) = gpu.map(group.cursor, chunk.size, chunk.handle) {
            group.abandon(chunk.size);
            return Err(refusal);
        }
        let (owner, until) = (blocks[hole].slot, blocks[hole].detail);
        let at = group.cursor;
        group.space.take(at, chunk.size);
        group.chunks.move_home(id, group.cursor);
        journal.note(Happening::Unmapped(chunk.home, chunk.size));
        journal.note(Happening::Mapped(group.cursor, chunk.size));
        group.chunks.get_mut(id).stale += 1;
        group.chunks.stale.push_back(Stale {
            chunk: id,
            address: chunk.home,
            stream: slots.get(owner).key,
            until: if owner == group.idle { 0 } else { until },
        });
        counters.stitches += 1;
        counters.stitched_bytes += chunk.size;
        counters.stale += 1;
        counters.stale_bytes += chunk.size;
        let idle = group.idle;
        self.cut(hole, chunk.home, chunk.size);
        let (owner, epoch) = match owner == idle || owner == slot {
            true => {
                let range = (chunk.home, chunk.home + chunk.size);
                let key = self.slots.get(owner).key;
                self.epochs.note_moved(key, range, at);
                (owner, until)
            }
            // What was another stream's is this one's now.
            false => (slot, self.take_over(slot)),
        };
        self.append(chunk.size, owner, epoch, slot);
        Ok(())
    }

    /// Takes `size` bytes at `address` out of a hole; what is left on either side stays a hole.
    /// The node goes on as the right-hand rest if there is one, so that the chunks of one hole
    /// can be cut out in ascending order.
    pub(super) fn cut(&mut self, hole: BlockId, address: u64, size: u64) {
        let Self {
            blocks,
            slots,
            counters,
            groups,
            ..
        } = self;
        let free = blocks[hole];
        let owner = slots.get_mut(free.slot);
        let group = &mut groups[owner.group as usize];
        owner.remove(blocks, hole);
        counters.hole_removed(free.size);
        let (left, right) = (address - free.address, free.end() - (address + size));
        let mut before = free.prev;
        if left > 0 {
            before = blocks.add(free.address, left, free.slot, State::Free);
            blocks[before].prev = free.prev;
            blocks[before].detail = free.detail;
            if free.prev != NONE {
                blocks[free.prev].next = before;
            }
            owner.insert(blocks, before);
            counters.hole_added(left);
        } else if before != NONE {
            blocks[before].next = NONE;
        }
        if right > 0 {
            let rest = &mut blocks[hole];
            rest.address = address + size;
            rest.size = right;
            rest.prev = NONE;
            owner.insert(blocks, hole);
            counters.hole_added(right);
            return;
        }
        if free.next != NONE {
            blocks[free.next].prev = NONE;
        }
        blocks.remove(hole);
        if group.tail == hole {
            // Growth goes on from where the run ends now.
            group.tail = before;
            group.cursor = address;
        }
    }

    /// New free bytes stand behind the cursor. They join the tail if the stream may use that too.
    pub(super) fn append(&mut self, size: u64, owner: u16, epoch: u64, slot: u16) {
        let Self {
            blocks,
            slots,
            counters,
            groups,
            ..
        } = self;
        let idle = slots.get(slot).idle;
        let group = &mut groups[slots.get(slot).group as usize];
        let (address, tail) = (group.cursor, group.tail);
        group.cursor += size;
        if tail != NONE && blocks[tail].state == State::Free {
            let (other, detail) = (blocks[tail].slot, blocks[tail].detail);
            if (other == slot || other == idle)
                && let Some((owner, epoch)) = join((owner, epoch), (other, detail), idle)
            {
                slots.get_mut(other).remove(blocks, tail);
                let hole = &mut blocks[tail];
                hole.size += size;
                (hole.slot, hole.detail) = (owner, epoch);
                counters.hole_grown(size);
                slots.get_mut(owner).insert(blocks, tail);
                return;
            }
        }
        let id = blocks.add(address, size, owner, State::Free);
        blocks[id].detail = epoch;
        blocks[id].prev = tail;
        if tail != NONE {
            blocks[tail].next = id;
        }
        group.tail = id;
        counters.hole_added(size);
        slots.get_mut(owner).insert(blocks, id);
    }
}
