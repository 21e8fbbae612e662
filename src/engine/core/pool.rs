//! The pool: how a request is met.
//!
//! [`Pool::allocate`] is the ladder, a comment a step. The first step, a best fit that is free
//! already, is the fast path: a look-up in two sets of bins, a split and a hash insertion.

use super::block::{BlockId, Blocks, NONE, State};
use super::chunk::{ChunkId, Stale};
use super::counters::Counters;
use super::gpu::{Event, Gpu, Refusal};
use super::group::{Group, GroupId, SHARED};
use super::stream::{Slots, StreamKey};
use super::table::Table;
use super::{BLOCK, LARGEST_REQUEST};
use std::collections::{HashMap, VecDeque};

/// What may be tuned.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// Growable segments of mapped memory; plain segments otherwise.
    pub expandable: bool,
    /// The largest chunk that growth creates, in bytes; 0 lets the pool choose.
    pub chunk: u64,
    /// How far reserved memory may exceed the highest live figure, in thousandths, before free
    /// chunks are moved rather than new ones created. Nine keeps every recorded trace within 1 %
    /// where the holes allow it (`tests/replay.rs`).
    pub slack: u64,
}

impl Default for Policy {
    fn default() -> Self {
        Policy { expandable: true, chunk: 0, slack: 9 }
    }
}

/// A request that could not be met, and what the pool looked like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Bytes asked for.
    pub asked: u64,
    /// Bytes in use by the program.
    pub live: u64,
    /// Bytes held from the driver.
    pub reserved: u64,
    /// Bytes of the largest free range.
    pub largest: u64,
    /// What the driver, or the limit, said.
    pub refusal: Refusal,
}

/// An address that is not the start of a block in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unknown;

/// Why a freed block is not free yet: what another stream must get past.
enum Use {
    Event(Event),
    /// No event could be recorded; tried again later.
    Stream(StreamKey),
}

/// A block that the program gave back while other streams may still use it.
struct Pending {
    block: BlockId,
    uses: Vec<Use>,
}

/// The pool of one device, private pools included. One caller at a time.
pub struct Pool<G> {
    pub(super) gpu: G,
    policy: Policy,
    granularity: u64,
    pub(super) blocks: Blocks,
    pub(super) table: Table,
    pub(super) slots: Slots,
    pub(super) groups: Vec<Group>,
    /// Streams recorded on live blocks.
    uses: HashMap<BlockId, Vec<StreamKey>>,
    pending: VecDeque<Pending>,
    pub(super) counters: Counters,
    /// Scratch: chunks to move and the holes they lie in, ascending inside a hole.
    chosen: Vec<(BlockId, ChunkId)>,
}

impl<G: Gpu> Pool<G> {
    /// An empty pool. Takes nothing from the GPU yet.
    pub fn new(gpu: G, policy: Policy) -> Self {
        let granularity = if policy.expandable { gpu.granularity() } else { 0 };
        let mut slots = Slots::new();
        // The first slot of all can always be had.
        let idle = slots.add_idle(SHARED).unwrap_or_default();
        Pool {
            gpu,
            policy,
            granularity,
            blocks: Blocks::new(),
            table: Table::new(),
            slots,
            groups: vec![Group::new(idle, granularity)],
            uses: HashMap::new(),
            pending: VecDeque::new(),
            counters: Counters::default(),
            chosen: Vec::new(),
        }
    }

    /// Hands out `size` bytes (rounded up to 512) that the stream may use at once. The address is
    /// aligned to 512 bytes. `requested` is what the program asked for, for the statistics.
    ///
    /// Cost of a hit: two bin look-ups, one split, one hash insertion; no call to the driver.
    #[inline]
    pub fn allocate(
        &mut self,
        size: u64,
        requested: u64,
        stream: StreamKey,
        group: GroupId,
    ) -> Result<u64, Shortage> {
        if size > LARGEST_REQUEST {
            return Err(self.shortage(size, Refusal::OutOfMemory));
        }
        let size = size.max(1).next_multiple_of(BLOCK);
        let idle = self.groups[group as usize].idle;
        let Some(slot) = self.slots.of(stream, group, idle) else {
            return Err(self.shortage(size, Refusal::OutOfMemory));
        };
        // 1. The best fit that is free already, on the stream itself or idle.
        let mut hole = self.fit(size, slot);
        if hole == NONE {
            hole = self.find_harder(size, slot)?;
        } else {
            self.counters.hits += 1;
        }
        let block = self.take(hole, size, slot);
        self.blocks[block].detail = requested;
        let address = self.blocks[block].address;
        self.table.insert(address, block);
        self.slots.get_mut(slot).live += 1;
        self.counters.allocated(size, requested);
        let group = &mut self.groups[group as usize];
        group.live += size;
        group.highest = group.highest.max(group.live);
        Ok(address)
    }

