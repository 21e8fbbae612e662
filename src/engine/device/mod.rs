//! One device: its pool behind a lock, and the caches in front of that lock.
//!
//! [`Device::allocate`] and [`Device::free`] are the fast paths, each with one slow path; `oom` has the steps
//! of an allocation for which the pool has no free block.
//!
//! # The order of locks
//! 1. the device's (`Device::state`),
//! 2. a stream cache's (`stream_cache`),
//! 3. a magazine's (`magazine`),
//! 4. what is taken for a moment, and nothing else under it: the events of waits, live streams, the history's
//!    marks.
//!
//! A thread takes them in this order only. With a stream cache's lock held the device's may be tried, not
//! waited for. Stream caches are opened and closed, and blocks come to be known to a magazine and cease to
//! be, under both the device's lock and theirs. Suppliers and observers are called with none of these held.
//! Trackers of memory events take turns by a lock of their own (`trackers`), which is taken with none of these
//! held.

mod capture_graph;
mod capture_reuse;
pub mod captures;
pub(crate) mod context;
mod cuda_semantics;
mod depot;
mod driver_gpu;
pub mod exported;
pub mod external_cache;
mod figures;
pub mod history;
mod ipc_memory;
mod ledger;
mod limits;
pub mod live_streams;
mod lookup;
mod magazine;
mod oom;
mod oom_report;
pub mod owner_hint;
mod permanent_streams;
mod pool_checkpoint;
mod predictor;
mod private_pools;
mod purge;
mod snapshot;
pub mod spans;
mod stream_cache;
mod stream_key;
mod supplier;
mod synchronize;
pub(crate) mod trackers;
mod uncached;

pub use crate::util::thread::thread_number;
pub use cuda_semantics::MemoryInUse;
pub use figures::{Figures, set_torch_allocator};
pub use ipc_memory::IpcBlock;
pub use ledger::{Call, CallFigures};
pub use oom_report::OutOfMemory;
pub use permanent_streams::InsertOnlyMap;
pub use pool_checkpoint::NotRestored;
pub use private_pools::{PoolId, PoolRoute, Supplier};

use capture_reuse::{CaptureReuse, CaptureUsers};
use depot::Depot;
use magazine::Magazines;
use oom_report::Bytes;
use private_pools::{ActiveRoute, PrivatePools, Source};

use crate::core::{
    Allocated, ArenaId, LARGEST_REQUEST, LiveBlock, Metadata, Origin, Policy, Pool, Refusal,
    SHARED_ARENA, StreamKey, UNORDERED, block_size,
};
use crate::device::context::Properties;
use crate::device::driver_gpu::DriverGpu;
use crate::device::ledger::Ledger;
use crate::device::live_streams::LiveStreams;
use crate::device::permanent_streams::PermanentStreams;
use crate::device::predictor::Predictors;
use crate::device::stream_cache::{CacheKey, StreamCache, StreamCaches};
use crate::device::stream_key::{
    add_permanent_stream, created_stream, foreign_context, stream_key,
};
use crate::device::synchronize::Events;
use crate::driver::Functions;
use crate::settings::{Free, RoundUp, Settings};
use crate::util::lock::{CachePadded, Guard, Lock};
use crate::util::message;
use crate::util::single_flight::SingleFlight;
use history::History;
use parking_lot::{Mutex, ReentrantMutex};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

struct State {
    pool: Pool<DriverGpu>,
    round_up: RoundUp,
    /// Each block comes from the driver (`uncached`).
    uncached: bool,
    /// Blocks that came from the driver one by one, with their sizes.
    blocks: HashMap<u64, u64>,
    predictors: Predictors,
    private: PrivatePools,
    /// The suppliers of supplied segments, by address.
    suppliers: HashMap<u64, Arc<dyn Supplier>>,
    routes: Vec<ActiveRoute>,
    /// Deferred frees that are in no magazine.
    depot: Depot,
    /// Streams of one capture that use a block, by its address, if no others do.
    capture_users: HashMap<u64, CaptureUsers>,
    capture_reuse: CaptureReuse,
    history: History,
    /// For [`Device::purge_idle`]: how many allocations and frees there had been at the last call, and when
    /// that number last changed.
    seen: (u64, Duration),
}

