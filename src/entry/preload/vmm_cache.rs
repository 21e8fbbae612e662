//! A cache of the program's own mappings (`cuMemCreate`, `cuMemAddressReserve`, `cuMemMap` …), for programs that map
//! and unmap memory for each array, as newer releases of XLA do.
//!
//! The driver takes some 100 µs to map such memory and to unmap it again. So a mapping of one whole handle at
//! addresses reserved for it stays mapped when the program unmaps it, and the next identical request gets it: handle,
//! address, mapping and all. The driver's own unmapping fails a kernel that still uses the memory; here the device is
//! waited for before, which rarely takes time.
//!
//! A program tears a mapping down in three calls: unmap, release, free the addresses. Until the third it is not known
//! whether the mapping can be cached: a program may release memory to have less of it, and map other memory at the
//! addresses later. So nothing is cached until the program was seen once to free addresses right after releasing the
//! handle; and where the thread goes on with another call to the driver's memory, or asks about the mapping, the
//! teardown is passed on to the driver. Anything else that a program does with handles and addresses is the driver's,
//! and a mapping that it is done to, or that was exported, is not cached.

use super::abi::{AccessDesc, AllocationProp, DEVICE, PINNED};
use super::{driver_table, mutation, program_calls};
use concertina_engine::device::external_cache::{self, CHECKS};
use concertina_engine::device::thread_number;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// The most bytes that are cached, on all devices together, and the most mappings.
const MOST_BYTES: usize = 1 << 30;
const MOST_MAPPINGS: usize = 512;

/// Larger mappings are not cached: to write 256 MiB once takes as long as to map it (H100, 3 TB/s).
pub const LARGEST: usize = 256 << 20;

/// The most mappings that [`purge`] unmaps at once: some milliseconds.
const AT_ONCE: usize = 32;

/// Size and properties of a request. A cached mapping serves an equal request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    pub size: usize,
    pub properties: AllocationProp,
}

impl Kind {
    /// Whether such a mapping can be cached.
    pub fn is_plain(&self) -> bool {
        let AllocationProp {
            kind,
            location,
            unused,
            ..
        } = self.properties;
        kind == PINNED && location.kind == DEVICE && unused == 0 && self.size <= LARGEST
    }
}

/// The state of a mapping as the program sees it. To the driver it is mapped in every state.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Mapped.
    Mapped,
    /// Unmapped: the program has the handle and the addresses.
    Unmapped,
    /// The program has only the addresses. This thread released the handle, and has called nothing since.
    Released(u64),
    /// In the cache, since this check (see [`purge`]).
    Cached(u32),
    /// This thread got the handle from the cache, and reserves addresses next.
    Recreated(u64),
}

pub struct Mapping {
    pub kind: Kind,
    pub handle: u64,
    /// How often the program has to release the handle.
    pub holds: u32,
    /// Who has been given access.
    pub access: Vec<AccessDesc>,
    pub state: State,
}

#[derive(Default)]
pub struct MappingCache {
    /// Handles that are mapped nowhere yet.
    pub created: HashMap<u64, Kind>,
    /// Reserved addresses at which nothing is mapped yet, and their sizes.
    pub reserved: HashMap<u64, usize>,
    /// By address.
    pub all: BTreeMap<u64, Mapping>,
    /// Each handle's address.
    pub addresses: HashMap<u64, u64>,
    /// Addresses and sizes of those that are `Released`, `Recreated` and `Cached`, the oldest first.
    pub released: Vec<(u64, usize)>,
    pub recreated: Vec<(u64, usize)>,
    pub cached: Vec<(u64, usize)>,
    /// Bytes of the last.
    pub bytes: usize,
    /// Mappings that are not mapped to the program.
    pub unmapped: usize,
    pub checks: u32,
    /// The program gives addresses back right after the handle.
    pub frees_in_order: bool,
    /// The thread that gave a handle back last, and where it was mapped.
    pub last: Option<(u64, u64)>,
}

static CACHE: Mutex<Option<MappingCache>> = Mutex::new(None);
/// How many of them are not mapped to the program.
static UNMAPPED: AtomicUsize = AtomicUsize::new(0);

/// Runs `work` with the cache locked. The driver is called meanwhile, by functions that do not wait for the GPU (H100), and
/// nothing else is waited for.
pub fn with<T>(work: impl FnOnce(&mut MappingCache) -> T) -> T {
    let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    let cache = cache.get_or_insert_default();
    let result = work(cache);
    UNMAPPED.store(cache.unmapped, Relaxed);
    external_cache::set_bytes(cache.bytes as u64);
    result
}

