//! The pool: how a request is met.
//!
//! [`Pool::allocate`] is the ladder, a comment a step. The first step, a best fit that is free
//! already, is the fast path: a look-up in two sets of bins, a split and a hash insertion.

use super::address_map::{Spot, Table};
use super::arena::{Due, Group, GroupId, SHARED};
use super::block::{Block, BlockId, Blocks, Marks, NONE, Nodes, State, VACANT, absorb_next};
use super::chunk::ChunkId;
use super::counters::{Counters, Origin, Tally};
use super::deferred_free::Deferred;
use super::epoch::Epochs;
use super::gpu::{Gpu, Refusal};
use super::journal::Journal;
use super::purge::Rest;
use super::remap_budget::Effort;
use super::stream_lists::{ALL_STREAMS, Slots, StreamKey, UNORDERED};
use super::{LARGEST_REQUEST, block_size};
use std::collections::HashMap;

/// How a pool takes memory.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// Growable segments of mapped memory; plain segments otherwise.
    pub expandable: bool,
    /// The largest chunk that growth creates, in bytes; 0 lets the pool choose.
    pub chunk: u64,
    /// Streams may be made to wait on the GPU for what others have freed.
    pub waits: bool,
    /// What no setting changes.
    pub tuning: Tuning,
}

/// What experiments change (`tests/bench/policy.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// How far reserved memory may exceed the highest live figure, in thousandths, before free
    /// chunks are moved rather than new ones created. Nine keeps every recorded trace within 1 %
    /// where the holes allow it (`tests/replay.rs`).
    pub slack: u64,
    /// The share of what is held that growth makes one chunk of: costs are per chunk, waste is per
    /// chunk size, and about a thousandth keeps both in proportion. gpt2_varlen in `tests/traces` then
    /// takes 0.14 s of driver calls to grow to 33 GB (H100) and holds 1.009 of what is live.
    pub share: u64,
    /// How much of the program's time moving chunks may take, in thousandths, before memory that is cut
    /// up too finely to be joined within `slack` grows instead, within bounds. With 2000 blocks of up to
    /// 16 MiB that are replaced at random 0.2 s pass until a pair takes what it does from then on, and 83
    /// chunks have moved (H200); at a tenth 0.4 s and 1,445, and it is as much that is held in the end.
    pub patience: u64,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning {
            slack: 9,
            share: 896,
            patience: 20,
        }
    }
}

/// A request that could not be met, and what the pool looked like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// Bytes asked for.
    pub asked: u64,
    /// Bytes in use by the program, whoever asked for them.
    pub live: u64,
    /// Bytes of them that CUDA's functions were asked for.
    pub live_of_cuda: u64,
    /// Bytes held from the driver.
    pub reserved: u64,
    /// Bytes of the largest free range.
    pub largest: u64,
    /// Bytes held that are free for others alone: for private pools, or for all but one of them.
    pub elsewhere: u64,
    /// Bytes of the largest chunks that memory comes in and is joined by; 0 where nothing is joined.
    pub chunk: u64,
    /// What the driver, or the limit, said.
    pub refusal: Refusal,
}

/// An address that is not the start of a block in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unknown;

/// A block in use.
#[derive(Clone, Copy)]
pub struct Live {
    pub(super) id: BlockId,
    /// Where it is in the table, until that is next changed.
    spot: Spot,
    /// Bytes asked for.
    pub requested: u64,
    /// The slot of the stream that it was allocated on.
    pub slot: u16,
}

impl Live {
    /// A small number that no other block in use has.
    #[inline]
    pub fn index(&self) -> usize {
        self.id.index()
    }
}

/// Memory that was handed out.
#[derive(Clone, Copy, Debug)]
pub struct Handed {
    /// Where it starts.
    pub address: u64,
    /// The slot of the stream that it is for.
    pub slot: u16,
}

/// What a pool keeps its books in.
pub struct Lists {
    blocks: Blocks,
    table: Table,
    slots: Slots,
}