impl State {
    /// Whether a block that is in use to the pool is a deferred free: one of no stream that is marked as used
    /// by several.
    fn is_in_depot(&self, live: &LiveBlock) -> bool {
        self.pool.owner_of(live) == UNORDERED && self.pool.is_multi_stream(live)
    }

    /// Bytes of the block that a request for `requested` bytes gets: the one place where sizes are rounded
    /// up, by `roundup_power2_divisions` and then to the unit of all blocks.
    #[inline(always)]
    fn block_size(&self, requested: usize) -> u64 {
        match self.round_up.round_up(requested) as u64 {
            // Refused by the pool, and close to overflow.
            bytes if bytes > LARGEST_REQUEST => bytes,
            bytes => block_size(bytes),
        }
    }

    /// The stream cache that a block in use goes to.
    #[inline]
    fn cache_of(&self, live: &LiveBlock) -> CacheKey {
        CacheKey::of(self.pool.owner_of(live), self.pool.origin_of(live))
    }
}

/// One device and its pool. Every function may be called by any thread; calls on one device take turns.
pub struct Device {
    ordinal: i32,
    functions: Functions,
    properties: Arc<Properties>,
    ledger: Arc<Ledger>,
    /// The `limit` of the settings in bytes, `u64::MAX` for none.
    limit_of_settings: u64,
    /// The fraction of the device's memory that was last set as the limit; the bits of an `f64`.
    fraction: AtomicU64,
    /// Some allocations may go to private pools, or past the pool.
    routed: AtomicBool,
    /// Streams that are never destroyed.
    permanent: Box<PermanentStreams>,
    stream_caches: StreamCaches,
    /// Deferred frees by thread.
    magazines: Magazines,
    /// `free:relaxed`: frees of no stream are deferred, and have magazines in place of a stream cache.
    relaxed: bool,
    waits: CachePadded<SingleFlight>,
    /// Events for waits for the whole device.
    wait_events: Arc<Mutex<Events>>,
    /// Streams of the device that exist.
    live_streams: Arc<LiveStreams>,
    /// Held while the device's trackers are told of events.
    telling: ReentrantMutex<()>,
    state: CachePadded<Lock<State>>,
}

impl Drop for Device {
    fn drop(&mut self) {
        let state = self.state.0.get_mut();
        self.stream_caches.clear_all(None, &mut state.pool);
        state.pool.tear_down();
    }
}

/// A request, once its arena is known.
#[derive(Clone, Copy)]
struct Request {
    /// The bytes asked for.
    size: usize,
    key: StreamKey,
    origin: Origin,
    arena: ArenaId,
}

/// An address that is not the start of a block in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownPointer;

impl Device {
    /// Allocates `size` bytes that the stream (by handle) may use at once. The address is a multiple of 512.
    ///
    /// Costs one lock that no other stream takes if the stream has just freed a block of the same size.
    /// Otherwise the device's lock, or both, and the pool's best fit. Waits for the GPU only where no free
    /// block fits.
    #[inline(always)]
    pub fn allocate(&self, size: usize, stream: u64) -> Result<u64, Box<OutOfMemory>> {
        self.allocate_block(size, self.key(stream), Origin::Allocator)
    }

    /// The fast path of every allocation: the pool's best fit while no stream has a cache.
    #[inline(always)]
    fn allocate_block(
        &self,
        size: usize,
        key: StreamKey,
        origin: Origin,
    ) -> Result<u64, Box<OutOfMemory>> {
        if self.stream_caches.any_open() {
            return self.allocate_cached(size, key, origin);
        }
        let state = self.state.lock();
        // No cache is opened or closed, and no route begins, without this lock.
        if self.stream_caches.any_open() || self.routed.load(Relaxed) {
            let cache = self.stream_caches.of(CacheKey::of(key, origin));
            return self.allocate_locked(state, cache, size, key, origin);
        }
        let arena = SHARED_ARENA;
        let request = Request {
            size,
            key,
            origin,
            arena,
        };
        self.allocate_from_arena(state, None, request, false)
    }

