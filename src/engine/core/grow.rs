//! Growing, moving free chunks to where they are needed, and giving memory back.

use super::block::{BlockId, NONE, State};
use super::chunk::{ChunkId, Stale};
use super::gpu::{Gpu, Refusal};
use super::group::{GroupId, SHARED};
use super::journal::Happening;
use super::pool::{Pool, join};
use super::stream::StreamKey;

/// Small chunks are made into larger ones where growth would make chunks of twice their size today, up
/// to this. Beyond it there is little left to save, and memory is lost: generated loads of 30 GB that
/// allocate at random (`tests/loads`) held 1.043 of what was live without this bound, 1.032 with it.
const MERGED: u64 = 8 << 20;

impl<G: Gpu> Pool<G> {
    /// The largest chunk to create now.
    pub(super) fn largest_chunk(&self, group: GroupId) -> u64 {
        let share = self.policy.tuning.share << u32::from(self.gpu.is_limited());
        let chosen = match self.policy.chunk {
            0 => self.groups[group as usize].reserved / share,
            chunk => chunk.min(super::LARGEST_REQUEST),
        };
        (chosen / self.granularity * self.granularity).max(self.granularity)
    }

    /// Makes a hole of at least `size` bytes at the end of mapped memory.
    pub(super) fn extend(&mut self, size: u64, slot: u16) -> Result<BlockId, Refusal> {
        let id = self.slots.get(slot).group;
        if self.granularity == 0 {
            return self.add_segment(size, id);
        }
        let group = &self.groups[id as usize];
        // What must fail takes nothing first.
        let free = group.reserved - group.live;
        if size > free + 4 * self.largest_chunk(id) {
            self.gpu.has_room(size - free)?;
        }
        let group = &self.groups[id as usize];
        let highest = group.highest.max(group.live + size);
        let ceiling = highest + highest * self.policy.tuning.slack / 1000;
        let allowed = ceiling.saturating_sub(group.reserved) / self.granularity * self.granularity;
        // A wait on the GPU costs less than mapping: in a run of prefetch_streams (H100) 38 waits rather
        // than 16 spared 700 of 1,300 chunks their move.
        if self.missing(size, slot) > allowed
            && let Some(hole) = self.borrow(size, slot)
        {
            self.counters.hits += 1;
            return Ok(hole);
        }
        let missing = self.missing(size, slot);
        let tail = self.groups[id as usize].tail;
        let moved = self.choose(missing.saturating_sub(allowed), slot, tail);
        let grown = missing
            .saturating_sub(moved)
            .next_multiple_of(self.granularity);
        let group = &self.groups[id as usize];
        if group.space.gap_at(group.cursor) < moved + grown {
            self.new_run(size, id)?;
            self.choose(size.saturating_sub(allowed), slot, NONE);
        }
        self.move_chosen(slot)?;
        if self.grow(size, slot).is_err() {
            // The limit, or the device, has no more: everything that can be moved is.
            let (missing, tail) = (self.missing(size, slot), self.groups[id as usize].tail);
            self.choose(missing, slot, tail);
            self.move_chosen(slot)?;
            self.grow(size, slot)?;
        }
        Ok(self.groups[id as usize].tail)
    }

    /// Takes memory ahead of need: one idle hole of at least `size` bytes, which any stream may have.
    pub fn take_ahead(&mut self, size: u64) -> Result<(), Refusal> {
        if size > super::LARGEST_REQUEST {
            return Err(Refusal::OutOfMemory);
        }
        let idle = self.groups[SHARED as usize].idle;
        self.extend(size.next_multiple_of(super::BLOCK), idle)
            .map(drop)
    }

    /// Whether the stream may use a hole at once.
    fn usable(&self, id: BlockId, slot: u16) -> bool {
        let block = &self.blocks[id];
        block.state == State::Free
            && (block.slot == slot || block.slot == self.slots.get(slot).idle)
    }

    /// Bytes that must be mapped behind the cursor before the tail holds `size` free ones.
    fn missing(&self, size: u64, slot: u16) -> u64 {
        let tail = self.groups[self.slots.get(slot).group as usize].tail;
        match tail != NONE && self.usable(tail, slot) {
            true => size.saturating_sub(self.blocks[tail].size),
            false => size,
        }
    }