    /// Takes a block back. Its own stream may have it again at once; others when the work before
    /// is done. Returns its size.
    #[inline]
    pub fn free(&mut self, address: u64) -> Result<u64, Unknown> {
        let id = self.table.remove(address);
        if id == NONE {
            return Err(Unknown);
        }
        let block = self.blocks[id];
        self.counters.freed(block.size, block.detail);
        if block.shared {
            self.defer(id);
        } else {
            self.retire(id);
        }
        Ok(block.size)
    }

    /// Notes that another stream uses the block, so that freeing it waits for that stream too.
    pub fn record_use(&mut self, address: u64, stream: StreamKey) -> Result<(), Unknown> {
        let id = self.table.get(address);
        if id == NONE {
            return Err(Unknown);
        }
        if self.slots.get(self.blocks[id].slot).key == stream {
            return Ok(());
        }
        self.blocks[id].shared = true;
        let uses = self.uses.entry(id).or_default();
        if !uses.contains(&stream) {
            uses.push(stream);
        }
        Ok(())
    }

    /// The size of the block that starts at `address`.
    pub fn size_of(&self, address: u64) -> Option<u64> {
        match self.table.get(address) {
            NONE => None,
            id => Some(self.blocks[id].size),
        }
    }

    /// Everything counted so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// For resetting peaks and sums.
    pub fn counters_mut(&mut self) -> &mut Counters {
        &mut self.counters
    }

    /// The GPU behind the pool.
    pub fn gpu(&self) -> &G {
        &self.gpu
    }

    /// The GPU behind the pool.
    pub fn gpu_mut(&mut self) -> &mut G {
        &mut self.gpu
    }

    /// Bytes of addresses held, mapped or not.
    pub fn addresses(&self) -> u64 {
        self.groups.iter().map(|group| group.space.reserved()).sum()
    }

    // ---- groups --------------------------------------------------------------------------

    /// A new group, which shares no memory with others. `None` when there are too many.
    pub fn open_group(&mut self) -> Option<GroupId> {
        let vacant = self.groups.iter().position(|group| group.closed);
        let at = vacant.unwrap_or(self.groups.len());
        let id = GroupId::try_from(at).ok()?;
        let group = Group::new(self.slots.add_idle(id)?, self.granularity);
        match vacant {
            Some(at) => self.groups[at] = group,
            None => self.groups.push(group),
        }
        Some(id)
    }

    /// Nobody allocates from the group any more. Its memory is given back once its last block is
    /// freed; until then, as much as can be.
    pub fn close_group(&mut self, id: GroupId) {
        self.groups[id as usize].closing = true;
        self.trim(id);
        self.finish_closing(id);
    }

    /// Whether a group is still there: it goes with its last block once it is closed.
    pub fn group_is_open(&self, id: GroupId) -> bool {
        self.groups.get(id as usize).is_some_and(|group| !group.closed)
    }

    /// Lets closing groups go that hold nothing any more. Cheap when there are none.
    #[cold]
    fn finish_closing(&mut self, id: GroupId) {
        let group = &mut self.groups[id as usize];
        if !group.closing || group.closed || group.reserved > 0 || group.live > 0 {
            return;
        }
        for (start, size) in std::mem::take(&mut group.space).ranges {
            self.gpu.unreserve(start, size);
        }
        group.closed = true;
        self.slots.remove_group(id, &mut self.gpu);
    }

    /// Bytes of the largest free range, whoever's it is.
    pub fn largest_free(&self) -> u64 {
        self.slots
            .iter()
            .map(|(_, slot)| slot.bins.largest(&self.blocks))
            .filter(|id| *id != NONE)
            .map(|id| self.blocks[id].size)
            .max()
            .unwrap_or(0)
    }

    // ---- the ladder beyond the first step ------------------------------------------------