    /// The fast path while streams have caches: a block of the same size from the stream's own.
    #[inline(never)]
    fn allocate_cached(
        &self,
        size: usize,
        key: StreamKey,
        origin: Origin,
    ) -> Result<u64, Box<OutOfMemory>> {
        if !self.routed.load(Relaxed)
            && let Some(mut cache) = self.stream_caches.of(CacheKey::of(key, origin))
        {
            return match cache.take(key, size as u64) {
                Some(address) => Ok(address),
                None => self.allocate_after_miss(Some(cache), size, key, origin),
            };
        }
        self.allocate_after_miss(None, size, key, origin)
    }

    /// The stream has no cache, or its cache, which is locked, has no block of the size.
    #[inline(never)]
    fn allocate_after_miss(
        &self,
        missed: Option<Guard<'_, StreamCache>>,
        size: usize,
        key: StreamKey,
        origin: Origin,
    ) -> Result<u64, Box<OutOfMemory>> {
        if let Some(cache) = missed
            // By the order of locks (above) the device's may only be tried.
            && let Some(state) = self.state.try_lock()
        {
            return self.allocate_locked(state, Some(cache), size, key, origin);
        }
        let state = self.state.lock();
        let cache = self.stream_caches.of(CacheKey::of(key, origin));
        self.allocate_locked(state, cache, size, key, origin)
    }

    /// Allocates with the stream's cache locked, if it has one, where the request may belong to a private
    /// pool.
    #[inline(never)]
    fn allocate_locked(
        &self,
        mut state: Guard<'_, State>,
        mut cache: Option<Guard<'_, StreamCache>>,
        size: usize,
        key: StreamKey,
        origin: Origin,
    ) -> Result<u64, Box<OutOfMemory>> {
        let arena = match self.routed.load(Relaxed) && origin == Origin::Allocator {
            false => SHARED_ARENA,
            true => match self.route(&mut state, key.handle) {
                Source::Arena(arena) => arena,
                Source::Restored(address) => return Ok(address),
                Source::Driver => return self.allocate_uncached(&mut state, size),
                Source::Nothing => {
                    let size = size as u64;
                    let shortage = state
                        .pool
                        .shortage(size, SHARED_ARENA, Refusal::OutOfMemory);
                    return Err(self.out_of_memory(&mut state, size, shortage, SHARED_ARENA));
                }
            },
        };
        if let Some(cache) = &mut cache {
            cache.clear(&mut state.pool);
        }
        let others = self.stream_caches.any_other_open(cache.as_deref());
        let request = Request {
            size,
            key,
            origin,
            arena,
        };
        self.allocate_from_arena(state, cache, request, others)
    }

    /// The pool's best fit, and what the stream's cache and predictor are told of it. `cache` is the
    /// stream's, which is empty, if it has one; `others` tells whether other streams have one.
    #[inline(always)]
    fn allocate_from_arena(
        &self,
        mut state: Guard<'_, State>,
        cache: Option<Guard<'_, StreamCache>>,
        request: Request,
        others: bool,
    ) -> Result<u64, Box<OutOfMemory>> {
        let Request {
            size,
            key,
            origin,
            arena,
        } = request;
        let (requested, bytes) = (size as u64, state.block_size(size));
        let held = cache.as_deref();
        // To the pool a cached block is in use, which no peak may count.
        if others && state.pool.counters().would_peak(origin, bytes, requested) {
            self.stream_caches.clear_all(held, &mut state.pool);
        }
        let found = state
            .pool
            .allocate_free(bytes, requested, key, arena, origin);
        let allocated = match found {
            Some(allocated) => allocated,
            None => {
                // Made in this branch alone, or each request would be written to the stack.
                let request = Request {
                    size,
                    key,
                    origin,
                    arena,
                };
                self.allocate_slow(&mut state, held, &request, bytes)?
            }
        };
        let Allocated { address, list } = allocated;
        if arena == SHARED_ARENA && !state.pool.needs_free_event(bytes) {
            match cache {
                Some(cache) if cache.should_close() => self.stream_caches.close(cache),
                Some(mut cache) => cache.track(key, address, requested, bytes),
                // Such memory has magazines instead.
                None if self.relaxed && key == UNORDERED => {}
                None if state.predictors.of(list).on_allocate(address, requested) => {
                    if let Some(mut cache) = self.stream_caches.open(key, origin) {
                        cache.track(key, address, requested, bytes);
                    }
                }
                None => {}
            }
        }
        Ok(address)
    }

