//! The pool: how a request is met.
//!
//! [`Pool::allocate`] is the ladder, a comment a step. The first step, a best fit that is free
//! already, is the fast path: a look-up in two sets of bins, a split and a hash insertion.

use super::address_map::{AddressMap, MapIndex};
use super::arena::{Arena, ArenaId, PendingArenas, SHARED_ARENA};
use super::block::{Block, BlockId, BlockState, Blocks, Flags, NONE, Nodes, VACANT, absorb_next};
use super::chunk::ChunkId;
use super::counters::{Counters, Origin, PoolStats};
use super::deferred_free::Deferred;
use super::epoch::Epochs;
use super::gpu::{Gpu, Refusal};
use super::memory_events::EventLog;
use super::purge::Purge;
use super::remap_budget::RemapBudget;
use super::stream_lists::{ALL_STREAMS, FreeLists, StreamKey, UNORDERED};
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
    /// where the free blocks allow it (`tests/replay.rs`).
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
    pub live_cuda: u64,
    /// Bytes held from the driver.
    pub reserved: u64,
    /// Bytes of the largest free range.
    pub largest: u64,
    /// Bytes held that are free for others alone: for private pools, or for all but one of them.
    pub other_arenas: u64,
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
pub struct LiveBlock {
    pub(super) id: BlockId,
    /// Where it is in the address map, until that is next changed.
    map_index: MapIndex,
    /// Bytes asked for.
    pub requested: u64,
    /// The free list of the stream that it was allocated on.
    pub list: u16,
}

impl LiveBlock {
    /// A small number that no other block in use has.
    #[inline]
    pub fn index(&self) -> usize {
        self.id.index()
    }
}

/// Memory that was handed out.
#[derive(Clone, Copy, Debug)]
pub struct Allocated {
    /// Where it starts.
    pub address: u64,
    /// The free list of the stream that it is for.
    pub list: u16,
}

/// What a pool keeps its books in.
pub struct Metadata {
    blocks: Blocks,
    address_map: AddressMap,
    lists: FreeLists,
}

impl Metadata {
    /// Empty ones. `None` where the process may not have the addresses for them, some 4 GiB.
    pub fn new() -> Option<Self> {
        Some(Metadata {
            blocks: Blocks::new()?,
            address_map: AddressMap::new()?,
            lists: FreeLists::new()?,
        })
    }
}

/// The pool of one device, private pools included. One caller at a time.
pub struct Pool<G> {
    pub(super) gpu: G,
    pub(super) policy: Policy,
    pub(super) granularity: u64,
    pub(super) blocks: Blocks,
    pub(super) address_map: AddressMap,
    pub(super) lists: FreeLists,
    pub(super) arenas: Vec<Arena>,
    /// Other streams that use a block which is in use.
    pub(super) stream_uses: HashMap<BlockId, Vec<StreamKey>>,
    /// Freed blocks that wait for those, in the order of being freed.
    pub(super) deferred: Vec<Deferred>,
    /// Allocations since the first of them was deferred, or any came free.
    pub(super) allocations_while_deferred: u64,
    pub(super) epochs: Epochs,
    pub(super) purge: Purge,
    pub(super) remap_budget: RemapBudget,
    pub(super) counters: Counters,
    pub(super) event_log: EventLog,
    /// Supplied segments that are not needed any more, by address and size.
    pub(super) returned_segments: Vec<(u64, u64)>,
    /// Arenas that nobody uses any more and that can be used again.
    vacant_arenas: Vec<ArenaId>,
    pub(super) pending: PendingArenas,
    /// Scratch: chunks to move and the free blocks they lie in, ascending inside a free block.
    pub(super) to_remap: Vec<(BlockId, ChunkId)>,
}