impl Lists {
    /// Empty ones. `None` where the process may not have the addresses for them, some 4 GiB.
    pub fn new() -> Option<Self> {
        Some(Lists {
            blocks: Blocks::new()?,
            table: Table::new()?,
            slots: Slots::new()?,
        })
    }
}

/// The pool of one device, private pools included. One caller at a time.
pub struct Pool<G> {
    pub(super) gpu: G,
    pub(super) policy: Policy,
    pub(super) granularity: u64,
    pub(super) blocks: Blocks,
    pub(super) table: Table,
    pub(super) slots: Slots,
    pub(super) groups: Vec<Group>,
    /// Other streams that use a block which is in use.
    pub(super) uses: HashMap<BlockId, Vec<StreamKey>>,
    /// Freed blocks that wait for those, in the order of being freed.
    pub(super) deferred: Vec<Deferred>,
    /// Allocations since the first of them was deferred, or any came free.
    pub(super) looks: u64,
    pub(super) epochs: Epochs,
    pub(super) rest: Rest,
    pub(super) effort: Effort,
    pub(super) counters: Tally,
    pub(super) journal: Journal,
    /// Supplied segments that are not needed any more, by address and size.
    pub(super) returned: Vec<(u64, u64)>,
    /// Groups that nobody uses any more and that can be used again.
    closed: Vec<GroupId>,
    pub(super) due: Due,
    /// Scratch: chunks to move and the holes they lie in, ascending inside a hole.
    pub(super) chosen: Vec<(BlockId, ChunkId)>,
}

impl<G: Gpu> Pool<G> {
    /// An empty pool. Takes nothing from the GPU yet.
    pub fn new(gpu: G, policy: Policy, lists: Lists) -> Self {
        let Lists {
            blocks,
            table,
            mut slots,
        } = lists;
        let granularity = if policy.expandable {
            gpu.granularity()
        } else {
            0
        };
        // The first slot of all can always be had.
        let idle = slots.add_idle(SHARED).unwrap_or_default();
        let mut shared = Group::new(idle, granularity, false);
        shared.watched = policy.waits;
        Pool {
            gpu,
            policy,
            granularity,
            blocks,
            table,
            slots,
            groups: vec![shared],
            uses: HashMap::new(),
            deferred: Vec::new(),
            looks: 0,
            epochs: Epochs::new(),
            rest: Rest::default(),
            effort: Effort::new(),
            counters: Tally::default(),
            journal: Journal::default(),
            returned: Vec::new(),
            closed: Vec::new(),
            due: Due::default(),
            chosen: Vec::new(),
        }
    }

    /// Hands out `size` bytes (rounded up to 512) that the stream may use at once. The address is
    /// aligned to 512 bytes. `requested` is what the program asked for, and `origin` how, for the
    /// statistics.
    pub fn allocate(
        &mut self,
        size: u64,
        requested: u64,
        stream: StreamKey,
        group: GroupId,
        origin: Origin,
    ) -> Result<Handed, Shortage> {
        if size > LARGEST_REQUEST {
            return Err(self.shortage(size, group, Refusal::OutOfMemory));
        }
        if let Some(handed) = self.allocate_free(size, requested, stream, group, origin) {
            return Ok(handed);
        }
        let size = block_size(size);
        let Some(slot) = self.slots.of(stream, group) else {
            return Err(self.shortage(size, group, Refusal::OutOfMemory));
        };
        let hole = self.find_harder(size, slot)?;
        let size = self.taken(hole, size, group);
        let address = self.hand_out(hole, size, requested, slot, group, origin);
        let address = address.ok_or_else(|| self.shortage(size, group, Refusal::OutOfMemory))?;
        Ok(Handed { address, slot })
    }

    /// How much of a hole a block of this size takes.
    #[inline(always)]
    fn taken(&self, hole: BlockId, size: u64, group: GroupId) -> u64 {
        match group != SHARED && self.groups[group as usize].whole {
            true => self.blocks[hole].size,
            false => size,
        }
    }