    /// Frees a block; the stream that it was allocated on may get it again at once. `stream` is that stream's
    /// handle if the caller knows it, which makes the block quicker to find: another one costs time, no more.
    ///
    /// Costs one lock that no other stream takes if the stream's cache takes the block, else the device's.
    #[inline(always)]
    pub fn free(&self, address: u64, stream: u64) -> Result<(), UnknownPointer> {
        match self.stream_caches.any_open() {
            true => self.free_cached(address, CacheKey::of_handle(stream)),
            false => self.free_to_pool(self.state.lock(), None, address),
        }
    }

    /// The fast path while streams have caches: the block goes to this one, if it belongs there.
    #[inline(never)]
    fn free_cached(&self, address: u64, owner: CacheKey) -> Result<(), UnknownPointer> {
        match self.stream_caches.of(owner) {
            Some(mut cache) => match cache.put(address) {
                true => Ok(()),
                false => self.free_after_miss(Some(cache), address),
            },
            None => self.free_after_miss(None, address),
        }
    }

    /// There is no such cache, or the one that is locked does not take the block.
    #[inline(never)]
    fn free_after_miss(
        &self,
        missed: Option<Guard<'_, StreamCache>>,
        address: u64,
    ) -> Result<(), UnknownPointer> {
        if let Some(cache) = missed
            // By the order of locks (above) the device's may only be tried.
            && let Some(state) = self.state.try_lock()
        {
            return self.free_to_pool(state, Some(cache), address);
        }
        self.free_to_pool(self.state.lock(), None, address)
    }

    /// Frees a block to the pool, and tells its stream's cache or predictor. `held` is a cache that the
    /// caller has locked.
    #[inline(always)]
    fn free_to_pool(
        &self,
        mut state: Guard<'_, State>,
        held: Option<Guard<'_, StreamCache>>,
        address: u64,
    ) -> Result<(), UnknownPointer> {
        let state = &mut *state;
        let Some(mut live) = state.pool.find_live(address) else {
            let known = Device::free_uncached(state, address);
            return known.then_some(()).ok_or(UnknownPointer);
        };
        if !self.untrack_in_magazine(state, &live, address) {
            return Err(UnknownPointer);
        }
        let cache = match held {
            None if !self.stream_caches.any_open() => None,
            held => {
                let owner = state.cache_of(&live);
                match held.filter(|cache| cache.has_key(owner)) {
                    None => self.stream_caches.of(owner),
                    its => its,
                }
            }
        };
        match cache {
            Some(mut cache) => {
                if !cache.untrack(address) {
                    return Err(UnknownPointer);
                }
                if !cache.is_empty() {
                    cache.clear(&mut state.pool);
                    live = state.pool.find_live(address).ok_or(UnknownPointer)?;
                }
            }
            None => state
                .predictors
                .of(live.list)
                .on_free(address, live.requested),
        }
        if state.capture_users.is_empty() {
            state.pool.free_live(live);
        } else {
            self.free_used(state, address, live);
        }
        Ok(())
    }