    #[cold]
    #[inline(never)]
    fn find_harder(&mut self, size: u64, slot: u16) -> Result<BlockId, Shortage> {
        // 2. What other streams' passed events have made idle.
        if self.advance(slot) {
            let hole = self.fit(size, slot);
            if hole != NONE {
                self.counters.hits += 1;
                return Ok(hole);
            }
        }
        // 3 to 5. Growth within a hair of the highest live figure; free chunks moved to where
        // they are needed; growth beyond, up to the limit.
        match self.extend(size, slot) {
            Ok(hole) => return Ok(hole),
            Err(Refusal::Failed(_)) => self.counters.driver_errors += 1,
            Err(_) => {}
        }
        // 6. Waiting until everything free is idle, and giving back what plain segments allow.
        self.counters.alloc_retries += 1;
        self.settle();
        let hole = self.fit(size, slot);
        if hole != NONE {
            return Ok(hole);
        }
        if self.granularity == 0 {
            self.trim_segments(self.slots.get(slot).group);
        }
        self.extend(size, slot).map_err(|refusal| self.shortage(size, refusal))
    }

    fn shortage(&self, asked: u64, refusal: Refusal) -> Shortage {
        Shortage {
            asked,
            live: self.counters.all.allocated_bytes.current,
            reserved: self.counters.all.reserved_bytes.current,
            largest: self.largest_free(),
            refusal,
        }
    }

    /// The smallest hole of at least `size` bytes that the stream may use now.
    #[inline]
    fn fit(&self, size: u64, slot: u16) -> BlockId {
        let own = self.slots.get(slot);
        let idle = self.slots.get(own.idle).bins.best(&self.blocks, size);
        let own = own.bins.best(&self.blocks, size);
        if own == NONE {
            return idle;
        }
        if idle == NONE {
            return own;
        }
        let (a, b) = (&self.blocks[own], &self.blocks[idle]);
        if (a.size, a.address) <= (b.size, b.address) { own } else { idle }
    }

    /// Cuts `size` bytes off the low end of a hole.
    #[inline]
    fn take(&mut self, hole: BlockId, size: u64, slot: u16) -> BlockId {
        let Self { blocks, slots, counters, .. } = self;
        let free = blocks[hole];
        let owner = slots.get_mut(free.slot);
        counters.hole_removed(free.size);
        if free.size == size {
            owner.remove(blocks, hole);
            let block = &mut blocks[hole];
            block.state = State::Live;
            block.slot = slot;
            return hole;
        }
        // The rest keeps the hole's node and its place in the order of being freed.
        owner.bins.remove(blocks, hole);
        let block = blocks.add(free.address, size, slot, State::Live);
        blocks[block].prev = free.prev;
        blocks[block].next = hole;
        if free.prev != NONE {
            blocks[free.prev].next = block;
        }
        let rest = &mut blocks[hole];
        rest.address += size;
        rest.size -= size;
        rest.prev = block;
        let rest = rest.size;
        owner.bins.insert(blocks, hole);
        counters.hole_added(rest);
        block
    }

    /// A block that nothing but its own stream's earlier work uses becomes a hole.
    #[inline]
    fn retire(&mut self, id: BlockId) {
        let (size, slot) = (self.blocks[id].size, self.blocks[id].slot);
        self.counters.retired(size);
        let several = self.slots.streams() > 1;
        let owner = self.slots.get_mut(slot);
        let group_id = owner.group;
        let group = &mut self.groups[group_id as usize];
        group.live -= size;
        let closing = group.closing;
        owner.live -= 1;
        owner.clock += 1;
        let clock = owner.clock;
        // With one stream nobody else waits for its events. With several, one event for each
        // 64th of the memory freed lets the others have it soon, at next to no cost.
        if several {
            owner.unmarked += size;
            if owner.unmarked > group.reserved / 64 {
                owner.mark(&mut self.gpu);
            }
        }
        self.add_hole(id, slot, clock);
        if closing && self.groups[group_id as usize].live == 0 {
            self.close_group(group_id);
        }
    }