    /// The first step of the ladder alone: the best fit that is free already, on the stream itself
    /// or idle. `None` where there is none.
    ///
    /// Two bin look-ups, one split, one hash insertion; no call to the driver.
    #[inline(always)]
    pub fn allocate_free(
        &mut self,
        size: u64,
        requested: u64,
        stream: StreamKey,
        group: GroupId,
        origin: Origin,
    ) -> Option<Handed> {
        if size > LARGEST_REQUEST {
            return None;
        }
        let size = block_size(size);
        let slot = self.slots.of(stream, group)?;
        let mut hole = self.hit(size, slot)?;
        if self.poll_now_and_then(slot, self.groups[group as usize].reserved) {
            hole = self.hit_again(size, slot)?;
        }
        let size = self.taken(hole, size, group);
        let address = self.hand_out(hole, size, requested, slot, group, origin)?;
        Some(Handed { address, slot })
    }

    #[inline(always)]
    fn hand_out(
        &mut self,
        hole: BlockId,
        size: u64,
        requested: u64,
        slot: u16,
        group: GroupId,
        origin: Origin,
    ) -> Option<u64> {
        let id = self.take(hole, size)?;
        Some(self.begin_use(id, requested, slot, group, origin))
    }

    /// A node that is no hole any more becomes a block of the slot's stream, which is of this group. Answers
    /// its address.
    #[inline(always)]
    pub(super) fn begin_use(
        &mut self,
        id: BlockId,
        requested: u64,
        slot: u16,
        group: GroupId,
        origin: Origin,
    ) -> u64 {
        let block = &mut self.blocks[id];
        (block.state, block.slot, block.detail) = (State::Live, slot, requested);
        // A free block has none.
        if origin != Origin::Allocator {
            block.marks = Marks::of(origin);
        }
        let (address, size) = (block.address, block.size);
        self.table.insert(&mut self.blocks, id);
        self.counters.allocated(origin, size, requested);
        self.slots.get_mut(slot).live += 1;
        let group = &mut self.groups[group as usize];
        group.live += size;
        group.highest = group.highest.max(group.live);
        address
    }

    /// Takes a block back. Its own stream may have it again at once; others when the work before
    /// is done. Returns its size.
    #[inline]
    pub fn free(&mut self, address: u64) -> Result<u64, Unknown> {
        let live = self.look_up(address).ok_or(Unknown)?;
        Ok(self.free_live(live))
    }

    /// The block in use that starts at `address`.
    #[inline(always)]
    pub fn look_up(&self, address: u64) -> Option<Live> {
        let (id, spot) = self.table.find(&self.blocks, address)?;
        let block = &self.blocks[id];
        Some(Live {
            id,
            spot,
            requested: block.detail,
            slot: block.slot,
        })
    }

    /// The stream that a block was allocated on.
    #[inline]
    pub fn owner_of(&self, live: &Live) -> StreamKey {
        self.slots.get(live.slot).key
    }

    /// Takes a block back that was looked up since the pool was last changed. Returns its size.
    #[inline(always)]
    pub fn free_live(&mut self, Live { id, spot, .. }: Live) -> u64 {
        self.table.remove(&mut self.blocks, id, spot);
        let &Block {
            size,
            detail,
            slot,
            marks,
            ..
        } = &self.blocks[id];
        match marks {
            Marks::NONE => self.counters.freed(Origin::Allocator, size, detail),
            _ => self.counters.freed_by(marks.origin(), size, detail),
        }
        let owner = self.slots.get_mut(slot);
        let group = &mut self.groups[owner.group as usize];
        group.live -= size;
        if marks.is_shared() {
            self.defer(id);
            return size;
        }
        owner.live -= 1;
        let epoch = self.epochs.tick(size);
        let before = std::mem::replace(&mut owner.freed, epoch);
        if group.watched {
            self.note_free(id, before);
            self.add_hole(id, slot, epoch);
            return size;
        }
        let (tail, idle) = (&mut group.tail, owner.idle);
        let (blocks, slots, counters) = (&mut self.blocks, &mut self.slots, &mut self.counters);
        join_holes(blocks, slots, counters, tail, idle, (id, slot, epoch));
        size
    }

