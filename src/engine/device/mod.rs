//! One device: its pool behind a lock.

mod capture_graph;
mod capture_reuse;
pub mod captures;
mod cuda_semantics;
mod depot;
pub(crate) mod driver_gpu;
pub mod exported;
pub mod external_cache;
mod figures;
pub mod history;
mod ipc_memory;
mod ledger;
pub mod live_streams;
mod magazine;
mod oom_report;
pub mod owner_hint;
mod permanent_streams;
mod pool_checkpoint;
mod private_pools;
mod snapshot;
pub mod spans;
mod stream_cache;
mod supplier;
mod uncached;

pub use cuda_semantics::MemoryInUse;
pub use driver_gpu::thread_number;
pub use figures::{Figures, set_torch_allocator};
pub use ipc_memory::IpcBlock;
pub use ledger::{Call, CallFigures};
pub use oom_report::OutOfMemory;
pub use permanent_streams::InsertOnlyMap;
pub use pool_checkpoint::NotRestored;
pub use private_pools::{PoolId, PoolRoute};
pub use supplier::Supplier;

use capture_reuse::{CaptureReuse, CaptureUsers};
use depot::Depot;
use magazine::Magazines;
use oom_report::Bytes;
use private_pools::{ActiveRoute, PrivatePools, Source};

use crate::core::{
    Allocated, ArenaId, BLOCK, Live, Metadata, Origin, Policy, Pool, Refusal, SHARED_ARENA,
    Shortage, StreamKey, UNORDERED,
};
use crate::device::driver_gpu::{
    DriverGpu, Events, Properties, add_permanent_stream, created_stream, foreign_context,
    is_capturing, stream_key,
};
use crate::device::ledger::Ledger;
use crate::device::live_streams::LiveStreams;
use crate::device::permanent_streams::PermanentStreams;
use crate::device::stream_cache::{CacheKey, Predictors, StreamCache, StreamCaches};
use crate::driver::Functions;
use crate::settings::{Free, RoundUp, Settings};
use crate::util::lock::{CachePadded, Guard, Lock};
use crate::util::message;
use crate::util::single_flight::SingleFlight;
use history::History;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Chunks given back before others get their turn at the device: a millisecond or so (H100).
const CHUNKS_AT_ONCE: usize = 32;

struct State {
    pool: Pool<DriverGpu>,
    round_up: RoundUp,
    /// Blocks come from the driver one by one; and those that did, with their sizes.
    uncached: bool,
    blocks: HashMap<u64, u64>,
    predictors: Predictors,
    private: PrivatePools,
    /// Who supplied which segment, by address.
    suppliers: HashMap<u64, Arc<dyn Supplier>>,
    routes: Vec<ActiveRoute>,
    /// Blocks that wait for no one stream.
    depot: Depot,
    /// Streams of one capture that use a block in use, where no others do.
    capture_users: HashMap<u64, CaptureUsers>,
    capture_reuse: CaptureReuse,
    history: History,
    /// How many blocks had ever been handed out and taken back when idle memory was last looked after,
    /// and since when it has been so many.
    seen: (u64, Duration),
}

impl State {
    /// Whether a block, which is in use to the pool, was set aside: of those of no stream's, what is marked as
    /// shared.
    fn is_deferred(&self, live: &Live) -> bool {
        self.pool.owner_of(live) == UNORDERED && self.pool.shares(live)
    }

    /// Which cache of a stream a block in use goes to.
    #[inline]
    fn cache_of(&self, live: &Live) -> CacheKey {
        CacheKey::of(self.pool.owner_of(live), self.pool.origin_of(live))
    }
}

/// One device and its pool. Any thread may call anything; calls on one device take turns.
pub struct Device {
    ordinal: i32,
    functions: Functions,
    properties: Arc<Properties>,
    ledger: Arc<Ledger>,
    /// The share of the device's memory that was set last; an `f64`.
    fraction: AtomicU64,
    /// Some allocations go to private pools.
    routed: AtomicBool,
    /// Streams that are never destroyed.
    permanent: Box<PermanentStreams>,
    stream_caches: StreamCaches,
    /// Blocks of no stream's that were freed without waiting.
    magazines: Magazines,
    /// `free:relaxed`: they are the only ones, and no stream cache is for them.
    relaxed: bool,
    waits: CachePadded<SingleFlight>,
    /// Events for waits for the whole device.
    wait_events: Arc<Mutex<Events>>,
    /// Streams of the device that exist.
    live_streams: Arc<LiveStreams>,
    state: CachePadded<Lock<State>>,
}