    /// Puts a node back as a hole, joined with the holes beside it that it may be joined with.
    #[inline]
    fn add_hole(&mut self, id: BlockId, slot: u16, clock: u64) {
        let Self { blocks, slots, counters, groups, .. } = self;
        let (mut id, mut slot, mut clock) = (id, slot, clock);
        let (group, idle) = (slots.get(slot).group, slots.get(slot).idle);
        let tail = &mut groups[group as usize].tail;
        let prev = blocks[id].prev;
        if prev != NONE && blocks[prev].state == State::Free {
            let (other, detail) = (blocks[prev].slot, blocks[prev].detail);
            if let Some(joined) = join((slot, clock), (other, detail), idle) {
                (slot, clock) = joined;
                slots.get_mut(other).remove(blocks, prev);
                counters.hole_removed(blocks[prev].size);
                let (size, next) = (blocks[id].size, blocks[id].next);
                blocks[prev].size += size;
                blocks[prev].next = next;
                if next != NONE {
                    blocks[next].prev = prev;
                }
                blocks.remove(id);
                if *tail == id {
                    *tail = prev;
                }
                id = prev;
            }
        }
        let next = blocks[id].next;
        if next != NONE && blocks[next].state == State::Free {
            let (other, detail) = (blocks[next].slot, blocks[next].detail);
            if let Some(joined) = join((slot, clock), (other, detail), idle) {
                (slot, clock) = joined;
                slots.get_mut(other).remove(blocks, next);
                let (size, after) = (blocks[next].size, blocks[next].next);
                counters.hole_removed(size);
                blocks[id].size += size;
                blocks[id].next = after;
                if after != NONE {
                    blocks[after].prev = id;
                }
                blocks.remove(next);
                if *tail == next {
                    *tail = id;
                }
            }
        }
        let hole = &mut blocks[id];
        hole.state = State::Free;
        hole.slot = slot;
        hole.detail = clock;
        hole.shared = false;
        counters.hole_added(hole.size);
        slots.get_mut(slot).insert(blocks, id);
    }

    // ---- streams and events --------------------------------------------------------------

    /// A freed block that other streams were recorded on waits for events on them.
    #[cold]
    #[inline(never)]
    fn defer(&mut self, id: BlockId) {
        let uses = self.uses.remove(&id).unwrap_or_default();
        self.blocks[id].state = State::Pending;
        self.counters.pending_bytes += self.blocks[id].size;
        let uses = uses
            .into_iter()
            .map(|stream| match self.gpu.record(stream) {
                Some(event) => Use::Event(event),
                None => Use::Stream(stream),
            })
            .collect();
        self.pending.push_back(Pending { block: id, uses });
    }

    /// Looks at the events on their way. True if any hole changed hands or any block came free.
    fn advance(&mut self, slot: u16) -> bool {
        let mut changed = self.poll_pending();
        if self.slots.streams() > 1 {
            let Self { slots, gpu, .. } = self;
            let mut passed = Vec::new();
            for (other, it) in slots.streams_mut() {
                if it.poll(gpu) {
                    passed.push(other);
                }
                if other != slot {
                    it.mark(gpu);
                }
            }
            for slot in passed {
                changed |= self.release_passed(slot);
            }
        }
        changed
    }

    /// Frees blocks whose other uses are done, in the order of being freed; gives up after a few
    /// that are not, so that many waiting blocks do not make every miss slow.
    fn poll_pending(&mut self) -> bool {
        let (mut at, mut waiting, mut changed) = (0, 0, false);
        while at < self.pending.len() && waiting < 16 {
            let Self { pending, gpu, .. } = self;
            pending[at].uses.retain_mut(|other| {
                if let Use::Stream(stream) = other
                    && let Some(event) = gpu.record(*stream)
                {
                    *other = Use::Event(event);
                }
                match other {
                    Use::Event(event) if gpu.passed(*event) => {
                        gpu.forget(*event);
                        false
                    }
                    _ => true,
                }
            });
            if pending[at].uses.is_empty() {
                if let Some(done) = self.pending.remove(at) {
                    self.finish_pending(done.block);
                    changed = true;
                }
            } else {
                at += 1;
                waiting += 1;
            }
        }
        changed
    }

    fn finish_pending(&mut self, id: BlockId) {
        self.counters.pending_bytes -= self.blocks[id].size;
        self.retire(id);
    }

    /// Holes whose work is done become idle. True if there were any.
    fn release_passed(&mut self, slot: u16) -> bool {
        let mut changed = false;
        loop {
            let it = self.slots.get_mut(slot);
            let passed = it.passed;
            let Some(id) = it.oldest().filter(|id| self.blocks[*id].detail <= passed) else {
                return changed;
            };
            it.remove(&mut self.blocks, id);
            let idle = it.idle;
            self.counters.hole_removed(self.blocks[id].size);
            self.add_hole(id, idle, 0);
            changed = true;
        }
    }