    /// A block is freed in a group of which that is noted; `before` is what was freed before it without a
    /// note of its place.
    #[cold]
    #[inline(never)]
    pub(super) fn note_free(&mut self, id: BlockId, before: u64) {
        let block = self.blocks[id];
        let slot = self.slots.get_mut(block.slot);
        let group = &mut self.groups[slot.group as usize];
        if slot.group != SHARED {
            self.due.note_free(group, slot.group, &self.gpu);
            return;
        }
        if !self.epochs.is_exact() {
            group.watched = false;
            return;
        }
        let alone = !self.has_several_streams();
        let slot = self.slots.get_mut(block.slot);
        if slot.key == UNORDERED || alone {
            return;
        }
        let range = (block.address, block.end());
        let worth = !self.epochs.by_another;
        if self.epochs.note_free(slot.key, range, worth, &mut self.gpu) {
            slot.freed = before;
        }
    }

    /// The program gave back earlier what `free` frees: no event recorded now tells when.
    pub fn free_late(&mut self, free: impl FnOnce(&mut Self)) {
        self.epochs.late = true;
        free(self);
        self.epochs.late = false;
    }

    /// The stream that the block at `address` was allocated on.
    #[inline]
    pub fn stream_of(&self, address: u64) -> Option<StreamKey> {
        self.look_up(address).map(|live| self.owner_of(&live))
    }

    /// The size of the block that starts at `address`.
    pub fn size_of(&self, address: u64) -> Option<u64> {
        self.look_up(address).map(|live| self.blocks[live.id].size)
    }

    /// Whether the block that starts at `address` will have to wait for other streams once freed.
    pub fn is_shared(&self, address: u64) -> bool {
        self.look_up(address).is_some_and(|live| self.shares(&live))
    }

    /// The same of a block that was looked up.
    pub fn shares(&self, live: &Live) -> bool {
        self.blocks[live.id].marks.is_shared()
    }

    /// Who asked for a block that was looked up.
    #[inline]
    pub fn origin_of(&self, live: &Live) -> Origin {
        self.blocks[live.id].marks.origin()
    }

    /// Everything counted so far, with the blocks that the allocator's own functions were asked for.
    pub fn counters(&self) -> Counters {
        self.counters_of(Origin::Allocator)
    }

    /// The same with the blocks of either origin.
    pub fn counters_of(&self, origin: Origin) -> Counters {
        self.counters.read(origin)
    }

    /// The counting itself.
    pub fn tally(&self) -> &Tally {
        &self.counters
    }

