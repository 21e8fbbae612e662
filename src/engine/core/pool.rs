//! The pool: allocating and freeing blocks. What no free block meets goes on in `ladder`.

use super::LARGEST_REQUEST;
use super::address_map::{AddressMap, MapIndex};
use super::arena::{Arena, PendingArenas};
use super::block::{Block, BlockId, BlockState, Blocks, Flags, NONE, VACANT};
use super::block_size;
use super::chunk::ChunkId;
use super::coalesce::{coalesce, splits_better_high};
use super::counters::{Counters, Origin, PoolStats};
use super::ids::{ArenaId, SHARED_ARENA, StreamKey, UNORDERED};

use super::epoch::Epochs;
use super::gpu::{Gpu, Refusal};
use super::memory_events::EventLog;
use super::policy::Policy;
use super::purge_deadlines::PurgeDeadlines;
use super::remap_budget::RemapBudget;
use super::shortage::Shortage;
use super::stream_lists::FreeLists;
use std::collections::HashMap;

impl<G: Gpu> Pool<G> {
    /// Allocates `size` bytes, rounded up to 512, from a free block that the stream may use at once: the best
    /// fit among its own and the idle ones. `None` where there is none; [`Pool::allocate`] then goes on.
    ///
    /// Costs two look-ups in bins, one split and one hash insertion; no call to the driver, but for polling
    /// events now and then.
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

    /// Allocates `size` bytes, rounded up to 512, that the stream may use at once. The address is aligned to
    /// 512 bytes. `requested` is what the program asked for, and `origin` by which functions, for the
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
        let free_block = self.find_or_make_free(size, list)?;
        let size = self.split_size(free_block, size, arena);
        let address = self.allocate_from(free_block, size, requested, list, arena, origin);
        let address = address.ok_or_else(|| self.shortage(size, arena, Refusal::OutOfMemory))?;
        Ok(Allocated { address, list })
    }

    /// Frees the block that starts at `address`. Its own stream may have it again at once; others when the
    /// work before has completed. Returns its size.
    #[inline]
    pub fn free(&mut self, address: u64) -> Result<u64, Unknown> {
        let live = self.find_live(address).ok_or(Unknown)?;
        Ok(self.free_live(live))
    }

    /// The live block that starts at `address`.
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

    /// Frees a block that was found since the pool last changed. Returns its size.
    ///
    /// Costs one hash removal, and coalescing with up to two neighbours.
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

    /// The best fit, counted as a hit.
    #[inline]
    pub(super) fn find_free(&mut self, size: u64, list: u16) -> Option<BlockId> {
        let free_block = self.best_fit(size, list);
        let found = free_block != NONE;
        self.counters.hits += u64::from(found);
        found.then_some(free_block)
    }

    /// [`Self::find_free`] for a request that was counted before.
    #[cold]
    #[inline(never)]
    fn find_free_again(&mut self, size: u64, list: u16) -> Option<BlockId> {
        self.counters.hits -= 1;
        self.find_free(size, list)
    }

    /// The smallest free block of at least `size` bytes that the stream may use at once, or `NONE`.
    #[inline(always)]
    pub(super) fn best_fit(&self, size: u64, list: u16) -> BlockId {
        let own = self.lists.get(list);
        let idle = &self.lists.get(own.idle).bins;
        let own = own.bins.best_fit(&self.blocks, size);
        if idle.is_empty() {
            return own;
        }
        let idle = idle.best_fit(&self.blocks, size);
        // The sentinel is larger than any block.
        let (a, b) = (&self.blocks[own], &self.blocks[idle]);
        if (a.size, a.address) <= (b.size, b.address) {
            own
        } else {
            idle
        }
    }

    /// How much to split off a free block for a block of this size: all of it where blocks are whole
    /// segments.
    #[inline(always)]
    fn split_size(&self, free_block: BlockId, size: u64, arena: ArenaId) -> u64 {
        match arena != SHARED_ARENA && self.arenas[arena as usize].whole_segments {
            true => self.blocks[free_block].size,
            false => size,
        }
    }

    /// Splits `size` bytes off a free block and marks them live. Returns the address, or `None` where there
    /// is no node left.
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

    /// Marks a block live, indexes it by address and updates the counters. The list is its stream's in this
    /// arena. Returns its address.
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
        // A free block has no flags.
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

    /// Records a free in an arena that notes them; `before` is the epoch of the last free of this list that
    /// was not recorded.
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
        let has_one_stream = !self.has_several_streams();
        let list = self.lists.get_mut(block.list);
        if list.key == UNORDERED || has_one_stream {
            return;
        }
        let range = (block.address, block.end());
        let event = !self.epochs.off_stream;
        if self
            .epochs
            .record_free(list.key, range, event, &mut self.gpu)
        {
            list.freed = before;
        }
    }

    /// Runs `free`, whose frees get no events of their own: the program freed that memory earlier, and an
    /// event recorded now would not tell when.
    pub fn free_without_events(&mut self, free: impl FnOnce(&mut Self)) {
        self.epochs.without_events = true;
        free(self);
        self.epochs.without_events = false;
    }
}

