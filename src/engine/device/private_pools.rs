//! Private pools, and which allocations go there: those of PyTorch's CUDA graphs and `MemPool`s.

use crate::core::{ArenaId, Pool, ReservedBytes, SHARED_ARENA};
use crate::device::driver_gpu::DriverGpu;
use crate::device::stream_key::is_capturing;
use crate::device::{Device, State, Supplier};
use crate::util::message;
use crate::util::thread::thread_number;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// PyTorch's name for a private pool.
pub type PoolId = (u64, u64);

/// Sends the allocations of some streams to a private pool, from its beginning to its end.
pub struct PoolRoute {
    /// The private pool.
    pub pool: PoolId,
    /// Whether an allocation on the stream (by handle) belongs to it. Called under the device's
    /// lock; may not allocate.
    pub filter: Box<dyn Fn(u64) -> bool + Send>,
}

/// A route in force.
pub struct ActiveRoute {
    pub route: PoolRoute,
    /// The thread that it was begun on.
    pub thread: u64,
    /// Its pool could be made.
    pub made: bool,
    /// Whether it serves a capture. Unknown, and so to be feared, until it has claimed something.
    pub capture: Option<bool>,
    /// Addresses that the next allocations get, in this order: blocks that are in use already.
    pub restored: VecDeque<u64>,
}

/// The private pools of a device, by name and by arena.
#[derive(Default)]
pub struct PrivatePools {
    by_name: BTreeMap<PoolId, PrivatePool>,
    names: HashMap<ArenaId, PoolId>,
}

impl PrivatePools {
    pub fn get(&self, pool: PoolId) -> Option<&PrivatePool> {
        self.by_name.get(&pool)
    }

    fn get_mut(&mut self, pool: PoolId) -> Option<&mut PrivatePool> {
        self.by_name.get_mut(&pool)
    }

    /// In the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = &PrivatePool> {
        self.by_name.values()
    }

    fn insert(&mut self, pool: PoolId, private: PrivatePool) {
        self.names.insert(private.arena, pool);
        self.by_name.insert(pool, private);
    }

    fn remove(&mut self, pool: PoolId) -> Option<PrivatePool> {
        let private = self.by_name.remove(&pool)?;
        self.names.remove(&private.arena);
        Some(private)
    }
}

/// Where an allocation comes from.
pub enum Source {
    Arena(ArenaId),
    /// It is met: this is its block.
    Restored(u64),
    /// From no pool.
    Driver,
    /// From a private pool that could not be made.
    Nothing,
}

pub struct PrivatePool {
    pub arena: ArenaId,
    users: usize,
    /// Others may have its memory rather than run out.
    pub use_on_oom: bool,
    /// Who supplies its memory, if that is not the driver.
    pub supplier: Option<Arc<dyn Supplier>>,
}

impl State {
    /// PyTorch's name for an arena; that of everybody's memory for a pool that was released.
    pub fn pool_of(&self, arena: ArenaId) -> PoolId {
        self.private.names.get(&arena).copied().unwrap_or((0, 0))
    }

    /// PyTorch's name for the pool that an address belongs to.
    pub fn pool_at(&self, address: u64) -> PoolId {
        pool_at(&self.pool, &self.private, address)
    }

    pub fn private(&self, pool: PoolId) -> Option<&PrivatePool> {
        self.private.get(pool)
    }

    /// One more user of a private pool, whose memory is supplied where a supplier is named and the pool is
    /// new. False where it cannot be made.
    pub fn retain(&mut self, pool: PoolId, supplier: Option<Arc<dyn Supplier>>) -> bool {
        if let Some(private) = self.private.get_mut(pool) {
            private.users += 1;
            return true;
        }
        let Some(arena) = self.pool.open_arena(supplier.is_some()) else {
            message::print("too many private pools: this one gets no memory");
            return false;
        };
        let private = PrivatePool {
            arena,
            users: 1,
            use_on_oom: false,
            supplier,
        };
        self.private.insert(pool, private);
        true
    }
}

/// [`State::pool_at`], for who has borrowed another part of the state.
pub fn pool_at(pool: &Pool<DriverGpu>, private: &PrivatePools, address: u64) -> PoolId {
    let mut names = private.names.iter();
    let owner = names.find(|(arena, _)| pool.is_of_arena(address, **arena));
    owner.map_or((0, 0), |(_, name)| *name)
}

impl Device {
    /// The private pools by their names, with the bytes that each holds from the driver.
    pub fn private_pool_bytes(&self) -> Vec<(PoolId, ReservedBytes)> {
        let state = self.lock_flushed();
        let pools = state.private.by_name.iter();
        pools
            .map(|(name, private)| (*name, state.pool.reserved_bytes(private.arena)))
            .collect()
    }