    /// For resetting peaks and sums, and for what happens outside the pool.
    pub fn tally_mut(&mut self) -> &mut Tally {
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

    /// Bytes of host memory that the nodes of blocks and the table take, in use or not.
    pub fn node_bytes(&self) -> usize {
        self.blocks.bytes() + self.table.bytes()
    }

    /// Bytes of addresses held, mapped or not.
    pub fn addresses(&self) -> u64 {
        self.groups.iter().map(|group| group.space.reserved()).sum()
    }

    /// A new group, which shares no memory with others, and whose memory is `supplied`
    /// ([`Pool::supply`]) or the driver's. `None` when there are too many.
    pub fn open_group(&mut self, supplied: bool) -> Option<GroupId> {
        let vacant = self.closed.last().copied();
        let id = match vacant {
            Some(id) => id,
            None => GroupId::try_from(self.groups.len()).ok()?,
        };
        let mut group = Group::new(self.slots.add_idle(id)?, self.granularity, supplied);
        group.watched = true;
        match vacant {
            Some(id) => {
                self.closed.pop();
                self.groups[id as usize] = group;
            }
            None => self.groups.push(group),
        }
        Some(id)
    }

    /// Nobody allocates from the group any more. Its memory is given back now as far as it is free,
    /// and the rest at a later call that may wait for the device, once it is.
    pub fn close_group(&mut self, id: GroupId) {
        let group = &mut self.groups[id as usize];
        (group.closing, group.watched) = (true, true);
        self.due.ripe.push(id);
        self.trim_closing();
    }

    /// Gives back what closing groups hold, if that may have become more. Waits for the device; in a
    /// capture, where it may not, it does nothing and is due again.
    pub fn trim_closing(&mut self) {
        if self.due.ripe.is_empty() || !self.gpu.synchronize() {
            return;
        }
        self.note_settled();
        self.trim_ripe(self.due.ripe.len());
    }

    /// The same of what the device is known to have done with. Never waits.
    fn trim_closing_done(&mut self) {
        if self.due.ripe.is_empty() || !self.gpu.may_wait() {
            return;
        }
        if self.due.marked == (0, 0) {
            // A graph may have been replayed since the last free: the event has to come after that.
            let epoch = self.epochs.tick(0);
            if !self.epochs.cover(ALL_STREAMS, epoch, &mut self.gpu) {
                return;
            }
            self.due.marked = (epoch, self.due.ripe.len());
        }
        self.epochs.poll_stream(ALL_STREAMS, &mut self.gpu);
        let (epoch, count) = self.due.marked;
        if self.epochs.completed(ALL_STREAMS) >= epoch {
            self.trim_ripe(count.min(self.due.ripe.len()));
        }
    }

    /// The first of the groups that may have become free, whose work is done.
    fn trim_ripe(&mut self, count: usize) {
        self.due.marked = (0, 0);
        let later = self.due.ripe.split_off(count);
        let ripe = std::mem::replace(&mut self.due.ripe, later);
        for id in ripe {
            let group = &self.groups[id as usize];
            // The group of that number may have gone since.
            if !group.closing || group.closed {
                continue;
            }
            if !group.captured {
                self.trim(id);
                self.finish_closing(id);
            }
            let group = &mut self.groups[id as usize];
            if !group.closed && (group.captured || group.live == 0) {
                // A capture may use it, or the driver did not take all of it back.
                self.due.list(group, id);
            }
        }
        // Blocks that waited have come free meanwhile.
        let groups = &self.groups;
        self.due.ripe.retain(|id| !groups[*id as usize].closed);
    }

    /// All that closing groups have free is to be given back, from now on also what was freed during a
    /// capture.
    pub(super) fn let_closing_go(&mut self) {
        for id in std::mem::take(&mut self.due.unripe) {
            let group = &mut self.groups[id as usize];
            (group.listed, group.captured) = (false, false);
            self.due.ripe.push(id);
        }
    }

    /// What streams have done with of a private pool becomes idle. True if there was any.
    fn release_group(&mut self, id: GroupId) -> bool {
        id != SHARED && self.release_completed(id)
    }

    /// A group's holes whose work is done become idle, if more of it may be than when this was last asked.
    /// True if there were any.
    pub(super) fn release_completed(&mut self, id: GroupId) -> bool {
        let advances = self.epochs.advances;
        std::mem::replace(&mut self.groups[id as usize].released, advances) != advances
            && self.release_slots(id, |epochs, key| epochs.completed(key))
    }

    /// The same of all holes of a group: the device has done all its work.
    pub(super) fn release_all(&mut self, id: GroupId) -> bool {
        self.release_slots(id, |_, _| u64::MAX)
    }

    fn release_slots(
        &mut self,
        id: GroupId,
        completed: impl Fn(&Epochs, StreamKey) -> u64,
    ) -> bool {
        let slots = self.slots.streams_of(id);
        let slots = slots.filter(|(_, it)| !it.bins.is_empty());
        let slots: Vec<(u16, u64)> = slots
            .map(|(slot, it)| (slot, completed(&self.epochs, it.key)))
            .collect();
        let mut changed = false;
        for (slot, completed) in slots {
            changed |= self.release(slot, completed);
        }
        changed
    }

    /// Gives everything back that can be, addresses too. For when nobody uses the pool any more.
    pub fn shut(&mut self) {
        self.trim_all(None);
        for group in &mut self.groups {
            if group.reserved == 0 && group.chunks.stale.is_empty() {
                group.release_addresses(&mut self.gpu);
            }
        }
    }

    /// Lets a closing group go that holds nothing any more.
    fn finish_closing(&mut self, id: GroupId) {
        let group = &mut self.groups[id as usize];
        if !group.closing || group.closed || group.reserved > 0 || group.live > 0 {
            return;
        }
        group.release_addresses(&mut self.gpu);
        (group.abandoned, group.closed) = (0, true);
        self.slots.remove_group(id);
        self.closed.push(id);
    }

    /// Whether a request for `size` bytes from the group would be met at once, on every stream.
    pub fn has_idle(&self, size: u64, group: GroupId) -> bool {
        let idle = self.groups[group as usize].idle;
        self.slots.get(idle).bins.best(&self.blocks, size) != NONE
    }

    /// Bytes of the largest free range, whoever's it is.
    pub fn largest_free(&self) -> u64 {
        self.slots
            .iter()
            .flat_map(|(_, slot)| [Some(&slot.bins), slot.resting.as_deref()])
            .flatten()
            .map(|bins| bins.largest(&self.blocks))
            .filter(|id| *id != NONE)
            .map(|id| self.blocks[id].size)
            .max()
            .unwrap_or(0)
    }

    #[cold]
    #[inline(never)]
    fn find_harder(&mut self, size: u64, slot: u16) -> Result<BlockId, Shortage> {
        self.gpu.attend(Some(self.slots.get(slot).key));
        let hole = self.climb(size, slot);
        self.gpu.attend(None);
        hole
    }

    fn climb(&mut self, size: u64, slot: u16) -> Result<BlockId, Shortage> {
        // What was put to rest because nobody wanted it for long.
        if self.wake(size, slot)
            && let Some(hole) = self.hit(size, slot)
        {
            return Ok(hole);
        }
        // 2. What other streams' passed events have made idle.
        let group = self.slots.get(slot).group;
        if (self.advance(slot) | self.release_group(group))
            && let Some(hole) = self.hit(size, slot)
        {
            return Ok(hole);
        }
        self.want_exact(slot);
        self.trim_closing_done();
        // 3 to 5. Growth within a hair of the highest live figure; memory of other streams, behind a wait on
        // the GPU; free chunks moved to where they are needed; growth beyond, up to the limit.
        match self.extend(size, slot) {
            Ok(hole) => return Ok(hole),
            Err(refusal @ Refusal::Unsupplied(_)) => {
                return Err(self.shortage(size, self.slots.get(slot).group, refusal));
            }
            Err(Refusal::Failed(_)) => self.counters.driver_errors += 1,
            Err(_) => {}
        }
        // 6. Memory of other streams, behind a wait on the GPU.
        if let Some(hole) = self.reuse_across_streams(size, slot) {
            return Ok(hole);
        }
        // 7. Waiting until everything free is idle, and giving back what plain segments allow.
        self.counters.alloc_retries += 1;
        self.settle();
        if let Some(hole) = self.hit(size, slot) {
            return Ok(hole);
        }
        if self.granularity == 0 && group == SHARED {
            self.trim_segments(group);
        }
        self.extend(size, slot)
            .map_err(|refusal| self.shortage(size, group, refusal))
    }

    /// What the pool looks like to a request that cannot be met. Looks at all free memory, but where more is to
    /// be supplied first.
    pub fn shortage(&self, asked: u64, group: GroupId, refusal: Refusal) -> Shortage {
        let [live, live_of_cuda] =
            [Origin::Allocator, Origin::Cuda].map(|origin| self.counters.in_use(origin));
        let (live, reserved) = (live, self.counters.held());
        if let Refusal::Unsupplied(_) = refusal {
            return Shortage {
                asked,
                live,
                live_of_cuda,
                reserved,
                largest: 0,
                elsewhere: 0,
                chunk: 0,
                refusal,
            };
        }
        let others = self.groups.iter().enumerate();
        let others = others.filter(|(at, _)| *at != group as usize);
        Shortage {
            asked,
            live: live + live_of_cuda,
            live_of_cuda,
            reserved: self.counters.held(),
            largest: self.largest_free(),
            elsewhere: others.map(|(_, it)| it.reserved - it.live).sum(),
            chunk: match self.granularity > 0 && group == SHARED {
                true => self.chunk_size(group),
                false => 0,
            },
            refusal,
        }
    }

    /// The best fit, counted as a request met from what was free.
    #[inline]
    fn hit(&mut self, size: u64, slot: u16) -> Option<BlockId> {
        let hole = self.fit(size, slot);
        let found = hole != NONE;
        self.counters.hits += u64::from(found);
        found.then_some(hole)
    }

    /// The same for a request that was met already, of which nothing has been taken yet.
    #[cold]
    #[inline(never)]
    fn hit_again(&mut self, size: u64, slot: u16) -> Option<BlockId> {
        self.counters.hits -= 1;
        self.hit(size, slot)
    }

    /// The smallest hole of at least `size` bytes that the stream may use now.
    #[inline(always)]
    pub(super) fn fit(&self, size: u64, slot: u16) -> BlockId {
        let own = self.slots.get(slot);
        let idle = &self.slots.get(own.idle).bins;
        let own = own.bins.best(&self.blocks, size);
        if idle.is_empty() {
            return own;
        }
        let idle = idle.best(&self.blocks, size);
        // No block is larger than any.
        let (a, b) = (&self.blocks[own], &self.blocks[idle]);
        if (a.size, a.address) <= (b.size, b.address) {
            own
        } else {
            idle
        }
    }

    /// Cuts `size` bytes off one end of a hole. `None` where there is no node for the rest.
    #[inline(always)]
    fn take(&mut self, hole: BlockId, size: u64) -> Option<BlockId> {
        let Self {
            blocks,
            slots,
            counters,
            groups,
            granularity,
            ..
        } = self;
        let owner = slots.get_mut(blocks[hole].slot);
        if blocks[hole].size == size {
            counters.hole_removed(size);
            owner.remove(blocks, hole);
            return Some(hole);
        }
        let id = blocks.claim();
        if id == NONE {
            return None;
        }
        let nodes = &mut **blocks;
        // The rest keeps the hole's node and its place in the order of being freed.
        owner.bins.remove(nodes, hole);
        let rest = &mut nodes[hole];
        let mut block = Block { size, ..VACANT };
        counters.hole_cut(size);
        let high = rest.size - size >= *granularity && cuts_better_high(rest, size, *granularity);
        rest.size -= size;
        if high {
            block.address = rest.end();
            (block.prev, block.next) = (hole, rest.next);
            rest.next = id;
            nodes[block.next].prev = id;
            let tail = &mut groups[owner.group as usize].tail;
            if *tail == hole {
                *tail = id;
            }
        } else {
            block.address = rest.address;
            (block.prev, block.next) = (rest.prev, hole);
            rest.address += size;
            rest.prev = id;
            nodes[block.prev].next = id;
        }
        nodes[id] = block;
        owner.bins.insert(nodes, hole);
        Some(id)
    }

    /// A block that nothing but its own stream's earlier work uses becomes a hole of any slot of its
    /// group that may use it, freed at this epoch of the slot's stream.
    pub(super) fn retire_to(&mut self, id: BlockId, slot: u16, epoch: u64) {
        let owner = self.slots.get_mut(self.blocks[id].slot);
        owner.live -= 1;
        let group = &mut self.groups[owner.group as usize];
        if group.watched && owner.group != SHARED {
            self.due.note_free(group, owner.group, &self.gpu);
        }
        self.add_hole(id, slot, epoch);
    }

    /// Puts a node back as a hole, joined with the holes beside it that it may be joined with.
    pub(super) fn add_hole(&mut self, id: BlockId, slot: u16, epoch: u64) {
        let owner = self.slots.get(slot);
        let (tail, idle) = (&mut self.groups[owner.group as usize].tail, owner.idle);
        let (blocks, slots, counters) = (&mut self.blocks, &mut self.slots, &mut self.counters);
        join_holes(blocks, slots, counters, tail, idle, (id, slot, epoch));
    }
}

/// Puts a node, which becomes a hole of this slot with this epoch, back among the holes.
#[inline(always)]
fn join_holes(
    blocks: &mut Blocks,
    slots: &mut Slots,
    counters: &mut Tally,
    tail: &mut BlockId,
    idle: u16,
    (mut id, mut slot, mut epoch): (BlockId, u16, u64),
) {
    let (nodes, vacant) = blocks.parts();
    // Asked before anything is done: whether a neighbour is free cannot be predicted, and shows sooner so.
    let is_free = |at: BlockId| nodes[at].state == State::Free;
    let (prev, next) = (nodes[id].prev, nodes[id].next);
    let (prev_free, next_free) = (is_free(prev), is_free(next));
    // Whose a neighbour and the block are when joined, if they may be.
    let joined = |nodes: &Nodes, at: BlockId, own: (u16, u64)| {
        let beside = &nodes[at];
        Some((beside.slot, join(own, (beside.slot, beside.detail), idle)?))
    };
    let (size, mut beside) = (nodes[id].size, 0);
    if prev_free && let Some((other, both)) = joined(nodes, prev, (slot, epoch)) {
        (slot, epoch) = both;
        slots.get_mut(other).remove(nodes, prev);
        beside += 1;
        absorb_next(nodes, vacant, prev, tail);
        id = prev;
    }
    if next_free && let Some((other, both)) = joined(nodes, next, (slot, epoch)) {
        (slot, epoch) = both;
        slots.get_mut(other).remove(nodes, next);
        beside += 1;
        absorb_next(nodes, vacant, id, tail);
    }
    counters.hole_joined(size, beside);
    let hole = &mut nodes[id];
    hole.state = State::Free;
    hole.slot = slot;
    hole.detail = epoch;
    hole.marks = Marks::NONE;
    slots.get_mut(slot).insert(nodes, id);
}

/// Whether more whole granules stay free if a block is cut off the high end of a hole than off the
/// low end. Only whole free chunks can move, and chunks begin and end on granules.
#[inline(always)]
fn cuts_better_high(hole: &Block, size: u64, granularity: u64) -> bool {
    if granularity == 0 {
        return false;
    }
    // A power of two: the device's granularity is checked to be one.
    let shift = granularity.trailing_zeros();
    let whole =
        |start: u64, end: u64| (end >> shift).saturating_sub((start + granularity - 1) >> shift);
    whole(hole.address, hole.end() - size) > whole(hole.address + size, hole.end())
}

/// The owner of two holes joined, each with the epoch of its freeing; `None` where two streams'
/// holes would be joined, which neither could use without waiting for the other.
#[inline(always)]
pub(super) fn join(a: (u16, u64), b: (u16, u64), idle: u16) -> Option<(u16, u64)> {
    match (a.0, b.0) {
        // Freed one after the other: no one event is of this free.
        (x, y) if x == y => Some((x, a.1.max(b.1) | 1)),
        (x, _) if x == idle => Some(b),
        (_, y) if y == idle => Some(a),
        _ => None,
    }
}