/// A pending block: freed while other streams may still use it.
pub(super) struct Deferred {
    pub block: BlockId,
    /// The epoch of the free; no two deferred frees have the same.
    pub epoch: u64,
    pub uses: Vec<StreamKey>,
}

/// The pool of one device: its shared arena, and its private ones. It neither locks nor calls CUDA; one
/// caller at a time.
pub struct Pool<G> {
    pub(super) gpu: G,
    pub(super) policy: Policy,
    pub(super) granularity: u64,
    pub(super) blocks: Blocks,
    pub(super) address_map: AddressMap,
    pub(super) lists: FreeLists,
    pub(super) arenas: Vec<Arena>,
    /// Other streams that use a live block (`record_use`).
    pub(super) stream_uses: HashMap<BlockId, Vec<StreamKey>>,
    /// Pending blocks, in the order of their frees.
    pub(super) deferred: Vec<Deferred>,
    /// Allocations since the first free was deferred, or one completed.
    pub(super) allocations_while_deferred: u64,
    pub(super) epochs: Epochs,
    pub(super) purge: PurgeDeadlines,
    pub(super) remap_budget: RemapBudget,
    pub(super) counters: Counters,
    pub(super) event_log: EventLog,
    /// Supplied segments that are not needed any more: address and size.
    pub(super) returned_segments: Vec<(u64, u64)>,
    /// Ids of arenas that are gone.
    pub(super) vacant_arenas: Vec<ArenaId>,
    pub(super) pending: PendingArenas,
    /// Scratch: chunks to remap and the free blocks they lie in, ascending inside a free block.
    pub(super) to_remap: Vec<(BlockId, ChunkId)>,
}

/// An allocated block.
#[derive(Clone, Copy, Debug)]
pub struct Allocated {
    /// Where it starts.
    pub address: u64,
    /// The free list of the stream that it is for.
    pub list: u16,
}

/// A live block that was found by its address.
#[derive(Clone, Copy)]
pub struct LiveBlock {
    pub(super) id: BlockId,
    /// Where the address map has it, until that is next changed.
    map_index: MapIndex,
    /// The requested bytes.
    pub requested: u64,
    /// The free list of the stream that it was allocated on.
    pub list: u16,
}

impl LiveBlock {
    /// A small number that no other live block has.
    #[inline]
    pub fn index(&self) -> usize {
        self.id.index()
    }
}

/// The address is not the start of a live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unknown;

/// The host memory that a pool's metadata lies in.
pub struct Metadata {
    blocks: Blocks,
    address_map: AddressMap,
    lists: FreeLists,
}

