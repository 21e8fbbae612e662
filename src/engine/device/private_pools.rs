//! Private pools, those of PyTorch's CUDA graphs and `MemPool`s, and the routes that send allocations there.

use crate::core::{ArenaId, Pool, ReservedBytes, SHARED_ARENA};
use crate::device::driver_gpu::DriverGpu;
use crate::device::stream_key::is_capturing;
use crate::device::{Device, State};
use crate::util::message;
use crate::util::thread::thread_number;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// PyTorch's name for a private pool.
pub type PoolId = (u64, u64);

/// The allocator of a private pool's memory, if that is not the driver.
pub trait Supplier: Send + Sync {
    /// Allocates `bytes` bytes; `None` if there are none.
    fn allocate(&self, bytes: u64) -> Option<u64>;
    /// Frees what was allocated at this address. No work uses it any more.
    fn free(&self, address: u64);
}

/// Sends allocations to a private pool between [`Device::begin_pool`] and [`Device::end_pool`].
pub struct PoolRoute {
    /// The private pool's name.
    pub pool: PoolId,
    /// Whether an allocation on the stream (by handle) goes there. Called under the device's lock; may not
    /// allocate.
    pub filter: Box<dyn Fn(u64) -> bool + Send>,
}

/// A route in force.
pub struct ActiveRoute {
    pub route: PoolRoute,
    /// The number of the thread that began it.
    pub thread: u64,
    /// Whether its pool could be made.
    pub made: bool,
    /// Whether it serves a capture. `None`, which counts as yes, until an allocation has taken it.
    pub capture: Option<bool>,
    /// Blocks in use that the next allocations get, in this order: those of a restored checkpoint.
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
    /// The block of a restored checkpoint at this address.
    Restored(u64),
    /// The driver, without the pool (`uncached`).
    Driver,
    /// A private pool that could not be made.
    Nothing,
}

pub struct PrivatePool {
    pub arena: ArenaId,
    users: usize,
    /// Whether other allocations may have its free memory rather than run out.
    pub use_on_oom: bool,
    /// What allocates its memory, if that is not the driver.
    pub supplier: Option<Arc<dyn Supplier>>,
}

impl State {
    /// PyTorch's name for an arena's pool; (0, 0) for the shared arena, and for a pool that was released.
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

    /// Counts one more user of a private pool, which is made with this supplier if there is none of that
    /// name. False if it cannot be made.
    pub fn retain_pool(&mut self, pool: PoolId, supplier: Option<Arc<dyn Supplier>>) -> bool {
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

/// [`State::pool_at`] while another part of the state is borrowed.
pub fn pool_at(pool: &Pool<DriverGpu>, private: &PrivatePools, address: u64) -> PoolId {
    let mut names = private.names.iter();
    let owner = names.find(|(arena, _)| pool.is_of_arena(address, **arena));
    owner.map_or((0, 0), |(_, name)| *name)
}

impl Device {
    /// The private pools by their names, with the bytes that each has reserved.
    pub fn private_pool_bytes(&self) -> Vec<(PoolId, ReservedBytes)> {
        let state = self.lock_flushed();
        let pools = state.private.by_name.iter();
        pools
            .map(|(name, private)| (*name, state.pool.reserved_bytes(private.arena)))
            .collect()
    }

    /// Sets whether other allocations may have a private pool's free memory rather than run out.
    pub fn set_use_on_oom(&self, pool: PoolId, use_on_oom: bool) {
        let mut state = self.state.lock();
        if let Some(private) = state.private.get_mut(pool) {
            private.use_on_oom = use_on_oom;
        }
    }

    /// Has each block of a private pool take a whole segment from now on, if its memory comes from a supplier
    /// or cannot be mapped.
    pub fn set_no_split(&self, pool: PoolId) {
        let mut state = self.state.lock();
        if let Some(arena) = state.private(pool).map(|private| private.arena) {
            state.pool.use_whole_segments(arena);
        }
    }

    /// The users of a private pool; 0 if there is none of that name.
    pub fn pool_users(&self, pool: PoolId) -> usize {
        let state = self.state.lock();
        state.private(pool).map_or(0, |private| private.users)
    }

    /// Sends the allocations that the route's filter accepts to its private pool from now on. The pool is
    /// made if there is none of that name, and has one more user.
    pub fn begin_pool(&self, route: PoolRoute) {
        let mut state = self.state.lock();
        // If it cannot be made its allocations fail: a captured graph goes on using freed memory, which so
        // may not be any other arena's.
        let made = state.retain_pool(route.pool, None);
        state.routes.push(ActiveRoute {
            route,
            made,
            thread: thread_number(),
            capture: None,
            restored: VecDeque::new(),
        });
        self.update_routing(&mut state);
    }

    /// Ends a route to a private pool: the latest that this thread began, or if it began none, as a capture
    /// may end on another thread, the latest of all.
    pub fn end_pool(&self, pool: PoolId) {
        let mut state = self.state.lock();
        let thread = thread_number();
        let of_pool = |it: &ActiveRoute| it.route.pool == pool;
        let own = |it: &ActiveRoute| of_pool(it) && it.thread == thread;
        let ended = state.routes.iter().rposition(own);
        let ended = ended.or_else(|| state.routes.iter().rposition(of_pool));
        // Dropping the filter may call back: it is dropped after the lock.
        let route = ended.map(|at| state.routes.remove(at));
        self.update_routing(&mut state);
        drop(state);
        drop(route);
    }

    /// Counts one user of a private pool less. With the last one its free memory is released to the driver,
    /// and the rest once it is freed.
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
            // Dropping its supplier runs the program's code: after the lock.
            drop(state);
            drop(private);
        }
    }

    /// Where an allocation on the stream comes from while there are routes.
    #[cold]
    pub(super) fn route(&self, state: &mut State, stream: u64) -> Source {
        // Restored blocks come first. The filters of such routes ask the driver nothing.
        let mut restoring = state.routes.iter_mut().rev();
        let restoring = restoring.find(|it| !it.restored.is_empty() && (it.route.filter)(stream));
        if let Some(address) = restoring.and_then(|it| it.restored.pop_front()) {
            return Source::Restored(address);
        }
        if state.uncached {
            return Source::Driver;
        }
        // A filter queries the driver for the same, and would throw a C++ exception if it did not answer.
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

    /// To be called after routes have changed. Stream caches are bypassed while there are any. In a capture
    /// nothing may wait or query events; what was put off is done after it.
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
