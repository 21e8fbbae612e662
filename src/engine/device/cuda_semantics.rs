//! The promises of `cudaMalloc`, `cudaMallocAsync` and their frees, kept over the pool: for the functions of
//! CUDA that the preloaded library interposes.
//!
//! `cudaFree` waits for the device, and then calls [`Device::free_completed`]; with `free:relaxed` it defers
//! the free instead ([`Device::free_relaxed`]). `cudaFreeAsync` frees in the order of a stream
//! ([`Device::free_on_stream`]).

use crate::core::{ALL_STREAMS, Allocation, BlockInfo, Origin, SHARED_ARENA, StreamKey, UNORDERED};
use crate::device::captures;
use crate::device::depot::RelaxedBlock;
use crate::device::exported;
use crate::device::live_streams::LiveStreams;
use crate::device::stream_cache::CacheKey;
use crate::device::stream_key::foreign_context;
use crate::device::synchronize::{synchronize, synchronize_in_capture, synchronize_stream};
use crate::device::{Device, OutOfMemory, State, UnknownPointer};
use crate::util::lock::Guard;
use std::mem::replace;

/// Bytes of a device that the process uses, as CUDA's own queries show them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryInUse {
    /// Bytes of all blocks in use.
    pub live: u64,
    /// Bytes of those that the allocator's own functions allocated.
    pub live_of_allocator: u64,
    /// Bytes reserved from the driver.
    pub reserved: u64,
}

impl Device {
    /// The driver's handle of the device's primary context.
    pub fn context(&self) -> usize {
        self.properties.context
    }

    /// [`Device::allocate`] for CUDA's functions, on a stream by its key. Never from a private pool: those
    /// are for tensors.
    #[inline(always)]
    pub fn allocate_on_stream(&self, size: usize, key: StreamKey) -> Result<u64, Box<OutOfMemory>> {
        self.allocate_block(size, key, Origin::Cuda)
    }

    /// Allocates `size` bytes that any stream may use at once (`cudaMalloc`).
    #[inline]
    pub fn allocate_unordered(&self, size: usize) -> Result<u64, Box<OutOfMemory>> {
        self.allocate_on_stream(size, UNORDERED)
    }

    /// Frees a block that no work uses any more: the caller has waited for it.
    #[inline]
    pub fn free_completed(&self, address: u64) -> Result<(), UnknownPointer> {
        self.free_cached(address, CacheKey::of(UNORDERED, Origin::Cuda))
    }

    /// [`Device::allocate_unordered`] with `free:relaxed`: first from deferred frees of the same size whose
    /// work has completed.
    ///
    /// Costs one lock that no other thread takes if this one has freed blocks of the same size, else the
    /// device's.
    #[inline]
    pub fn allocate_relaxed(&self, size: usize) -> Result<u64, Box<OutOfMemory>> {
        let taken = self.magazines.own().take(size as u64);
        match taken {
            Some(address) => Ok(address),
            None => self.allocate_from_depot(size),
        }
    }

    /// The thread's magazine has no ready block of the size: its next batches, the depot, the pool.
    #[inline(never)]
    fn allocate_from_depot(&self, size: usize) -> Result<u64, Box<OutOfMemory>> {
        let requested = size as u64;
        {
            let mut state = self.state.lock();
            let mut own = self.magazines.own();
            let State { depot, pool, .. } = &mut *state;
            while own.advance(self.magazines.share(), depot, pool) {
                if let Some(address) = own.take(requested) {
                    return Ok(address);
                }
            }
            if let Some(block) = depot.take(requested, pool) {
                own.track(block, self.magazines.share(), &mut depot.holders);
                return Ok(block.address);
            }
        }
        let address = self.allocate_block(size, UNORDERED, Origin::Cuda)?;
        let mut state = self.state.lock();
        let mut own = self.magazines.own();
        let live = state.pool.find_live(address);
        if let Some(live) = live.filter(|it| state.pool.owner_of(it) == UNORDERED) {
            let block = RelaxedBlock::new(address, live, &state.pool);
            let holders = &mut state.depot.holders;
            own.track(block, self.magazines.share(), holders);
        }
        Ok(address)
    }