    /// Whether others may have a private pool's memory rather than run out.
    pub fn set_use_on_oom(&self, pool: PoolId, use_on_oom: bool) {
        let mut state = self.state.lock();
        if let Some(private) = state.private.get_mut(pool) {
            private.use_on_oom = use_on_oom;
        }
    }

    /// From now on a block of the private pool takes a whole segment, where its memory is supplied or cannot
    /// be mapped.
    pub fn set_no_split(&self, pool: PoolId) {
        let mut state = self.state.lock();
        if let Some(arena) = state.private(pool).map(|private| private.arena) {
            state.pool.use_whole_segments(arena);
        }
    }

    /// How many users the private pool has; 0 where there is none of that name.
    pub fn pool_users(&self, pool: PoolId) -> usize {
        let state = self.state.lock();
        state.private(pool).map_or(0, |private| private.users)
    }

    /// From now on allocations that the route's filter claims come from its private pool, which
    /// is made if there is none of that name. One more user of it is counted.
    pub fn begin_pool(&self, route: PoolRoute) {
        let mut state = self.state.lock();
        // Where it cannot be made, what the route claims is refused: a captured graph goes on using its
        // memory when it was freed, so that it may have nobody else's.
        let made = state.retain(route.pool, None);
        state.routes.push(ActiveRoute {
            route,
            made,
            thread: thread_number(),
            capture: None,
            restored: VecDeque::new(),
        });
        self.update_routing(&mut state);
    }

    /// No more allocations go to the private pool by its route: the latest that this thread began, or where
    /// it began none, as a capture may end on another thread, the latest of all.
    pub fn end_pool(&self, pool: PoolId) {
        let mut state = self.state.lock();
        let thread = thread_number();
        let of_pool = |it: &ActiveRoute| it.route.pool == pool;
        let own = |it: &ActiveRoute| of_pool(it) && it.thread == thread;
        let ended = state.routes.iter().rposition(own);
        let ended = ended.or_else(|| state.routes.iter().rposition(of_pool));
        // What the filter drops may call back; it goes after the lock.
        let route = ended.map(|at| state.routes.remove(at));
        self.update_routing(&mut state);
        drop(state);
        drop(route);
    }

    /// One user of the private pool less. With the last one its memory goes back to the driver,
    /// as far as it is free, and the rest when it is freed.
    pub fn release_pool(&self, pool: PoolId) {
        let mut state = self.state.lock();
        let Some(private) = state.private.get_mut(pool) else {
            return;
        };
        private.users -= 1;
        if private.users == 0 {
            let private = state.private.remove(pool);
            if let Some(private) = &private {
                state.pool.close_arena(private.arena);
            }
            // Its supplier may go with it, which is no code of ours.
            drop(state);
            drop(private);
        }
    }

    /// Where an allocation on the stream comes from while there are routes.
    #[cold]
    pub(super) fn routed(&self, state: &mut State, stream: u64) -> Source {
        // What is in place already is handed out whatever else holds now. Such routes' filters ask nothing
        // of the stream.
        let mut restoring = state.routes.iter_mut().rev();
        let restoring = restoring.find(|it| !it.restored.is_empty() && (it.route.filter)(stream));
        if let Some(address) = restoring.and_then(|it| it.restored.pop_front()) {
            return Source::Restored(address);
        }
        if state.uncached {
            return Source::Driver;
        }
        // A filter asks the same of the stream, and would throw a C++ exception where the driver
        // will not say.
        let capturing = is_capturing(&self.functions, self.properties.context, stream);
        let Some(capturing) = capturing else {
            return Source::Arena(SHARED_ARENA);
        };
        let Some(routed) = state
            .routes
            .iter_mut()
            .rev()
            .find(|it| (it.route.filter)(stream))
        else {
            return Source::Arena(SHARED_ARENA);
        };
        let (id, made) = (routed.route.pool, routed.made);
        if routed.capture.is_none() {
            routed.capture = Some(capturing);
            self.update_routing(state);
        }
        if capturing {
            self.reuse_joined(&mut state.capture_reuse, &mut state.pool, stream);
        }
        match made {
            true => Source::Arena(
                state
                    .private(id)
                    .map_or(SHARED_ARENA, |private| private.arena),
            ),
            false => Source::Nothing,
        }
    }

    /// Stream caches know nothing of routes, and are passed by while there are any. In a capture nothing
    /// may wait or ask; what was put off then is done after it.
    pub(super) fn update_routing(&self, state: &mut State) {
        let routed = state.uncached || !state.routes.is_empty();
        self.routed.store(routed, Relaxed);
        let capturing = state.routes.iter().any(|it| it.capture != Some(false));
        state.pool.gpu_mut().capturing = capturing;
        if !capturing {
            Device::clear_capture_reuse(state);
        }
        state.pool.trim_closing_arenas();
    }
}