impl Drop for Device {
    fn drop(&mut self) {
        let state = self.state.0.get_mut();
        self.stream_caches.clear_all(None, &mut state.pool);
        state.pool.shut();
    }
}

/// A request, once it is known where its memory comes from.
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
    /// Takes up a device: its primary context is retained, no memory is taken yet.
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
        let mut limit = settings.limit.map_or(u64::MAX, |limit| limit as u64);
        if settings.per_process_memory_fraction < 1.0 {
            limit = limit.min(share(
                settings.per_process_memory_fraction,
                properties.total,
            ));
        }
        ledger.set_limit(limit);
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
        state.pool.journal_mut().keep(history::is_recorded());
        let ahead = settings.preallocate as u64;
        if ahead > 0 && state.pool.take_ahead(ahead).is_err() {
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
            fraction: AtomicU64::new(settings.per_process_memory_fraction.to_bits()),
            routed: AtomicBool::new(false),
            permanent: Box::default(),
            stream_caches: StreamCaches::new(),
            magazines: Magazines::new(total),
            relaxed: settings.free == Free::Relaxed,
            waits: CachePadded(SingleFlight::default()),
            wait_events,
            live_streams,
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

    /// Hands out `size` bytes that the stream (by handle) may use at once. Aligned to 512 bytes.
    ///
    /// Costs one lock that no other stream takes where the stream has just freed a block of the
    /// same size, else the device's lock, or both, and the pool's best fit.
    #[inline(always)]
    pub fn allocate(&self, size: usize, stream: u64) -> Result<u64, Box<OutOfMemory>> {
        self.allocate_along(size, self.key(stream), Origin::Allocator)
    }

    /// Which stream a handle means; the driver is asked, but for default streams.
    #[inline(always)]
    pub fn key(&self, stream: u64) -> StreamKey {
        let context = self.properties.context;
        stream_key(&self.functions, context, &self.permanent, stream)
    }

    /// The stream (by handle), which is one of this device's, is never destroyed: the driver is asked for
    /// it once more at most.
    pub fn add_permanent_stream(&self, stream: u64) {
        let context = self.properties.context;
        add_permanent_stream(&self.functions, context, &self.permanent, stream);
        self.add_stream(stream);
    }

    /// The stream (by handle), which is one of this device's, is destroyed only after
    /// [`Device::remove_stream`].
    pub fn add_stream(&self, stream: u64) {
        let context = self.properties.context;
        if let Some(key) = created_stream(&self.functions, context, stream) {
            self.live_streams.add(key);
        }
    }

    /// The stream (by handle) is about to be destroyed: what it did is looked after from now on without
    /// asking it.
    pub fn remove_stream(&self, stream: u64) {
        let created = LiveStreams::created().find(stream);
        if let Some(key) = self.live_streams.find(stream).or(created) {
            self.state.lock().pool.forget_stream(key);
        }
        self.live_streams.remove(stream);
    }

    /// [`Device::allocate`] for a stream that is known already, and for CUDA's functions: who calls them
    /// knows nothing of private pools, as a library does not that calls cudaMalloc while a thread's tensors
    /// go to one, and has figures of its own.
    #[inline(always)]
    pub fn allocate_on_stream(&self, size: usize, key: StreamKey) -> Result<u64, Box<OutOfMemory>> {
        self.allocate_along(size, key, Origin::Cuda)
    }

    #[inline(always)]
    fn allocate_along(
        &self,
        size: usize,
        key: StreamKey,
        origin: Origin,
    ) -> Result<u64, Box<OutOfMemory>> {
        match self.stream_caches.any_open() {
            true => self.allocate_by_cache(size, key, origin),
            false => self.allocate_without_cache(size, key, origin),
        }
    }

    #[inline(never)]
    fn allocate_by_cache(
        &self,
        size: usize,
        key: StreamKey,
        origin: Origin,
    ) -> Result<u64, Box<OutOfMemory>> {
        if !self.routed.load(Relaxed)
            && let Some(mut cache) = self.stream_caches.of(CacheKey::of(key, origin))
        {
            match cache.take(key, size as u64) {
                Some(address) => Ok(address),
                None => self.allocate_after_miss(cache, size, key, origin),
            }
        } else {
            self.allocate_without_cache(size, key, origin)
        }
    }

    #[inline(never)]
    fn allocate_after_miss(
        &self,
        cache: Guard<'_, StreamCache>,
        size: usize,
        key: StreamKey,
        origin: Origin,
    ) -> Result<u64, Box<OutOfMemory>> {
        // In this order a lock may only be tried.
        match self.state.try_lock() {
            Some(state) => self.allocate_from_pool(state, Some(cache), size, key, origin),
            None => {
                drop(cache);
                self.allocate_without_cache(size, key, origin)
            }
        }
    }

    #[inline(always)]
    fn allocate_without_cache(
        &self,
        size: usize,
        key: StreamKey,
        origin: Origin,
    ) -> Result<u64, Box<OutOfMemory>> {
        let state = self.state.lock();
        // None is opened or closed, and nothing routed, without this lock.
        match self.stream_caches.any_open() || self.routed.load(Relaxed) {
            false => {
                let request = Request {
                    size,
                    key,
                    origin,
                    arena: SHARED_ARENA,
                };
                self.allocate_from_arena(state, None, request, false)
            }
            true => {
                let cache = self.stream_caches.of(CacheKey::of(key, origin));
                self.allocate_from_pool(state, cache, size, key, origin)
            }
        }
    }

    /// With the stream's stream cache, if that is open.
    #[inline(never)]
    fn allocate_from_pool(
        &self,
        mut state: Guard<'_, State>,
        mut cache: Option<Guard<'_, StreamCache>>,
        size: usize,
        key: StreamKey,
        origin: Origin,
    ) -> Result<u64, Box<OutOfMemory>> {
        let arena = match self.routed.load(Relaxed) && origin == Origin::Allocator {
            false => SHARED_ARENA,
            true => match self.routed(&mut state, key.handle) {
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
        let others = self.stream_caches.any_besides(cache.as_deref());
        let request = Request {
            size,
            key,
            origin,
            arena,
        };
        self.allocate_from_arena(state, cache, request, others)
    }

    /// With the stream's stream cache, which is empty, if that is open; `others` tells whether any other is.
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
        let (requested, rounded) = (size as u64, state.round_up.round_up(size) as u64);
        let held = cache.as_deref();
        // To the pool a block on any stream cache is in use; no peak may count it.
        if others && state.pool.tally().would_peak(origin, rounded, requested) {
            self.stream_caches.clear_all(held, &mut state.pool);
        }
        let found = state
            .pool
            .allocate_free(rounded, requested, key, arena, origin);
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
                self.search(&mut state, held, &request, rounded)?
            }
        };
        let Allocated { address, list } = allocated;
        if arena == SHARED_ARENA && !state.pool.frees_at_once(rounded) {
            match cache {
                Some(cache) if cache.is_idle() => self.stream_caches.end(cache),
                Some(mut cache) => cache.track(key, address, requested, rounded),
                // Such memory has magazines instead.
                None if self.relaxed && key == UNORDERED => {}
                None if state.predictors.of(list).asked(address, requested) => {
                    if let Some(mut cache) = self.stream_caches.begin(key, origin) {
                        cache.track(key, address, requested, rounded);
                    }
                }
                None => {}
            }
        }
        Ok(address)
    }

    /// Nothing that is free fits: the stream caches are cleared (the stream's own is), and the pool goes up
    /// the ladder.
    #[cold]
    #[inline(never)]
    fn search(
        &self,
        state: &mut State,
        held: Option<&StreamCache>,
        request: &Request,
        rounded: u64,
    ) -> Result<Allocated, Box<OutOfMemory>> {
        self.stream_caches.clear_all(held, &mut state.pool);
        let tried = state.pool.tally().tried();
        let result = self.climb(state, request, rounded).map_err(|shortage| {
            self.out_of_memory(state, request.size as u64, shortage, request.arena)
        });
        if request.origin == Origin::Cuda {
            state.pool.tally_mut().tried_for_cuda(tried);
        }
        result
    }

    fn climb(
        &self,
        state: &mut State,
        request: &Request,
        rounded: u64,
    ) -> Result<Allocated, Shortage> {
        let &Request {
            size,
            key,
            origin,
            arena,
        } = request;
        let requested = size as u64;
        let mut result = state.pool.allocate(rounded, requested, key, arena, origin);
        // Other arenas may hold free memory to give back.
        let unsupplied = matches!(&result, Err(it) if matches!(it.refusal, Refusal::Unsupplied(_)));
        if !unsupplied && result.is_err() && state.pool.trim_all(Some(key)) > 0 {
            result = state.pool.allocate(rounded, requested, key, arena, origin);
        }
        let refused = |it: &Shortage| it.refusal == Refusal::OutOfMemory;
        if result.as_ref().is_err_and(refused) && external_cache::give_back() {
            result = state.pool.allocate(rounded, requested, key, arena, origin);
        }
        if result.is_err() && arena == SHARED_ARENA {
            // All that is free is idle now, if that could be waited for.
            let mut fallbacks = state.private.iter().filter(|it| it.use_on_oom);
            let pool = &mut state.pool;
            let block = fallbacks
                .find_map(|it| pool.allocate_free(rounded, requested, key, it.arena, origin));
            result = block.map_or(result, Ok);
        }
        result
    }

    /// Takes a block back. The stream that it was allocated on may have it again at once.
    /// `stream` is that stream's handle if the caller knows it: then it is quick to find.
    #[inline(always)]
    pub fn free(&self, address: u64, stream: u64) -> Result<(), UnknownPointer> {
        match self.stream_caches.any_open() {
            true => self.free_to_cache(address, CacheKey::of_handle(stream)),
            false => self.free_without_cache(address),
        }
    }

    /// The same, of a block that probably is on this owner's stream.
    #[inline(never)]
    fn free_to_cache(&self, address: u64, owner: CacheKey) -> Result<(), UnknownPointer> {
        match self.stream_caches.of(owner) {
            Some(mut cache) => match cache.put(address) {
                true => Ok(()),
                false => self.free_after_miss(cache, address),
            },
            None => self.free_without_cache(address),
        }
    }

    #[inline(never)]
    fn free_after_miss(
        &self,
        cache: Guard<'_, StreamCache>,
        address: u64,
    ) -> Result<(), UnknownPointer> {
        // In this order a lock may only be tried.
        match self.state.try_lock() {
            Some(state) => self.free_to_pool(state, Some(cache), address),
            None => {
                drop(cache);
                self.free_without_cache(address)
            }
        }
    }

    #[inline(always)]
    fn free_without_cache(&self, address: u64) -> Result<(), UnknownPointer> {
        self.free_to_pool(self.state.lock(), None, address)
    }

    /// The caller may have one stream cache locked.
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
        if !self.forget_in_magazine(state, &live, address) {
            return Err(UnknownPointer);
        }
        let cache = match held {
            None if !self.stream_caches.any_open() => None,
            held => {
                let owner = state.cache_of(&live);
                match held.filter(|cache| cache.belongs_to(owner)) {
                    None => self.stream_caches.of(owner),
                    its => its,
                }
            }
        };
        match cache {
            Some(mut cache) => {
                if !cache.forget(address) {
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
                .freed(address, live.requested),
        }
        if state.capture_users.is_empty() {
            state.pool.free_live(live);
        } else {
            self.free_used(state, address, live);
        }
        Ok(())
    }

    /// A block in use is not to come to its stream's stream cache or a thread's magazine any more. False where
    /// it lies there already, and so is not in use.
    fn forget(&self, state: &mut State, live: &Live, address: u64) -> bool {
        let cache = self.stream_caches.of(state.cache_of(live));
        cache.is_none_or(|mut cache| cache.forget(address))
            && self.forget_in_magazine(state, live, address)
    }

    #[inline]
    fn forget_in_magazine(&self, state: &mut State, live: &Live, address: u64) -> bool {
        let holders = &mut state.depot.holders;
        !self.relaxed || self.magazines.forget(live, address, holders)
    }

    /// Frees a block that was looked up, of which it may be known which streams of a capture use it.
    #[cold]
    #[inline(never)]
    fn free_used(&self, state: &mut State, address: u64, live: Live) {
        let shared = state.pool.shares(&live);
        let users = state.capture_users.remove(&address);
        state.pool.free_live(live);
        if shared && let Some(users) = users {
            self.defer_in_capture(state, &live, &users);
        }
    }

    /// Notes that another stream (by handle) uses the block: once freed, it is not used again
    /// before that stream's work up to then is done.
    pub fn record_use(&self, address: u64, stream: u64) -> Result<(), UnknownPointer> {
        let key = self.key(stream);
        let mut state = self.state.lock();
        if state.blocks.contains_key(&address) {
            // The driver waits for all work before it frees.
            return Ok(());
        }
        let live = state.pool.find_live(address).ok_or(UnknownPointer)?;
        if state.is_deferred(&live) || !self.forget(&mut state, &live, address) {
            return Err(UnknownPointer);
        }
        // A stream that lasts is one of this device's.
        let context = self.properties.context;
        let foreign = || foreign_context(&self.functions, context, stream);
        let known = self.permanent.get(stream).is_some();
        if let Some(other) = (!known).then(foreign).flatten() {
            state.pool.note_foreign(key);
            state.pool.gpu_mut().note_foreign(key, other);
        }
        // Such a block is given back by who has waited, or behind the whole device's work. To be marked as
        // shared would make it one that was set aside.
        if state.pool.owner_of(&live) == UNORDERED {
            return Ok(());
        }
        let recorded = match state.capture_reuse.reuse() {
            true => self.record_use_in_capture(&mut state, address, key),
            false => state.pool.record_use(address, key),
        };
        recorded.map_err(|_| UnknownPointer)
    }

    /// The state with every block that is not in use in the pool, or set aside behind the device's lock,
    /// and all counters up to date.
    fn lock_flushed(&self) -> Guard<'_, State> {
        let mut state = self.state.lock();
        self.flush_caches(&mut state);
        state
    }

    fn flush_caches(&self, state: &mut State) {
        let State { depot, pool, .. } = state;
        self.stream_caches.clear_all(None, pool);
        self.magazines.empty(depot, pool);
    }

    /// Gives every chunk that is wholly free back to the driver; waits for the device first where
    /// free memory may still be in use. Memory of private pools that are in use is kept. What the process
    /// keeps beside its pools goes back, too.
    pub fn empty_cache(&self) {
        external_cache::give_back();
        let mut state = self.lock_flushed();
        let waits = state.pool.tally().syncs;
        state.pool.trim_all(None);
        state.pool.gpu_mut().retry_pending_releases();
        // Counted as a wait even where there was nothing to wait for, as PyTorch's own allocator counts it.
        let tally = state.pool.tally_mut();
        tally.syncs = tally.syncs.max(waits + 1);
    }

    /// Gives back of its pool what nothing uses any more, as far as is known now. Never waits for the GPU.
    pub fn release_idle(&self) {
        let mut state = self.lock_flushed();
        let State { depot, pool, .. } = &mut *state;
        depot.give_back_passed(pool);
        pool.trim_idle();
        pool.gpu_mut().retry_pending_releases();
    }

    /// Looks after idle memory, as is to be done now and then: whole free chunks that nobody has used
    /// for `patience` go back to the driver. `now` is what a clock says that never goes back.
    /// Never waits for the GPU. True if it is to be called again at once: each call keeps the device
    /// locked only for a few chunks.
    pub fn purge_idle(&self, now: Duration, patience: Duration) -> bool {
        let mut state = self.lock_flushed();
        let seen = [Origin::Allocator, Origin::Cuda].map(|origin| {
            let of = &state.pool.counters_of(origin).all.allocation;
            of.allocated + of.freed
        });
        let seen = seen.iter().sum();
        if state.seen.0 != seen {
            state.seen = (seen, now);
        }
        let quiet_since = state.seen.1;
        let silent = now.saturating_sub(quiet_since) >= patience;
        // Nobody announces a capture on a stream that waits for the default one; that is asked.
        if silent && is_capturing(&self.functions, self.properties.context, 0) != Some(false) {
            return false;
        }
        let due = patience.saturating_add(if silent { quiet_since } else { now });
        let [now, due] = [now, due].map(|time| time.as_millis() as u64);
        state.pool.purge_idle(now, due, silent, CHUNKS_AT_ONCE)
    }

    /// Bytes of the block that starts at `address`, if it is in use.
    pub fn size_of(&self, address: u64) -> Option<u64> {
        let state = self.lock_flushed();
        let of_driver = || state.blocks.get(&address).copied();
        state.pool.size_of(address).or_else(of_driver)
    }

    /// Start and size of what the block that starts at `address`, if it is in use, is part of to CUDA.
    pub fn base_of(&self, address: u64) -> Option<(u64, u64)> {
        let state = self.lock_flushed();
        let of_driver = || Some((address, *state.blocks.get(&address)?));
        let size = match state.pool.size_of(address) {
            Some(size) => size,
            None => return of_driver(),
        };
        let backing = state.pool.backing(address)?;
        match (backing.mapped, state.pool.allocation_around(address)) {
            (false, _) => Some((backing.start, backing.bytes())),
            (true, Some(it)) if it.private => Some((it.found.start, it.found.size)),
            (true, _) => Some((address, size)),
        }
    }

    /// Bytes that were asked for the block that starts at `address`, if it is in use, and the handle of
    /// the stream that it is of.
    pub fn block_at(&self, address: u64) -> Option<(u64, u64)> {
        let state = self.state.lock();
        let of_driver = || state.blocks.get(&address).map(|size| (*size, 0));
        let live = state.pool.find_live(address);
        live.map(|live| (live.requested, state.pool.owner_of(&live).handle))
            .or_else(of_driver)
    }

    /// Bytes that a request for `size` bytes takes.
    pub fn rounded(&self, size: usize) -> u64 {
        let round_up = self.state.lock().round_up;
        (round_up.round_up(size) as u64).next_multiple_of(BLOCK)
    }

    /// Follows what a running program may change of its settings. Blocks in use keep their sizes.
    pub(crate) fn follow(&self, settings: &Settings) {
        // What lies on stream caches was rounded another way.
        let mut state = self.lock_flushed();
        state.round_up = settings.round_up;
        Device::set_capture_reuse(&mut state, settings.graph_capture_record_stream_reuse);
    }

    /// Bytes of the largest block that a request could get now, as far as can be told beforehand: the
    /// largest free range, or what the limit and the device leave to grow by.
    pub fn largest_obtainable(&self) -> u64 {
        let state = self.lock_flushed();
        let reserved = state.pool.counters().all.reserved_bytes.current;
        let device = state.pool.gpu().memory_info().map_or(0, |(free, _)| free);
        let limit = self.ledger.limit().saturating_sub(self.ledger.unpooled());
        let growth = device.min(limit.saturating_sub(reserved));
        growth.max(state.pool.largest_free())
    }

    /// Sets how many bytes may be held from the driver; `None` lifts the limit. What is held
    /// beyond it stays.
    pub fn set_limit(&self, bytes: Option<u64>) {
        self.ledger.set_limit(bytes.unwrap_or(u64::MAX));
    }

    /// The share of the device's memory that the pool may hold, as it was last set.
    pub fn memory_fraction(&self) -> f64 {
        f64::from_bits(self.fraction.load(Relaxed))
    }

    /// Limits the pool to a share of the device's memory, 0.0 to 1.0; 1.0 lifts the limit.
    pub fn set_memory_fraction(&self, fraction: f64) {
        self.fraction.store(fraction.to_bits(), Relaxed);
        let limit = (fraction < 1.0).then(|| share(fraction, self.properties.total));
        self.set_limit(limit);
    }

    /// The limit in bytes, if one is set.
    pub fn limit(&self) -> Option<u64> {
        Some(self.ledger.limit()).filter(|limit| *limit != u64::MAX)
    }

    /// Walks the pool's invariants; for tests.
    pub fn check(&self) -> Result<(), String> {
        self.lock_flushed().pool.check().map_err(|broken| broken.0)
    }
}

fn share(fraction: f64, total: u64) -> u64 {
    (total as f64 * fraction.clamp(0.0, 1.0)) as u64
}