    /// Frees a block that work on any stream may still use (`cudaFree` with `free:relaxed`): it is allocated
    /// again, for the same size, once all work of the device up to now has completed. Does not wait.
    ///
    /// Costs one lock that no other thread takes if this thread allocated the block, else the device's.
    #[inline]
    pub fn free_relaxed(&self, address: u64) -> Result<(), UnknownPointer> {
        let mut own = self.magazines.own();
        if !own.put(address) {
            drop(own);
            return self.free_to_depot(address);
        }
        if own.is_full(self.magazines.share()) {
            drop(own);
            self.close_batch();
        }
        Ok(())
    }

    /// Records an event behind the calling thread's latest frees.
    #[inline(never)]
    fn close_batch(&self) {
        let mut state = self.state.lock();
        let mut own = self.magazines.own();
        let State { depot, pool, .. } = &mut *state;
        own.close(self.magazines.share(), depot, pool);
    }

    /// The thread's magazine does not track the block: it goes to the depot.
    #[inline(never)]
    fn free_to_depot(&self, address: u64) -> Result<(), UnknownPointer> {
        let mut state = self.state.lock();
        let live = state.pool.find_live(address).ok_or(UnknownPointer)?;
        if state.pool.owner_of(&live) != UNORDERED {
            drop(state);
            return self.free_after_all_streams(address);
        }
        if !self.untrack(&mut state, &live, address) {
            return Err(UnknownPointer);
        }
        let State { depot, pool, .. } = &mut *state;
        match depot.put(RelaxedBlock::new(address, live, pool), pool) {
            true => Ok(()),
            false => Err(UnknownPointer),
        }
    }

    /// Frees a block that work on any stream may still use to the pool, which reuses it once all work of the
    /// device up to now has completed. Does not wait.
    pub fn free_after_all_streams(&self, address: u64) -> Result<(), UnknownPointer> {
        let mut state = self.state.lock();
        let live = state.pool.find_live(address).ok_or(UnknownPointer)?;
        if state.is_in_depot(&live) || !self.untrack(&mut state, &live, address) {
            return Err(UnknownPointer);
        }
        state.capture_users.remove(&address);
        let shared = state.pool.record_use(address, ALL_STREAMS);
        shared
            .and_then(|()| state.pool.free(address).map(drop))
            .map_err(|_| UnknownPointer)
    }

    /// Frees a block in the order of a stream (`cudaFreeAsync`). If it was allocated on the same stream, that
    /// stream may get it again at once; else it is reused once this stream's work up to now has completed.
    #[inline]
    pub fn free_on_stream(&self, address: u64, key: StreamKey) -> Result<(), UnknownPointer> {
        if let Some(mut cache) = self.stream_caches.of(CacheKey::of(key, Origin::Cuda))
            && cache.is_of_stream(key)
            && cache.put(address)
        {
            return Ok(());
        }
        let state = self.state.lock();
        match state.pool.stream_of(address) {
            Some(owner) if owner == key => self.free_to_pool(state, None, address),
            Some(_) => self.free_in_order_of(state, address, key),
            None => Err(UnknownPointer),
        }
    }

    /// [`Device::free_on_stream`] for a block of another stream.
    fn free_in_order_of(
        &self,
        mut state: Guard<'_, State>,
        address: u64,
        key: StreamKey,
    ) -> Result<(), UnknownPointer> {
        let live = state.pool.find_live(address).ok_or(UnknownPointer)?;
        if state.is_in_depot(&live) || !self.untrack(&mut state, &live, address) {
            return Err(UnknownPointer);
        }
        state.capture_users.remove(&address);
        // A block of no stream may be in use on any stream of the device.
        let unordered = state.pool.owner_of(&live) == UNORDERED;
        let mut used = Ok(());
        if unordered {
            used = state.pool.record_use(address, ALL_STREAMS);
        }
        if !unordered || state.pool.is_foreign(key) {
            used = used.and_then(|()| state.pool.record_use(address, key));
        }
        used.and_then(|()| state.pool.free_from_other_stream(address))
            .map_err(|_| UnknownPointer)
    }