    /// Waits until everything that was freed is idle. False where waiting is not possible.
    pub fn settle(&mut self) -> bool {
        let busy = !self.pending.is_empty()
            || self.slots.iter().any(|(slot, it)| slot != it.idle && it.passed != it.clock);
        if !busy {
            return true;
        }
        self.counters.syncs += 1;
        if !self.gpu.synchronize() {
            return false;
        }
        for done in std::mem::take(&mut self.pending) {
            for other in done.uses {
                if let Use::Event(event) = other {
                    self.gpu.forget(event);
                }
            }
            self.finish_pending(done.block);
        }
        let Self { slots, gpu, .. } = self;
        let mut all = Vec::new();
        for (slot, it) in slots.streams_mut() {
            it.settle(gpu);
            all.push(slot);
        }
        for slot in all {
            self.release_passed(slot);
        }
        true
    }

    // ---- growing and moving --------------------------------------------------------------

    /// The largest chunk to create now. Costs are per chunk, waste is per chunk size: a
    /// thousandth of what is held keeps both in proportion (`docs` of the study in `tests`).
    fn largest_chunk(&self, group: GroupId) -> u64 {
        let chosen = match self.policy.chunk {
            0 => (self.groups[group as usize].reserved / 1024).max(4 << 20),
            chunk => chunk,
        };
        (chosen / self.granularity * self.granularity).max(self.granularity)
    }

    /// Makes a hole of at least `size` bytes at the end of mapped memory.
    fn extend(&mut self, size: u64, slot: u16) -> Result<BlockId, Refusal> {
        let id = self.slots.get(slot).group;
        if self.granularity == 0 {
            return self.add_segment(size, id);
        }
        let group = &self.groups[id as usize];
        let highest = group.highest.max(group.live + size);
        let ceiling = highest + highest * self.policy.slack / 1000;
        let allowed = ceiling.saturating_sub(group.reserved) / self.granularity * self.granularity;
        let (tail, room) = (group.tail, group.space.gap_at(group.cursor));

        let missing = self.missing(size, slot);
        let moved = self.choose(missing.saturating_sub(allowed), slot, tail);
        let grown = missing.saturating_sub(moved).next_multiple_of(self.granularity);
        if room < moved + grown {
            self.new_run(size, id)?;
            self.choose(size.saturating_sub(allowed), slot, NONE);
        }
        self.move_chosen(slot)?;
        if let Err(refusal) = self.grow(size, slot) {
            // The limit, or the device, has no more: everything that can be moved is.
            self.choose(self.missing(size, slot), slot, self.groups[id as usize].tail);
            self.move_chosen(slot)?;
            if self.missing(size, slot) > 0 {
                return Err(refusal);
            }
        }
        Ok(self.groups[id as usize].tail)
    }

    /// Whether the stream may use a hole at once.
    fn usable(&self, id: BlockId, slot: u16) -> bool {
        let block = &self.blocks[id];
        block.state == State::Free && (block.slot == slot || block.slot == self.slots.get(slot).idle)
    }

    /// Bytes that must be mapped behind the cursor before the tail holds `size` free ones.
    fn missing(&self, size: u64, slot: u16) -> u64 {
        let tail = self.groups[self.slots.get(slot).group as usize].tail;
        match tail != NONE && self.usable(tail, slot) {
            true => size.saturating_sub(self.blocks[tail].size),
            false => size,
        }
    }