/// What the program believes to be done long since: if the driver refuses it once, it is asked again.
fn retry_once(call: impl Fn() -> u32) {
    if call() != 0 {
        call();
    }
}

impl MappingCache {
    /// A cached mapping of this kind, the one cached last; its handle. The calling thread is to reserve addresses for
    /// it next.
    pub fn take_cached(&mut self, kind: Kind) -> Option<u64> {
        let mut newest_first = self.cached.iter().rev();
        let alike = |it: &&(u64, usize)| it.1 == kind.size && self.all[&it.0].kind == kind;
        let (address, _) = *newest_first.find(alike)?;
        external_cache::count_hit();
        self.set_state(address, State::Recreated(thread_number()));
        Some(self.all[&address].handle)
    }

    /// The driver was asked for a handle, and answered with `status`.
    pub fn created(&mut self, kind: Option<Kind>, handle: *const u64, status: u32) -> u32 {
        if let Some(kind) = kind.filter(|_| status == 0) {
            // SAFETY: the program's place for the handle, where the driver wrote it.
            self.created.insert(unsafe { *handle }, kind);
        }
        status
    }

    /// The mapping that the calling thread has been given the handle of, and that addresses of this size and
    /// alignment are reserved for.
    pub fn recreated_here(&self, size: usize, alignment: usize) -> Option<u64> {
        let (thread, alignment) = (thread_number(), alignment.max(1));
        let own = |address| self.all[&address].state == State::Recreated(thread);
        let aligned = |address| alignment.is_power_of_two() && address % alignment as u64 == 0;
        let mut of_size = self.recreated.iter().rev().filter(|it| it.1 == size);
        let fits = |it: &&(u64, usize)| aligned(it.0) && own(it.0);
        of_size.find(fits).map(|it| it.0)
    }

    /// The mapping around an address.
    pub fn mapping_around(&self, address: u64) -> Option<u64> {
        let (start, mapping) = self.all.range(..=address).next_back()?;
        (address - start < mapping.kind.size as u64).then_some(*start)
    }

    /// The handle is used in a way that ends caching of its mapping.
    pub fn expose(&mut self, handle: u64) {
        if let Some(address) = self.addresses.get(&handle).copied() {
            self.forget_mapping(address);
        }
    }

    /// The mapping with just these addresses, if it is in this state.
    pub fn exactly(&self, address: u64, size: usize, state: State) -> Option<&Mapping> {
        let mapping = self.all.get(&address)?;
        (mapping.kind.size == size && mapping.state == state).then_some(mapping)
    }

    /// Sets the state of a mapping.
    pub fn set_state(&mut self, address: u64, state: State) {
        let Some(mapping) = self.all.get_mut(&address) else {
            return;
        };
        let (before, size) = (
            std::mem::replace(&mut mapping.state, state),
            mapping.kind.size,
        );
        self.remove_from_list(address, before, size);
        self.unmapped += usize::from(state != State::Mapped);
        match state {
            State::Released(_) => self.released.push((address, size)),
            State::Recreated(_) => self.recreated.push((address, size)),
            State::Cached(_) => {
                self.cached.push((address, size));
                self.bytes += size;
            }
            State::Mapped | State::Unmapped => {}
        }
    }

    /// Removes a mapping of `size` bytes from the list of its state.
    pub fn remove_from_list(&mut self, address: u64, state: State, size: usize) {
        self.unmapped -= usize::from(state != State::Mapped);
        let list = match state {
            State::Released(_) => &mut self.released,
            State::Recreated(_) => &mut self.recreated,
            State::Cached(_) => {
                self.bytes -= size;
                &mut self.cached
            }
            State::Mapped | State::Unmapped => return,
        };
        list.retain(|it| it.0 != address);
    }

    /// Makes the driver see a mapping as the program does, and forgets it.
    pub fn forget_mapping(&mut self, address: u64) {
        let Some(mapping) = self.all.remove(&address) else {
            return;
        };
        let (handle, kind) = (mapping.handle, mapping.kind);
        self.addresses.remove(&handle);
        self.remove_from_list(address, mapping.state, kind.size);
        if mapping.state == State::Mapped {
            return;
        }
        retry_once(|| driver_table::call!(cuMemUnmap(address, kind.size)));
        match mapping.state {
            State::Released(_) | State::Cached(_) => {
                retry_once(|| driver_table::call!(cuMemRelease(handle)))
            }
            _ if mapping.holds == 1 => _ = self.created.insert(handle, kind),
            _ => {}
        }
        match mapping.state {
            State::Recreated(_) | State::Cached(_) => {
                retry_once(|| driver_table::call!(cuMemAddressFree(address, kind.size)));
            }
            _ => _ = self.reserved.insert(address, kind.size),
        }
    }