    /// [`Device::free_on_stream`] with a stream of another device or context.
    pub fn free_on_foreign_stream(
        &self,
        address: u64,
        key: StreamKey,
    ) -> Result<(), UnknownPointer> {
        if !self.is_allocated(address) {
            return Err(UnknownPointer);
        }
        let context = self.properties.context;
        match foreign_context(&self.functions, context, key.handle) {
            Some(other) => {
                let mut state = self.state.lock();
                state.pool.add_foreign_stream(key);
                state.pool.gpu_mut().add_foreign_stream(key, other);
                self.free_in_order_of(state, address, key)
            }
            None => {
                if !captures::is_on() {
                    // A default stream of another context has no handle here: it is the current context's.
                    synchronize_stream(&self.functions, key.handle);
                }
                self.free_after_all_streams(address)
            }
        }
    }

    /// Whether a block in use starts at `address`. Does not call the driver.
    pub fn is_allocated(&self, address: u64) -> bool {
        self.is_allocated_in(&self.state.lock(), address)
    }

    /// [`Device::is_allocated`] under the device's lock. Blocks in stream caches and deferred frees are in
    /// use to the pool, but not to the program.
    fn is_allocated_in(&self, state: &State, address: u64) -> bool {
        let Some(live) = state.pool.find_live(address) else {
            return false;
        };
        let cache = self.stream_caches.of(state.cache_of(&live));
        !state.is_in_depot(&live)
            && cache.is_none_or(|cache| !cache.holds(address))
            && !self.magazines.holds(&live, address, &state.depot.holders)
    }

    /// The block in use that contains an address.
    pub fn find(&self, address: u64) -> Option<BlockInfo> {
        let state = self.state.lock();
        let found = state.pool.block_around(address);
        found.filter(|it| self.is_allocated_in(&state, it.start))
    }

    /// The allocation that contains an address, as CUDA's queries show it to the program.
    pub fn allocation(&self, address: u64) -> Option<Allocation> {
        let state = self.state.lock();
        let found = state.pool.allocation_around(address);
        found.filter(|it| it.private || self.is_allocated_in(&state, it.found.start))
    }

    /// Whether `address` is in a plain segment, which the driver takes for one allocation and would free as a
    /// whole.
    pub fn is_in_segment(&self, address: u64) -> bool {
        let state = self.lock_flushed();
        state.pool.is_plain() && state.pool.holds(address)
    }

    /// The addresses of the blocks in use that were allocated in the order of a stream.
    pub fn stream_ordered_blocks(&self) -> Vec<u64> {
        let state = self.lock_flushed();
        let blocks = state.pool.blocks_in_use();
        let ordered = blocks.filter(Device::is_stream_ordered);
        ordered.map(|block| block.start).collect()
    }

    /// Whether a block was allocated in the order of a stream (`cudaMallocAsync`).
    pub fn is_stream_ordered(found: &BlockInfo) -> bool {
        found.stream != UNORDERED
    }

    /// Bytes of the blocks in use that were allocated in the order of a stream.
    pub fn stream_ordered_bytes(&self) -> u64 {
        let state = self.lock_flushed();
        let blocks = state.pool.blocks_in_use();
        let ordered = blocks.filter(Device::is_stream_ordered);
        ordered.map(|block| block.size).sum()
    }

    /// Bytes in use and reserved now.
    pub fn usage(&self) -> MemoryInUse {
        let state = self.lock_flushed();
        let counters = state.pool.counters();
        let live_of_allocator = counters.in_use(Origin::Allocator);
        MemoryInUse {
            live: live_of_allocator + counters.in_use(Origin::Cuda) - state.depot.bytes(),
            live_of_allocator,
            reserved: counters.reserved(),
        }
    }