    /// Frees a block that streams of a capture may use.
    #[cold]
    #[inline(never)]
    fn free_used(&self, state: &mut State, address: u64, live: LiveBlock) {
        let shared = state.pool.is_multi_stream(&live);
        let users = state.capture_users.remove(&address);
        state.pool.free_live(live);
        if shared && let Some(users) = users {
            self.defer_in_capture(state, &live, &users);
        }
    }

    /// Has the caches stop tracking a block in use, which is freed in another way. False if it is free: it is
    /// in a stream cache or magazine.
    fn untrack(&self, state: &mut State, live: &LiveBlock, address: u64) -> bool {
        let cache = self.stream_caches.of(state.cache_of(live));
        cache.is_none_or(|mut cache| cache.untrack(address))
            && self.untrack_in_magazine(state, live, address)
    }

    /// [`Device::untrack`] for magazines.
    #[inline]
    fn untrack_in_magazine(&self, state: &mut State, live: &LiveBlock, address: u64) -> bool {
        let holders = &mut state.depot.holders;
        !self.relaxed || self.magazines.untrack(live, address, holders)
    }
}

impl Device {
    /// Opens a device and retains its primary context. Reserves no memory but what `preallocate` asks for.
    pub(crate) fn open(
        functions: Functions,
        ordinal: i32,
        devices: i32,
        settings: &Settings,
    ) -> Result<Device, String> {
        let metadata = Metadata::new().ok_or(
            "the process may not have the 4 GiB of addresses that its lists need (ulimit -v, \
             vm.overcommit_memory)",
        )?;
        let properties = Arc::new(Properties::of(&functions, ordinal, devices)?);
        let ledger = Arc::new(Ledger::new());
        let limit_of_settings = settings.limit.map_or(u64::MAX, |limit| limit as u64);
        ledger.set_limit(limits::effective_limit(
            limit_of_settings,
            settings.per_process_memory_fraction,
            properties.total,
        ));
        if settings.expandable_segments && properties.granularity == 0 {
            message::print(&format!(
                "device {ordinal} ({}) cannot map memory: plain cudaMalloc segments are used there",
                properties.name
            ));
        }
        let policy = Policy {
            expandable: settings.expandable_segments,
            chunk: settings.chunk_size as u64,
            waits: settings.stream_waits,
            tuning: settings.tuning,
        };
        let total = properties.total;
        let wait_events = Arc::<Mutex<Events>>::default();
        let live_streams = Arc::<LiveStreams>::default();
        let gpu = DriverGpu::new(
            functions,
            properties.clone(),
            ledger.clone(),
            wait_events.clone(),
            live_streams.clone(),
        );
        let mut state = State {
            pool: Pool::new(gpu, policy, metadata),
            round_up: settings.round_up,
            uncached: false,
            blocks: HashMap::new(),
            predictors: Predictors::new(),
            private: PrivatePools::default(),
            suppliers: HashMap::new(),
            routes: Vec::new(),
            depot: Depot::new(total),
            capture_users: HashMap::new(),
            capture_reuse: CaptureReuse::new(settings.graph_capture_record_stream_reuse),
            history: History::default(),
            seen: (0, Duration::ZERO),
        };
        state.pool.event_log_mut().enable(history::is_noted());
        let ahead = settings.preallocate as u64;
        if ahead > 0 && state.pool.preallocate(ahead).is_err() {
            message::print(&format!(
                "preallocate has no effect on device {ordinal}: {} cannot be had there",
                Bytes(ahead)
            ));
            state.pool.trim_all(None);
        }
        Ok(Device {
            ordinal,
            functions,
            properties,
            ledger,
            limit_of_settings,
            fraction: AtomicU64::new(settings.per_process_memory_fraction.to_bits()),
            routed: AtomicBool::new(false),
            permanent: Box::default(),
            stream_caches: StreamCaches::new(),
            magazines: Magazines::new(total),
            relaxed: settings.free == Free::Relaxed,
            waits: CachePadded(SingleFlight::default()),
            wait_events,
            live_streams,
            telling: ReentrantMutex::default(),
            state: CachePadded(Lock::new(state)),
        })
    }