    /// [`Self::forget_mapping`] for all mappings with any of these addresses.
    pub fn forget_range(&mut self, address: u64, size: usize) {
        let end = address.saturating_add(size.max(1) as u64);
        let first = self.mapping_around(address).unwrap_or(address);
        let touched: Vec<u64> = self.all.range(first..end).map(|(it, _)| *it).collect();
        touched.into_iter().for_each(|it| self.forget_mapping(it));
    }

    /// The calling thread does something else than to give the addresses back.
    pub fn finish_teardowns(&mut self) {
        if !self.released.is_empty() {
            let thread = thread_number();
            self.finish_teardowns_of(|by| by == thread);
        }
    }

    /// [`Self::finish_teardowns`] for the threads that `is_meant` accepts.
    pub fn finish_teardowns_of(&mut self, is_meant: impl Fn(u64) -> bool) {
        if mutation::is_on("kept released") {
            return;
        }
        for (address, _) in self.released.clone() {
            if matches!(self.all[&address].state, State::Released(by) if is_meant(by)) {
                self.frees_in_order = false;
                self.forget_mapping(address);
            }
        }
    }

    /// Keeps a mapping of which the program has nothing any more, and no more of others than may be.
    pub fn add(&mut self, address: u64) {
        self.set_state(address, State::Cached(self.checks));
        if mutation::is_on("kept") {
            self.release_all();
        }
        while self.bytes > MOST_BYTES || self.cached.len() > MOST_MAPPINGS {
            self.forget_mapping(self.cached[0].0);
        }
    }

    /// What is cached goes back to the driver. False where there was nothing.
    pub fn release_all(&mut self) -> bool {
        let before = self.unmapped;
        self.finish_teardowns_of(|_| true);
        for (address, _) in self.cached.clone() {
            self.forget_mapping(address);
        }
        self.unmapped < before
    }
}

/// See [`external_cache::ExternalCache`].
pub fn release_all() -> bool {
    if UNMAPPED.load(Relaxed) == 0 || mutation::is_on("kept back") {
        return false;
    }
    let _inside = program_calls::enter();
    with(MappingCache::release_all)
}

/// See [`external_cache::ExternalCache`].
pub fn purge() {
    if UNMAPPED.load(Relaxed) == 0 {
        return;
    }
    let _inside = program_calls::enter();
    with(|cache| {
        cache.checks += 1;
        let checks = cache.checks;
        cache.finish_teardowns_of(|_| true);
        let is_idle = |address| matches!(cache.all[&address].state, State::Cached(since) if checks - since >= CHECKS);
        let cached = cache.cached.iter().map(|it| it.0);
        let idle: Vec<u64> = cached.filter(|it| is_idle(*it)).take(AT_ONCE).collect();
        idle.into_iter().for_each(|it| cache.forget_mapping(it));
    });
}

/// Nothing is known any more of what there is: a context ends.
pub fn forget_everything() {
    with(|cache| {
        cache.forget_range(0, usize::MAX);
        cache.created.clear();
        cache.reserved.clear();
    });
}

/// A question about an address: what the program has unmapped is not there. One relaxed load where nothing is
/// cached.
#[inline]
pub fn check_address(address: u64) {
    if UNMAPPED.load(Relaxed) > 0 && !mutation::is_on("kept asked") {
        check_unmapped(address);
    }
}

#[cold]
fn check_unmapped(address: u64) {
    with(|cache| {
        let at = cache.mapping_around(address);
        if let Some(at) = at.filter(|it| cache.all[it].state != State::Mapped) {
            cache.forget_mapping(at);
        }
    });
}

/// Bytes of the current device that are cached, and that the program can have. Teardowns that are not complete are
/// passed on to the driver first.
pub fn cached_bytes() -> u64 {
    let mut device = -1;
    if UNMAPPED.load(Relaxed) == 0 || driver_table::ask!(cuCtxGetDevice(&mut device)) != 0 {
        return 0;
    }
    with(|cache| {
        cache.finish_teardowns_of(|_| true);
        let kinds = cache.cached.iter().map(|it| cache.all[&it.0].kind);
        let here = kinds.filter(|kind| kind.properties.location.id == device);
        here.map(|kind| kind.size as u64).sum()
    })
}