    /// Counts `bytes` that the program is about to allocate from the driver itself towards the limit. False
    /// if they are beyond it. If need be free memory is released first, but only if it `may_wait` for the
    /// GPU.
    pub fn reserve_unpooled(&self, bytes: u64, may_wait: bool) -> bool {
        let ledger = &self.ledger;
        if may_wait && !ledger.allows(bytes) {
            self.release_all();
        }
        let _state = self.state.lock();
        let admitted = ledger.allows(bytes);
        if admitted {
            ledger.set_unpooled(ledger.unpooled().saturating_add(bytes));
        }
        admitted
    }

    /// Allocates a completed free block without calling the driver, as in a capture. `None` if there is none.
    pub fn allocate_completed(&self, size: usize) -> Option<u64> {
        let mut state = self.lock_flushed();
        let (requested, bytes) = (size as u64, state.block_size(size));
        let pool = &mut state.pool;
        let capturing = replace(&mut pool.gpu_mut().capturing, true);
        let allocated = pool.allocate_free(bytes, requested, UNORDERED, SHARED_ARENA, Origin::Cuda);
        pool.gpu_mut().capturing = capturing;
        allocated.map(|it| it.address)
    }

    /// Counts `bytes` less as allocated from the driver itself.
    pub fn release_unpooled(&self, bytes: u64) {
        let _state = self.state.lock();
        let unpooled = self.ledger.unpooled();
        self.ledger.set_unpooled(unpooled.saturating_sub(bytes));
    }

    /// Bytes that are counted as allocated from the driver itself.
    pub fn unpooled_bytes(&self) -> u64 {
        self.ledger.unpooled()
    }

    /// Waits for all work of the device, without breaking a capture. Returns the driver's status, 0 for
    /// success. Threads that wait at the same time share one wait.
    #[inline]
    pub fn synchronize(&self) -> u32 {
        self.synchronize_or(false)
    }

    /// [`Device::synchronize`] for `cuMemFree`: during a capture the status depends on the calling thread's
    /// capture mode, as the driver's own does.
    #[inline]
    pub fn synchronize_as_free(&self) -> u32 {
        self.synchronize_or(true)
    }

    #[inline]
    fn synchronize_or(&self, as_program: bool) -> u32 {
        let context = self.properties.context;
        let wait = || synchronize(&self.functions, context, &self.wait_events);
        let captured = || synchronize_in_capture(&self.functions, context, as_program);
        match captures::is_on() {
            false => self.waits.0.wait(|| wait().unwrap_or_else(captured)),
            true => captured(),
        }
    }

    /// Frees every block and releases all memory to the driver, as the context ends (`cudaDeviceReset`).
    /// `ended`: it has ended already, and all its work with it.
    pub fn reset(&self, ended: bool) {
        let free_cached = |state: &mut State| {
            self.flush_caches(state);
            let State { depot, pool, .. } = state;
            depot.free_all(pool);
        };
        let mut state = self.state.lock();
        // No stream outlives its context.
        self.permanent.clear();
        self.live_streams.clear();
        LiveStreams::created().clear();
        free_cached(&mut state);
        let blocks: Vec<BlockInfo> = state.pool.blocks_in_use().collect();
        for block in blocks {
            exported::revoke(block.start);
            while let Some(live) = state.pool.find_live(block.start) {
                if self.untrack(&mut state, &live, block.start) {
                    state.pool.free_live(live);
                } else {
                    // It was freed meanwhile to a stream cache or magazine, which would allocate it again.
                    free_cached(&mut state);
                }
            }
        }
        state.capture_users.clear();
        state.pool.gpu_mut().ended = ended;
        Device::free_all_uncached(&mut state);
        // A release that fails is tried once more.
        for _ in 0..2 {
            state.pool.trim_all(None);
            state.pool.gpu_mut().retry_pending_releases();
        }
        state.pool.gpu_mut().ended = false;
        state.pool.gpu_mut().drop_events(ended);
    }
}