    /// The device's number.
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// The driver's name for the device.
    pub fn name(&self) -> &str {
        &self.properties.name
    }

    /// Bytes of memory that the device has.
    pub fn total_bytes(&self) -> u64 {
        self.properties.total
    }

    /// Which stream a handle means; the driver is asked, but for default streams.
    #[inline(always)]
    pub fn key(&self, stream: u64) -> StreamKey {
        let context = self.properties.context;
        stream_key(&self.functions, context, &self.permanent, stream)
    }

    /// Adds a permanent stream of this device (by handle), one that is never destroyed: the driver is asked
    /// for its id once more at most.
    pub fn add_permanent_stream(&self, stream: u64) {
        let context = self.properties.context;
        add_permanent_stream(&self.functions, context, &self.permanent, stream);
        self.add_stream(stream);
    }

    /// Adds a stream of this device (by handle), which is destroyed only after [`Device::remove_stream`].
    pub fn add_stream(&self, stream: u64) {
        let context = self.properties.context;
        if let Some(key) = created_stream(&self.functions, context, stream) {
            self.live_streams.add(key);
        }
    }

    /// Removes a stream (by handle) that is about to be destroyed: its events are recorded before.
    pub fn remove_stream(&self, stream: u64) {
        let created = LiveStreams::created().find(stream);
        if let Some(key) = self.live_streams.find(stream).or(created) {
            self.state.lock().pool.before_stream_destroy(key);
        }
        self.live_streams.remove(stream);
    }

    /// Records that another stream (by handle) uses the block, as PyTorch's `record_stream`: once freed, it
    /// is reused only after that stream's work up to then.
    pub fn record_use(&self, address: u64, stream: u64) -> Result<(), UnknownPointer> {
        let key = self.key(stream);
        let mut state = self.state.lock();
        if state.blocks.contains_key(&address) {
            // The driver waits for all work before it frees.
            return Ok(());
        }
        let live = state.pool.find_live(address).ok_or(UnknownPointer)?;
        if state.is_in_depot(&live) || !self.untrack(&mut state, &live, address) {
            return Err(UnknownPointer);
        }
        // A permanent stream is one of this device's.
        let context = self.properties.context;
        let foreign = || foreign_context(&self.functions, context, stream);
        let known = self.permanent.get(stream).is_some();
        if let Some(other) = (!known).then(foreign).flatten() {
            state.pool.add_foreign_stream(key);
            state.pool.gpu_mut().add_foreign_stream(key, other);
        }
        // Such a block is freed after its work, or behind all work of the device. The mark of a use by other
        // streams would make it a deferred block.
        if state.pool.owner_of(&live) == UNORDERED {
            return Ok(());
        }
        let recorded = match state.capture_reuse.reuse() {
            true => self.record_use_in_capture(&mut state, address, key),
            false => state.pool.record_use(address, key),
        };
        recorded.map_err(|_| UnknownPointer)
    }

    /// Locks the device and flushes its caches: every free block is in the pool or the depot, and the
    /// counters are up to date.
    fn lock_flushed(&self) -> Guard<'_, State> {
        let mut state = self.state.lock();
        self.flush_caches(&mut state);
        state
    }

    /// Empties the stream caches into the pool, and the magazines into the depot.
    fn flush_caches(&self, state: &mut State) {
        let State { depot, pool, .. } = state;
        self.stream_caches.clear_all(None, pool);
        self.magazines.empty(depot, pool);
    }

    /// Applies the settings that a running program may change. Blocks in use keep their sizes.
    pub(crate) fn apply_settings(&self, settings: &Settings) {
        // Cached blocks were rounded up by the old settings.
        let mut state = self.lock_flushed();
        state.round_up = settings.round_up;
        Device::set_capture_reuse(&mut state, settings.graph_capture_record_stream_reuse);
    }

    /// Walks the pool's invariants; for tests.
    pub fn check(&self) -> Result<(), String> {
        self.lock_flushed().pool.check().map_err(|broken| broken.0)
    }
}