impl Metadata {
    /// Reserves it: some 4 GiB of addresses. `None` where the process may not have as many.
    pub fn new() -> Option<Self> {
        Some(Metadata {
            blocks: Blocks::new()?,
            address_map: AddressMap::new()?,
            lists: FreeLists::new()?,
        })
    }
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
        // The first of all free lists is always available.
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
            purge: PurgeDeadlines::default(),
            remap_budget: RemapBudget::new(),
            counters: Counters::default(),
            event_log: EventLog::default(),
            returned_segments: Vec::new(),
            vacant_arenas: Vec::new(),
            pending: PendingArenas::default(),
            to_remap: Vec::new(),
        }
    }

    /// Gives back everything that can be, addresses too. For when nobody uses the pool any more.
    pub fn tear_down(&mut self) {
        self.trim_all(None);
        for arena in &mut self.arenas {
            if arena.reserved == 0 && arena.chunks.stale.is_empty() {
                arena.release_addresses(&mut self.gpu);
            }
        }
    }

    /// The stream that a block was allocated on.
    #[inline]
    pub fn owner_of(&self, live: &LiveBlock) -> StreamKey {
        self.lists.get(live.list).key
    }

    /// By which functions a block was allocated.
    #[inline]
    pub fn origin_of(&self, live: &LiveBlock) -> Origin {
        self.blocks[live.id].flags.origin()
    }

    /// Whether other streams use the block, so that freeing it is deferred.
    pub fn is_multi_stream(&self, live: &LiveBlock) -> bool {
        self.blocks[live.id].flags.is_multi_stream()
    }

    /// Marks a block as used by every stream. False where it was marked before.
    #[inline]
    pub fn mark_multi_stream(&mut self, live: &LiveBlock) -> bool {
        let flags = &mut self.blocks[live.id].flags;
        let marked = flags.is_multi_stream();
        flags.set_multi_stream(true);
        !marked
    }

    /// No other stream uses the block any more.
    #[inline]
    pub fn clear_multi_stream(&mut self, live: &LiveBlock) {
        self.blocks[live.id].flags.set_multi_stream(false);
    }

    /// [`Pool::is_multi_stream`] of the live block at `address`; false where there is none.
    pub fn is_multi_stream_at(&self, address: u64) -> bool {
        self.find_live(address)
            .is_some_and(|live| self.is_multi_stream(&live))
    }

    /// The stream that the live block at `address` was allocated on.
    #[inline]
    pub fn stream_of(&self, address: u64) -> Option<StreamKey> {
        self.find_live(address).map(|live| self.owner_of(&live))
    }

    /// The size of the live block at `address`.
    pub fn size_of(&self, address: u64) -> Option<u64> {
        self.find_live(address)
            .map(|live| self.blocks[live.id].size)
    }

    /// The statistics, with the blocks that the allocator's own functions allocated.
    pub fn stats(&self) -> PoolStats {
        self.stats_of(Origin::Allocator)
    }

    /// The statistics, with the blocks of one origin.
    pub fn stats_of(&self, origin: Origin) -> PoolStats {
        self.counters.read(origin)
    }

    /// The counters behind the statistics.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The counters, for resets and for what is counted outside the pool.
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

    /// Bytes of host memory that the metadata of blocks takes, in use or not.
    pub fn node_bytes(&self) -> usize {
        self.blocks.bytes() + self.address_map.bytes()
    }

    /// Bytes of reserved addresses, mapped or not.
    pub fn addresses(&self) -> u64 {
        self.arenas
            .iter()
            .map(|arena| arena.addresses.reserved())
            .sum()
    }

    /// Whether the arena has an idle block of at least `size` bytes, which any stream may have.
    pub fn has_idle_block(&self, size: u64, arena: ArenaId) -> bool {
        let idle = self.arenas[arena as usize].idle;
        self.lists.get(idle).bins.best_fit(&self.blocks, size) != NONE
    }

    /// Bytes of the largest free block, whichever stream's, purged ones included.
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

    /// Splits `size` bytes off one end of a free block; the rest stays free. Returns a node that is in no
    /// list. `None` where there is no node left.
    #[inline(always)]
    pub(super) fn split_off(&mut self, free_block: BlockId, size: u64) -> Option<BlockId> {
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
        // The rest keeps its node and its place in the order of frees.
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

    /// Makes a node a free block of a list, freed at an epoch of its stream, and coalesces it.
    pub(super) fn add_free(&mut self, id: BlockId, list: u16, epoch: u64) {
        let owner = self.lists.get(list);
        let (tail, idle) = (&mut self.arenas[owner.arena as usize].tail, owner.idle);
        let (blocks, lists, counters) = (&mut self.blocks, &mut self.lists, &mut self.counters);
        coalesce(blocks, lists, counters, tail, idle, (id, list, epoch));
    }
}