    /// Chooses whole free chunks that the stream may use, at least `wanted` bytes of them if
    /// there are so many; none of the hole `except`. Returns their bytes.
    fn choose(&mut self, wanted: u64, slot: u16, except: BlockId) -> u64 {
        let mut chosen = std::mem::take(&mut self.chosen);
        chosen.clear();
        let mut bytes = 0;
        let own = self.slots.get(slot);
        let chunks = &self.groups[own.group as usize].chunks;
        let sources = [Some(slot), Some(own.idle).filter(|idle| *idle != slot)];
        'search: for slot in sources.into_iter().flatten() {
            for id in self.slots.get(slot).bins.descending(&self.blocks) {
                let hole = &self.blocks[id];
                if bytes >= wanted || hole.size < self.granularity {
                    break;
                }
                if id == except {
                    continue;
                }
                for chunk in chunks.inside(hole.address, hole.end()) {
                    if bytes >= wanted {
                        break 'search;
                    }
                    bytes += chunks.get(chunk).size;
                    chosen.push((id, chunk));
                }
            }
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
    fn move_chosen(&mut self, slot: u16) -> Result<(), Refusal> {
        let chosen = std::mem::take(&mut self.chosen);
        let mut result = Ok(());
        for (hole, chunk) in &chosen {
            result = self.move_chunk(*hole, *chunk, slot);
            if result.is_err() {
                break;
            }
        }
        if !chosen.is_empty() {
            let own = self.slots.get_mut(slot);
            let id = own.group;
            own.mark(&mut self.gpu);
            let bound = (self.groups[id as usize].chunks.len() / 2).max(256);
            self.unmap_stale(bound, id);
        }
        self.chosen = chosen;
        result
    }

    fn move_chunk(&mut self, hole: BlockId, id: ChunkId, slot: u16) -> Result<(), Refusal> {
        let Self { groups, blocks, slots, gpu, counters, .. } = self;
        let group_id = slots.get(slot).group;
        let group = &mut groups[group_id as usize];
        let chunk = *group.chunks.get(id);
        if group.space.gap_at(group.cursor) < chunk.size {
            return Ok(());
        }
        gpu.map(group.cursor, chunk.size, chunk.handle)?;
        let (owner, until) = (blocks[hole].slot, blocks[hole].detail);
        group.space.take(group.cursor, chunk.size);
        group.chunks.move_home(id, group.cursor);
        group.chunks.get_mut(id).stale += 1;
        group.chunks.stale.push_back(Stale { chunk: id, address: chunk.home, slot: owner, until });
        counters.stitches += 1;
        counters.stitched_bytes += chunk.size;
        counters.stale += 1;
        counters.stale_bytes += chunk.size;
        self.cut(hole, chunk.home, chunk.size);
        self.append(chunk.size, owner, until, slot);
        Ok(())
    }

    /// Takes `size` bytes at `address` out of a hole; what is left on either side stays a hole.
    /// The node goes on as the right-hand rest if there is one, so that the chunks of one hole
    /// can be cut out in ascending order.
    fn cut(&mut self, hole: BlockId, address: u64, size: u64) {
        let Self { blocks, slots, counters, groups, .. } = self;
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
        let Self { blocks, slots, counters, groups, .. } = self;
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
                counters.hole_removed(blocks[tail].size);
                let hole = &mut blocks[tail];
                hole.size += size;
                (hole.slot, hole.detail) = (owner, clock);
                counters.hole_added(hole.size);
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
        if missing > 0 {
            self.counters.growths += 1;
        }
        while missing > 0 {
            let bytes = missing.next_multiple_of(self.granularity).min(self.largest_chunk(id));
            let group = &mut self.groups[id as usize];
            if group.space.gap_at(group.cursor) < bytes {
                return Err(Refusal::OutOfMemory);
            }
            let handle = self.gpu.create(bytes)?;
            if let Err(refusal) = self.gpu.map(group.cursor, bytes, handle) {
                self.gpu.release(handle, bytes);
                return Err(refusal);
            }
            group.space.take(group.cursor, bytes);
            group.chunks.add(handle, bytes, group.cursor);
            group.reserved += bytes;
            self.counters.chunk_added(bytes);
            self.append(bytes, idle, 0, slot);
            missing = self.missing(size, slot);
        }
        Ok(())
    }

    /// Takes old mappings down, the oldest first, until at most `bound` are left or the next one
    /// may still be in use.
    fn unmap_stale(&mut self, bound: usize, id: GroupId) {
        let Self { slots, gpu, counters, groups, .. } = self;
        let group = &mut groups[id as usize];
        let mut polled = false;
        while group.chunks.stale.len() > bound {
            let Some(old) = group.chunks.stale.front().copied() else { return };
            let it = slots.get_mut(old.slot);
            if old.slot != group.idle && it.passed < old.until {
                if !polled {
                    polled = true;
                    it.poll(gpu);
                    continue;
                }
                // Far beyond the bound it is time to wait.
                if group.chunks.stale.len() < bound * 4 || !it.wait(gpu) {
                    return;
                }
                continue;
            }
            polled = false;
            group.chunks.stale.pop_front();
            let size = group.chunks.get(old.chunk).size;
            if gpu.unmap(old.address, size).is_err() {
                // Nothing is lost: the mapping stays counted and is tried again.
                counters.driver_errors += 1;
                group.chunks.stale.push_back(old);
                return;
            }
            group.space.give(old.address, size);
            group.chunks.get_mut(old.chunk).stale -= 1;
            counters.stale -= 1;
            counters.stale_bytes -= size;
        }
    }

    /// Gives every chunk of everybody's memory, and of groups that are closing, back to the driver
    /// where it is wholly free and idle. Waits for the device first where something free is not
    /// idle yet. Returns the bytes given back.
    pub fn trim_all(&mut self) -> u64 {
        let mut bytes = 0;
        for id in 0..self.groups.len() as GroupId {
            let group = &self.groups[id as usize];
            if !group.closed && (id == SHARED || group.closing) {
                bytes += self.trim(id);
                self.finish_closing(id);
            }
        }
        bytes
    }

    /// The same for one group, whether it is closing or not.
    fn trim(&mut self, id: GroupId) -> u64 {
        self.settle();
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
            if chunk.stale > 0 {
                continue;
            }
            if self.gpu.unmap(chunk.home, chunk.size).is_err() {
                self.counters.driver_errors += 1;
                continue;
            }
            self.cut(*hole, chunk.home, chunk.size);
            self.gpu.release(chunk.handle, chunk.size);
            let group = &mut self.groups[id as usize];
            group.space.give(chunk.home, chunk.size);
            group.chunks.remove(*chunk_id);
            group.reserved -= chunk.size;
            self.counters.chunk_removed(chunk.size);
            bytes += chunk.size;
        }
        self.chosen = chosen;
        bytes
    }