    /// Chooses whole free chunks, at least `wanted` bytes of them if there are so many; none of the hole
    /// `except`. Those that the stream may use come first, then those of other streams, behind a wait on
    /// the GPU; for idle memory's own slot there are no others. The smallest holes give theirs first:
    /// large ones can still meet large requests as they are. Returns the bytes chosen.
    fn choose(&mut self, wanted: u64, slot: u16, except: BlockId) -> u64 {
        let mut chosen = std::mem::take(&mut self.chosen);
        chosen.clear();
        let mut bytes = 0;
        let own = self.slots.get(slot);
        let chunks = &self.groups[own.group as usize].chunks;
        // A captured graph goes on using the addresses of its private pool: nothing moves there.
        let wanted = if own.group == SHARED || self.groups[own.group as usize].closing {
            wanted
        } else {
            0
        };
        let (idle, group) = (own.idle, own.group);
        let own = [Some(slot), Some(idle).filter(|idle| *idle != slot)];
        let others = self.slots.iter().filter(|(at, it)| {
            slot != idle && it.group == group && *at != slot && *at != idle && !it.bins.is_empty()
        });
        let (mut owned, mut until) = (0, 0);
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
                    bytes += chunks.get(chunk).size;
                    chosen.push((id, chunk));
                    if source == slot || source == idle {
                        owned = chosen.len();
                    } else {
                        until = until.max(hole.detail);
                    }
                }
            }
        }
        if chosen.len() > owned && !self.follow(slot, until) {
            chosen.truncate(owned);
            let chunks = &self.groups[group as usize].chunks;
            bytes = chosen.iter().map(|(_, it)| chunks.get(*it).size).sum();
        }
        self.chosen = chosen;
        bytes
    }

    /// Starts a new run of mapped memory in a gap that holds `size` bytes and some more.
    fn new_run(&mut self, size: u64, id: GroupId) -> Result<(), Refusal> {
        let wanted = size.next_multiple_of(self.granularity) * 2 + (1 << 30);
        let fits = |(_, length): &(u64, u64)| *length >= wanted;
        let mut gap = self.groups[id as usize].space.largest_gap().filter(fits);
        if gap.is_none() {
            self.unmap_stale(0, id);
            gap = self.groups[id as usize].space.largest_gap().filter(fits);
        }
        let group = &mut self.groups[id as usize];
        let start = match gap {
            Some((start, _)) => start,
            None => {
                let length = self.gpu.reach().max(wanted.next_power_of_two());
                let start = self.gpu.reserve(length)?;
                group.space.add(start, length);
                group.chunks.add_range(start, length);
                start
            }
        };
        group.cursor = start;
        group.tail = NONE;
        Ok(())
    }

    /// Maps the chosen chunks behind the cursor. Nothing waits: the stream that may use their
    /// bytes orders its own work, and the old mappings stay up until that is done.
    ///
    /// Small chunks, from when less was held, go back instead as far as growth makes whole large ones
    /// of their bytes: that costs about as much now, and less whenever these bytes move again. It brings
    /// llama_lora_ckpt from 1,000 chunks moved in a repeated pass to 420, prefetch_streams from 160 to 80.
    fn move_chosen(&mut self, slot: u16) -> Result<(), Refusal> {
        let id = self.slots.get(slot).group;
        let large = self.largest_chunk(id).min(MERGED);
        let mut merged = self.mergeable(id, large);
        let chosen = std::mem::take(&mut self.chosen);
        let mut result = Ok(());
        for (hole, chunk) in &chosen {
            let size = self.groups[id as usize].chunks.get(*chunk).size;
            if size <= merged
                && self.is_mergeable(*hole, *chunk, id, large)
                && self.give_back(*hole, *chunk, id)
            {
                merged -= size;
                continue;
            }
            result = self.move_chunk(*hole, *chunk, slot);
            if result.is_err() {
                break;
            }
        }
        if !chosen.is_empty() {
            self.clock.mark(&mut self.gpu);
            let bound = (self.groups[id as usize].chunks.len() / 2).max(256);
            self.unmap_stale(bound, id);
        }
        self.chosen = chosen;
        result
    }

    /// Bytes of the chosen chunks to make large ones of: whole large ones only. None where a limit makes
    /// waste dear: the smallest limit of gpt2_varlen would be 1.006 rather than 1.004.
    fn mergeable(&mut self, id: GroupId, large: u64) -> u64 {
        if self.chosen.is_empty() || id != SHARED || self.gpu.is_limited() {
            return 0;
        }
        self.clock.mark(&mut self.gpu);
        self.clock.poll(&mut self.gpu);
        let chunks = &self.groups[id as usize].chunks;
        let small = self
            .chosen
            .iter()
            .filter(|(hole, chunk)| self.is_mergeable(*hole, *chunk, id, large));
        small.map(|(_, chunk)| chunks.get(*chunk).size).sum::<u64>() / large * large
    }

    /// Whether a chunk that lies wholly in a hole is small by now, and nothing uses it or an old mapping of it.
    fn is_mergeable(&self, hole: BlockId, chunk: ChunkId, id: GroupId, large: u64) -> bool {
        let (group, hole) = (&self.groups[id as usize], &self.blocks[hole]);
        let chunk = group.chunks.get(chunk);
        let is_done = hole.slot == group.idle || hole.detail <= self.clock.passed;
        chunk.size * 2 <= large && chunk.stale == 0 && is_done
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
        group.space.take(group.cursor, chunk.size);
        group.chunks.move_home(id, group.cursor);
        journal.note(Happening::Unmapped(chunk.home, chunk.size));
        journal.note(Happening::Mapped(group.cursor, chunk.size));
        group.chunks.get_mut(id).stale += 1;
        group.chunks.stale.push_back(Stale {
            chunk: id,
            address: chunk.home,
            until: if owner == group.idle { 0 } else { until },
        });
        counters.stitches += 1;
        counters.stitched_bytes += chunk.size;
        counters.stale += 1;
        counters.stale_bytes += chunk.size;
        let idle = group.idle;
        self.cut(hole, chunk.home, chunk.size);
        // What was another stream's is this one's now.
        let owner = if owner == idle { idle } else { slot };
        self.append(chunk.size, owner, until, slot);
        Ok(())
    }

    /// Takes `size` bytes at `address` out of a hole; what is left on either side stays a hole.
    /// The node goes on as the right-hand rest if there is one, so that the chunks of one hole
    /// can be cut out in ascending order.
    fn cut(&mut self, hole: BlockId, address: u64, size: u64) {
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
    fn append(&mut self, size: u64, owner: u16, clock: u64, slot: u16) {
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
                && let Some((owner, clock)) = join((owner, clock), (other, detail), idle)
            {
                slots.get_mut(other).remove(blocks, tail);
                let hole = &mut blocks[tail];
                hole.size += size;
                (hole.slot, hole.detail) = (owner, clock);
                counters.hole_grown(hole.size - size, size);
                slots.get_mut(owner).insert(blocks, tail);
                return;
            }
        }
        let id = blocks.add(address, size, owner, State::Free);
        blocks[id].detail = clock;
        blocks[id].prev = tail;
        if tail != NONE {
            blocks[tail].next = id;
        }
        group.tail = id;
        counters.hole_added(size);
        slots.get_mut(owner).insert(blocks, id);
    }

    /// Creates and maps chunks behind the cursor until the tail holds `size` free bytes.
    fn grow(&mut self, size: u64, slot: u16) -> Result<(), Refusal> {
        let (id, idle) = (self.slots.get(slot).group, self.slots.get(slot).idle);
        let mut missing = self.missing(size, slot);
        if missing > 4 * self.largest_chunk(id) {
            self.gpu.has_room(missing)?;
        }
        if missing > 0 {
            self.counters.growths += 1;
        }
        while missing > 0 {
            let bytes = missing
                .next_multiple_of(self.granularity)
                .min(self.largest_chunk(id));
            let group = &mut self.groups[id as usize];
            if group.space.gap_at(group.cursor) < bytes {
                return Err(Refusal::OutOfMemory);
            }
            let handle = self.gpu.create(bytes)?;
            if let Err(refusal) = self.gpu.map(group.cursor, bytes, handle) {
                self.gpu.release(handle, bytes);
                group.abandon(bytes);
                return Err(refusal);
            }
            group.space.take(group.cursor, bytes);
            group.chunks.add(handle, bytes, group.cursor);
            group.reserved += bytes;
            self.counters.chunk_added(bytes);
            self.journal.note(Happening::Mapped(group.cursor, bytes));
            self.append(bytes, idle, 0, slot);
            missing = self.missing(size, slot);
        }
        Ok(())
    }

    /// Takes old mappings down, the oldest first, until at most `bound` are left or the next one
    /// may still be in use.
    fn unmap_stale(&mut self, bound: usize, id: GroupId) {
        while self.unmap_passed(bound, id) {
            let passed = self.clock.passed;
            self.clock.poll(&mut self.gpu);
            if self.clock.passed != passed {
                continue;
            }
            // Far beyond the bound it is time to wait.
            let left = self.groups[id as usize].chunks.stale.len();
            if left < bound * 4 || !self.clock.wait(&mut self.gpu) {
                return;
            }
        }
    }

    /// The same as far as is known without asking. True where the next one may still be in use.
    pub(super) fn unmap_passed(&mut self, bound: usize, id: GroupId) -> bool {
        let Self {
            clock,
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
            if clock.passed < old.until {
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
        self.trim_closing();
        let bytes = self.trim(SHARED);
        self.gpu.attend(None);
        bytes
    }

    /// The same for one group, without waiting. For a group that is closing the caller has waited
    /// for the device: a graph may be replaying on streams that the pool knows nothing of.
    pub(super) fn trim(&mut self, id: GroupId) -> u64 {
        if !self.gpu.may_wait() {
            return 0;
        }
        if id != SHARED {
            self.settle();
        }
        if self.granularity == 0 {
            return self.trim_segments(id);
        }
        self.unmap_stale(0, id);
        let idle = self.groups[id as usize].idle;
        self.choose(u64::MAX, idle, NONE);
        let chosen = std::mem::take(&mut self.chosen);
        let mut bytes = 0;
        for (hole, chunk_id) in &chosen {
            let chunk = *self.groups[id as usize].chunks.get(*chunk_id);
            if chunk.stale == 0 && self.give_back(*hole, *chunk_id, id) {
                bytes += chunk.size;
            }
        }
        self.start_where_the_gap_does(id);
        self.chosen = chosen;
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