impl<G: Gpu> Pool<G> {
    /// An empty pool. Takes nothing from the GPU yet.
    pub fn new(gpu: G, policy: Policy, metadata: Metadata) -> Self {
        let Metadata {
            blocks,
            address_map,
            mut lists,
        } = metadata;
        let granularity = if policy.expandable {
            gpu.granularity()
        } else {
            0
        };
        // The first free list of all can always be had.
        let idle = lists.add_idle(SHARED_ARENA).unwrap_or_default();
        let mut shared = Arena::new(idle, granularity, false);
        shared.notes_frees = policy.waits;
        Pool {
            gpu,
            policy,
            granularity,
            blocks,
            address_map,
            lists,
            arenas: vec![shared],
            stream_uses: HashMap::new(),
            deferred: Vec::new(),
            allocations_while_deferred: 0,
            epochs: Epochs::new(),
            purge: Purge::default(),
            remap_budget: RemapBudget::new(),
            counters: Counters::default(),
            event_log: EventLog::default(),
            returned_segments: Vec::new(),
            vacant_arenas: Vec::new(),
            pending: PendingArenas::default(),
            to_remap: Vec::new(),
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
        arena: ArenaId,
        origin: Origin,
    ) -> Result<Allocated, Shortage> {
        if size > LARGEST_REQUEST {
            return Err(self.shortage(size, arena, Refusal::OutOfMemory));
        }
        if let Some(allocated) = self.allocate_free(size, requested, stream, arena, origin) {
            return Ok(allocated);
        }
        let size = block_size(size);
        let Some(list) = self.lists.find_or_add(stream, arena) else {
            return Err(self.shortage(size, arena, Refusal::OutOfMemory));
        };
        let free_block = self.find_harder(size, list)?;
        let size = self.split_size(free_block, size, arena);
        let address = self.allocate_from(free_block, size, requested, list, arena, origin);
        let address = address.ok_or_else(|| self.shortage(size, arena, Refusal::OutOfMemory))?;
        Ok(Allocated { address, list })
    }

    /// How much of a free block a block of this size takes.
    #[inline(always)]
    fn split_size(&self, free_block: BlockId, size: u64, arena: ArenaId) -> u64 {
        match arena != SHARED_ARENA && self.arenas[arena as usize].whole_segments {
            true => self.blocks[free_block].size,
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
        arena: ArenaId,
        origin: Origin,
    ) -> Option<Allocated> {
        if size > LARGEST_REQUEST {
            return None;
        }
        let size = block_size(size);
        let list = self.lists.find_or_add(stream, arena)?;
        let mut free_block = self.find_free(size, list)?;
        if self.poll_if_due(list, self.arenas[arena as usize].reserved) {
            free_block = self.find_free_again(size, list)?;
        }
        let size = self.split_size(free_block, size, arena);
        let address = self.allocate_from(free_block, size, requested, list, arena, origin)?;
        Some(Allocated { address, list })
    }

    #[inline(always)]
    fn allocate_from(
        &mut self,
        free_block: BlockId,
        size: u64,
        requested: u64,
        list: u16,
        arena: ArenaId,
        origin: Origin,
    ) -> Option<u64> {
        let id = self.split_off(free_block, size)?;
        Some(self.mark_live(id, requested, list, arena, origin))
    }

    /// A node that is no free block any more becomes a block of the free list's stream, which is of this arena. Answers
    /// its address.
    #[inline(always)]
    pub(super) fn mark_live(
        &mut self,
        id: BlockId,
        requested: u64,
        list: u16,
        arena: ArenaId,
        origin: Origin,
    ) -> u64 {
        let block = &mut self.blocks[id];
        (block.state, block.list, block.detail) = (BlockState::Live, list, requested);
        // A free block has none.
        if origin != Origin::Allocator {
            block.flags = Flags::of(origin);
        }
        let (address, size) = (block.address, block.size);
        self.address_map.insert(&mut self.blocks, id);
        self.counters.allocated(origin, size, requested);
        self.lists.get_mut(list).live += 1;
        let arena = &mut self.arenas[arena as usize];
        arena.live += size;
        arena.peak_live = arena.peak_live.max(arena.live);
        address
    }

    /// Takes a block back. Its own stream may have it again at once; others when the work before
    /// is done. Returns its size.
    #[inline]
    pub fn free(&mut self, address: u64) -> Result<u64, Unknown> {
        let live = self.find_live(address).ok_or(Unknown)?;
        Ok(self.free_live(live))
    }

    /// The block in use that starts at `address`.
    #[inline(always)]
    pub fn find_live(&self, address: u64) -> Option<LiveBlock> {
        let (id, map_index) = self.address_map.find(&self.blocks, address)?;
        let block = &self.blocks[id];
        Some(LiveBlock {
            id,
            map_index,
            requested: block.detail,
            list: block.list,
        })
    }

    /// The stream that a block was allocated on.
    #[inline]
    pub fn owner_of(&self, live: &LiveBlock) -> StreamKey {
        self.lists.get(live.list).key
    }

    /// Takes a block back that was looked up since the pool was last changed. Returns its size.
    #[inline(always)]
    pub fn free_live(&mut self, LiveBlock { id, map_index, .. }: LiveBlock) -> u64 {
        self.address_map.remove(&mut self.blocks, id, map_index);
        let &Block {
            size,
            detail,
            list,
            flags,
            ..
        } = &self.blocks[id];
        match flags {
            Flags::NONE => self.counters.freed(Origin::Allocator, size, detail),
            _ => self.counters.freed_by(flags.origin(), size, detail),
        }
        let owner = self.lists.get_mut(list);
        let arena = &mut self.arenas[owner.arena as usize];
        arena.live -= size;
        if flags.is_multi_stream() {
            self.defer(id);
            return size;
        }
        owner.live -= 1;
        let epoch = self.epochs.tick(size);
        let before = std::mem::replace(&mut owner.freed, epoch);
        if arena.notes_frees {
            self.record_free(id, before);
            self.add_free(id, list, epoch);
            return size;
        }
        let (tail, idle) = (&mut arena.tail, owner.idle);
        let (blocks, lists, counters) = (&mut self.blocks, &mut self.lists, &mut self.counters);
        coalesce(blocks, lists, counters, tail, idle, (id, list, epoch));
        size
    }

    /// A block is freed in an arena of which that is noted; `before` is what was freed before it without a
    /// note of its place.
    #[cold]
    #[inline(never)]
    pub(super) fn record_free(&mut self, id: BlockId, before: u64) {
        let block = self.blocks[id];
        let list = self.lists.get_mut(block.list);
        let arena = &mut self.arenas[list.arena as usize];
        if list.arena != SHARED_ARENA {
            self.pending.on_free(arena, list.arena, &self.gpu);
            return;
        }
        if !self.epochs.records_free_events() {
            arena.notes_frees = false;
            return;
        }
        let alone = !self.has_several_streams();
        let list = self.lists.get_mut(block.list);
        if list.key == UNORDERED || alone {
            return;
        }
        let range = (block.address, block.end());
        let worth = !self.epochs.off_stream;
        if self
            .epochs
            .record_free(list.key, range, worth, &mut self.gpu)
        {
            list.freed = before;
        }
    }

    /// The program gave back earlier what `free` frees: no event recorded now tells when.
    pub fn free_without_events(&mut self, free: impl FnOnce(&mut Self)) {
        self.epochs.without_events = true;
        free(self);
        self.epochs.without_events = false;
    }

    /// The stream that the block at `address` was allocated on.
    #[inline]
    pub fn stream_of(&self, address: u64) -> Option<StreamKey> {
        self.find_live(address).map(|live| self.owner_of(&live))
    }

    /// The size of the block that starts at `address`.
    pub fn size_of(&self, address: u64) -> Option<u64> {
        self.find_live(address)
            .map(|live| self.blocks[live.id].size)
    }

    /// Whether the block that starts at `address` will have to wait for other streams once freed.
    pub fn is_multi_stream_at(&self, address: u64) -> bool {
        self.find_live(address)
            .is_some_and(|live| self.is_multi_stream(&live))
    }

    /// The same of a block that was looked up.
    pub fn is_multi_stream(&self, live: &LiveBlock) -> bool {
        self.blocks[live.id].flags.is_multi_stream()
    }

    /// Who asked for a block that was looked up.
    #[inline]
    pub fn origin_of(&self, live: &LiveBlock) -> Origin {
        self.blocks[live.id].flags.origin()
    }

    /// Everything counted so far, with the blocks that the allocator's own functions were asked for.
    pub fn stats(&self) -> PoolStats {
        self.stats_of(Origin::Allocator)
    }

    /// The same with the blocks of either origin.
    pub fn stats_of(&self, origin: Origin) -> PoolStats {
        self.counters.read(origin)
    }

    /// The counting itself.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// For resetting peaks and sums, and for what happens outside the pool.
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

    /// Bytes of host memory that the nodes of blocks and the address map take, in use or not.
    pub fn node_bytes(&self) -> usize {
        self.blocks.bytes() + self.address_map.bytes()
    }

    /// Bytes of addresses held, mapped or not.
    pub fn addresses(&self) -> u64 {
        self.arenas
            .iter()
            .map(|arena| arena.addresses.reserved())
            .sum()
    }

    /// A new arena, which shares no memory with others, and whose memory is `supplied`
    /// ([`Pool::add_supplied_segment`]) or the driver's. `None` when there are too many.
    pub fn open_arena(&mut self, supplied: bool) -> Option<ArenaId> {
        let vacant = self.vacant_arenas.last().copied();
        let id = match vacant {
            Some(id) => id,
            None => ArenaId::try_from(self.arenas.len()).ok()?,
        };
        let mut arena = Arena::new(self.lists.add_idle(id)?, self.granularity, supplied);
        arena.notes_frees = true;
        match vacant {
            Some(id) => {
                self.vacant_arenas.pop();
                self.arenas[id as usize] = arena;
            }
            None => self.arenas.push(arena),
        }
        Some(id)
    }

    /// Nobody allocates from the arena any more. Its memory is given back now as far as it is free,
    /// and the rest at a later call that may wait for the device, once it is.
    pub fn close_arena(&mut self, id: ArenaId) {
        let arena = &mut self.arenas[id as usize];
        (arena.closing, arena.notes_frees) = (true, true);
        self.pending.to_trim.push(id);
        self.trim_closing_arenas();
    }

    /// Gives back what closing arenas hold, if that may have become more. Waits for the device; in a
    /// capture, where it may not, it does nothing and is due again.
    pub fn trim_closing_arenas(&mut self) {
        if self.pending.to_trim.is_empty() || !self.gpu.synchronize() {
            return;
        }
        self.after_synchronize();
        self.trim_closing_front(self.pending.to_trim.len());
    }

    /// The same of what the device is known to have done with. Never waits.
    fn trim_closing_completed(&mut self) {
        if self.pending.to_trim.is_empty() || !self.gpu.may_wait() {
            return;
        }
        if self.pending.trim_epoch == (0, 0) {
            // A graph may have been replayed since the last free: the event has to come after that.
            let epoch = self.epochs.tick(0);
            if !self.epochs.cover(ALL_STREAMS, epoch, &mut self.gpu) {
                return;
            }
            self.pending.trim_epoch = (epoch, self.pending.to_trim.len());
        }
        self.epochs.poll_stream(ALL_STREAMS, &mut self.gpu);
        let (epoch, count) = self.pending.trim_epoch;
        if self.epochs.completed(ALL_STREAMS) >= epoch {
            self.trim_closing_front(count.min(self.pending.to_trim.len()));
        }
    }

    /// The first of the arenas that may have become free, whose work is done.
    fn trim_closing_front(&mut self, count: usize) {
        self.pending.trim_epoch = (0, 0);
        let later = self.pending.to_trim.split_off(count);
        let to_trim = std::mem::replace(&mut self.pending.to_trim, later);
        for id in to_trim {
            let arena = &self.arenas[id as usize];
            // The arena of that number may have gone since.
            if !arena.closing || arena.removed {
                continue;
            }
            if !arena.captured {
                self.trim(id);
                self.finish_closing(id);
            }
            let arena = &mut self.arenas[id as usize];
            if !arena.removed && (arena.captured || arena.live == 0) {
                // A capture may use it, or the driver did not take all of it back.
                self.pending.queue_for_later(arena, id);
            }
        }
        // Blocks that waited have come free meanwhile.
        let arenas = &self.arenas;
        self.pending
            .to_trim
            .retain(|id| !arenas[*id as usize].removed);
    }

    /// All that closing arenas have free is to be given back, from now on also what was freed during a
    /// capture.
    pub(super) fn retry_closing_arenas(&mut self) {
        for id in std::mem::take(&mut self.pending.to_trim_later) {
            let arena = &mut self.arenas[id as usize];
            (arena.queued_for_trim, arena.captured) = (false, false);
            self.pending.to_trim.push(id);
        }
    }

    /// What streams have done with of a private pool becomes idle. True if there was any.
    fn release_arena(&mut self, id: ArenaId) -> bool {
        id != SHARED_ARENA && self.make_completed_idle(id)
    }

    /// An arena's free blocks whose work is done become idle, if more of it may be than when this was last asked.
    /// True if there were any.
    pub(super) fn make_completed_idle(&mut self, id: ArenaId) -> bool {
        let advances = self.epochs.advances;
        std::mem::replace(&mut self.arenas[id as usize].idle_as_of, advances) != advances
            && self.make_lists_idle(id, |epochs, key| epochs.completed(key))
    }

    /// The same of all free blocks of an arena: the device has done all its work.
    pub(super) fn make_arena_idle(&mut self, id: ArenaId) -> bool {
        self.make_lists_idle(id, |_, _| u64::MAX)
    }

    fn make_lists_idle(
        &mut self,
        id: ArenaId,
        completed: impl Fn(&Epochs, StreamKey) -> u64,
    ) -> bool {
        let lists = self.lists.stream_lists_of(id);
        let lists = lists.filter(|(_, it)| !it.bins.is_empty());
        let lists: Vec<(u16, u64)> = lists
            .map(|(list, it)| (list, completed(&self.epochs, it.key)))
            .collect();
        let mut changed = false;
        for (list, completed) in lists {
            changed |= self.make_list_idle(list, completed);
        }
        changed
    }

    /// Gives everything back that can be, addresses too. For when nobody uses the pool any more.
    pub fn tear_down(&mut self) {
        self.trim_all(None);
        for arena in &mut self.arenas {
            if arena.reserved == 0 && arena.chunks.stale.is_empty() {
                arena.release_addresses(&mut self.gpu);
            }
        }
    }

    /// Lets a closing arena go that holds nothing any more.
    fn finish_closing(&mut self, id: ArenaId) {
        let arena = &mut self.arenas[id as usize];
        if !arena.closing || arena.removed || arena.reserved > 0 || arena.live > 0 {
            return;
        }
        arena.release_addresses(&mut self.gpu);
        (arena.abandoned, arena.removed) = (0, true);
        self.lists.remove_arena(id);
        self.vacant_arenas.push(id);
    }

    /// Whether a request for `size` bytes from the arena would be met at once, on every stream.
    pub fn has_idle_block(&self, size: u64, arena: ArenaId) -> bool {
        let idle = self.arenas[arena as usize].idle;
        self.lists.get(idle).bins.best_fit(&self.blocks, size) != NONE
    }

    /// Bytes of the largest free range, whoever's it is.
    pub fn largest_free(&self) -> u64 {
        self.lists
            .iter()
            .flat_map(|(_, list)| [Some(&list.bins), list.purgeable.as_deref()])
            .flatten()
            .map(|bins| bins.largest(&self.blocks))
            .filter(|id| *id != NONE)
            .map(|id| self.blocks[id].size)
            .max()
            .unwrap_or(0)
    }

    #[cold]
    #[inline(never)]
    fn find_harder(&mut self, size: u64, list: u16) -> Result<BlockId, Shortage> {
        self.gpu
            .set_requesting_stream(Some(self.lists.get(list).key));
        let free_block = self.climb(size, list);
        self.gpu.set_requesting_stream(None);
        free_block
    }

    fn climb(&mut self, size: u64, list: u16) -> Result<BlockId, Shortage> {
        // What was made purgeable because nobody wanted it for long.
        if self.reclaim(size, list)
            && let Some(free_block) = self.find_free(size, list)
        {
            return Ok(free_block);
        }
        // 2. What other streams' passed events have made idle.
        let arena = self.lists.get(list).arena;
        if (self.poll_streams(list) | self.release_arena(arena))
            && let Some(free_block) = self.find_free(size, list)
        {
            return Ok(free_block);
        }
        self.request_free_events(list);
        self.trim_closing_completed();
        // 3 to 5. Growth within a hair of the highest live figure; memory of other streams, behind a wait on
        // the GPU; free chunks moved to where they are needed; growth beyond, up to the limit.
        match self.extend(size, list) {
            Ok(free_block) => return Ok(free_block),
            Err(refusal @ Refusal::Unsupplied(_)) => {
                return Err(self.shortage(size, self.lists.get(list).arena, refusal));
            }
            Err(Refusal::Failed(_)) => self.counters.driver_errors += 1,
            Err(_) => {}
        }
        // 6. Memory of other streams, behind a wait on the GPU.
        if let Some(free_block) = self.reuse_across_streams(size, list) {
            return Ok(free_block);
        }
        // 7. Waiting until everything free is idle, and giving back what plain segments allow.
        self.counters.alloc_retries += 1;
        self.synchronize_frees();
        if let Some(free_block) = self.find_free(size, list) {
            return Ok(free_block);
        }
        if self.granularity == 0 && arena == SHARED_ARENA {
            self.trim_segments(arena);
        }
        self.extend(size, list)
            .map_err(|refusal| self.shortage(size, arena, refusal))
    }

    /// What the pool allocations_while_deferred like to a request that cannot be met. Looks at all free memory, but where more is to
    /// be supplied first.
    pub fn shortage(&self, asked: u64, arena: ArenaId, refusal: Refusal) -> Shortage {
        let [live, live_cuda] =
            [Origin::Allocator, Origin::Cuda].map(|origin| self.counters.in_use(origin));
        let (live, reserved) = (live, self.counters.reserved());
        if let Refusal::Unsupplied(_) = refusal {
            return Shortage {
                asked,
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
            asked,
            live: live + live_cuda,
            live_cuda,
            reserved: self.counters.reserved(),
            largest: self.largest_free(),
            other_arenas: others.map(|(_, it)| it.reserved - it.live).sum(),
            chunk: match self.granularity > 0 && arena == SHARED_ARENA {
                true => self.chunk_size(arena),
                false => 0,
            },
            refusal,
        }
    }

    /// The best fit, counted as a request met from what was free.
    #[inline]
    fn find_free(&mut self, size: u64, list: u16) -> Option<BlockId> {
        let free_block = self.best_fit(size, list);
        let found = free_block != NONE;
        self.counters.hits += u64::from(found);
        found.then_some(free_block)
    }

    /// The same for a request that was met already, of which nothing has been taken yet.
    #[cold]
    #[inline(never)]
    fn find_free_again(&mut self, size: u64, list: u16) -> Option<BlockId> {
        self.counters.hits -= 1;
        self.find_free(size, list)
    }

    /// The smallest free block of at least `size` bytes that the stream may use now.
    #[inline(always)]
    pub(super) fn best_fit(&self, size: u64, list: u16) -> BlockId {
        let own = self.lists.get(list);
        let idle = &self.lists.get(own.idle).bins;
        let own = own.bins.best_fit(&self.blocks, size);
        if idle.is_empty() {
            return own;
        }
        let idle = idle.best_fit(&self.blocks, size);
        // No block is larger than any.
        let (a, b) = (&self.blocks[own], &self.blocks[idle]);
        if (a.size, a.address) <= (b.size, b.address) {
            own
        } else {
            idle
        }
    }

    /// Cuts `size` bytes off one end of a free block. `None` where there is no node for the rest.
    #[inline(always)]
    fn split_off(&mut self, free_block: BlockId, size: u64) -> Option<BlockId> {
        let Self {
            blocks,
            lists,
            counters,
            arenas,
            granularity,
            ..
        } = self;
        let owner = lists.get_mut(blocks[free_block].list);
        if blocks[free_block].size == size {
            counters.free_block_removed(size);
            owner.remove(blocks, free_block);
            return Some(free_block);
        }
        let id = blocks.new_node();
        if id == NONE {
            return None;
        }
        let nodes = &mut **blocks;
        // The rest keeps the free block's node and its place in the order of being freed.
        owner.bins.remove(nodes, free_block);
        let rest = &mut nodes[free_block];
        let mut block = Block { size, ..VACANT };
        counters.free_block_shrunk(size);
        let high = rest.size - size >= *granularity && splits_better_high(rest, size, *granularity);
        rest.size -= size;
        if high {
            block.address = rest.end();
            (block.prev, block.next) = (free_block, rest.next);
            rest.next = id;
            nodes[block.next].prev = id;
            let tail = &mut arenas[owner.arena as usize].tail;
            if *tail == free_block {
                *tail = id;
            }
        } else {
            block.address = rest.address;
            (block.prev, block.next) = (rest.prev, free_block);
            rest.address += size;
            rest.prev = id;
            nodes[block.prev].next = id;
        }
        nodes[id] = block;
        owner.bins.insert(nodes, free_block);
        Some(id)
    }

    /// A block that nothing but its own stream's earlier work uses becomes a free block of any free list of its
    /// arena that may use it, freed at this epoch of the free list's stream.
    pub(super) fn free_to_list(&mut self, id: BlockId, list: u16, epoch: u64) {
        let owner = self.lists.get_mut(self.blocks[id].list);
        owner.live -= 1;
        let arena = &mut self.arenas[owner.arena as usize];
        if arena.notes_frees && owner.arena != SHARED_ARENA {
            self.pending.on_free(arena, owner.arena, &self.gpu);
        }
        self.add_free(id, list, epoch);
    }

    /// Puts a node back as a free block, joined with the free blocks beside it that it may be joined with.
    pub(super) fn add_free(&mut self, id: BlockId, list: u16, epoch: u64) {
        let owner = self.lists.get(list);
        let (tail, idle) = (&mut self.arenas[owner.arena as usize].tail, owner.idle);
        let (blocks, lists, counters) = (&mut self.blocks, &mut self.lists, &mut self.counters);
        coalesce(blocks, lists, counters, tail, idle, (id, list, epoch));
    }
}

/// Puts a node, which becomes a free block of this free list with this epoch, back among the free blocks.
#[inline(always)]
fn coalesce(
    blocks: &mut Blocks,
    lists: &mut FreeLists,
    counters: &mut Counters,
    tail: &mut BlockId,
    idle: u16,
    (mut id, mut list, mut epoch): (BlockId, u16, u64),
) {
    let (nodes, vacant) = blocks.parts();
    // Asked before anything is done: whether a neighbour is free cannot be predicted, and shows sooner so.
    let is_free = |at: BlockId| nodes[at].state == BlockState::Free;
    let (prev, next) = (nodes[id].prev, nodes[id].next);
    let (prev_free, next_free) = (is_free(prev), is_free(next));
    // Whose a neighbour and the block are when joined, if they may be.
    let joined = |nodes: &Nodes, at: BlockId, own: (u16, u64)| {
        let beside = &nodes[at];
        Some((
            beside.list,
            merged_owner(own, (beside.list, beside.detail), idle)?,
        ))
    };
    let (size, mut beside) = (nodes[id].size, 0);
    if prev_free && let Some((other, both)) = joined(nodes, prev, (list, epoch)) {
        (list, epoch) = both;
        lists.get_mut(other).remove(nodes, prev);
        beside += 1;
        absorb_next(nodes, vacant, prev, tail);
        id = prev;
    }
    if next_free && let Some((other, both)) = joined(nodes, next, (list, epoch)) {
        (list, epoch) = both;
        lists.get_mut(other).remove(nodes, next);
        beside += 1;
        absorb_next(nodes, vacant, id, tail);
    }
    counters.free_block_coalesced(size, beside);
    let free_block = &mut nodes[id];
    free_block.state = BlockState::Free;
    free_block.list = list;
    free_block.detail = epoch;
    free_block.flags = Flags::NONE;
    lists.get_mut(list).insert(nodes, id);
}

/// Whether more whole granules stay free if a block is cut off the high end of a free block than off the
/// low end. Only whole free chunks can move, and chunks begin and end on granules.
#[inline(always)]
fn splits_better_high(free_block: &Block, size: u64, granularity: u64) -> bool {
    if granularity == 0 {
        return false;
    }
    // A power of two: the device's granularity is checked to be one.
    let shift = granularity.trailing_zeros();
    let whole =
        |start: u64, end: u64| (end >> shift).saturating_sub((start + granularity - 1) >> shift);
    whole(free_block.address, free_block.end() - size)
        > whole(free_block.address + size, free_block.end())
}

/// The owner of two free blocks joined, each with the epoch of its freeing; `None` where two streams'
/// free blocks would be joined, which neither could use without waiting for the other.
#[inline(always)]
pub(super) fn merged_owner(a: (u16, u64), b: (u16, u64), idle: u16) -> Option<(u16, u64)> {
    match (a.0, b.0) {
        // Freed one after the other: no one event is of this free.
        (x, y) if x == y => Some((x, a.1.max(b.1) | 1)),
        (x, _) if x == idle => Some(b),
        (_, y) if y == idle => Some(a),
        _ => None,
    }
}