    // ---- plain segments ------------------------------------------------------------------

    /// Takes a plain segment, of PyTorch's sizes: 2 MiB for small requests, 20 MiB up to 10 MiB,
    /// the request rounded up to 2 MiB above (`kSmallBuffer`, `kLargeBuffer`, `kMinLargeAlloc`).
    fn add_segment(&mut self, size: u64, id: GroupId) -> Result<BlockId, Refusal> {
        let bytes = match size {
            ..=super::SMALL => 2 << 20,
            ..0xA0_0000 => 20 << 20,
            _ => size.next_multiple_of(2 << 20),
        };
        let address = self.gpu.allocate(bytes)?;
        let group = &mut self.groups[id as usize];
        group.segments.insert(address, bytes);
        group.reserved += bytes;
        let idle = group.idle;
        self.counters.growths += 1;
        self.counters.chunk_added(bytes);
        let block = self.blocks.add(address, bytes, idle, State::Free);
        self.counters.hole_added(bytes);
        self.slots.get_mut(idle).insert(&mut self.blocks, block);
        Ok(block)
    }

    /// Gives plain segments back that are wholly free and idle.
    fn trim_segments(&mut self, id: GroupId) -> u64 {
        let Self { blocks, slots, gpu, counters, groups, .. } = self;
        let group = &mut groups[id as usize];
        let idle = slots.get_mut(group.idle);
        let whole = |id: &BlockId| {
            let hole = &blocks[*id];
            group.segments.get(&hole.address) == Some(&hole.size)
        };
        let whole: Vec<BlockId> = idle.bins.descending(blocks).filter(whole).collect();
        let mut bytes = 0;
        for id in whole {
            let hole = blocks[id];
            idle.remove(blocks, id);
            counters.hole_removed(hole.size);
            blocks.remove(id);
            group.segments.remove(&hole.address);
            group.reserved -= hole.size;
            gpu.free(hole.address, hole.size);
            counters.chunk_removed(hole.size);
            bytes += hole.size;
        }
        bytes
    }
}

/// The owner of two holes joined, each with the clock of its freeing; `None` where two streams'
/// holes would be joined, which neither could use without waiting for the other.
#[inline]
fn join(a: (u16, u64), b: (u16, u64), idle: u16) -> Option<(u16, u64)> {
    match (a.0, b.0) {
        (x, y) if x == y => Some((x, a.1.max(b.1))),
        (x, _) if x == idle => Some(b),
        (_, y) if y == idle => Some(a),
        _ => None,
    }
}
