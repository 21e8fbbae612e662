//! PyTorch's allocator object, fitted from here.
//!
//! `torch::cuda::CUDAPluggableAllocator` has no hook for much of what PyTorch asks of an allocator:
//! it raises, or does nothing. Its virtual functions are exported, so each is looked for in the
//! object's table by its address; a copy of the table with our functions in those places is then put
//! into the object. What is not where it was looked for is left as it is, and named.

use super::exceptions::{Failure, raise};
use super::layouts::{DeviceStats, Figures, PoolMap, Pools, Release, Snapshot, Stats};
use super::symbols::{Library, member};
use super::tensors::{self, CxxStream, RAW_ALLOC, RAW_DELETE};
use super::{
    CUstream_st, allocate, concertina_begin_allocate_to_pool, concertina_empty_cache,
    concertina_end_allocate_to_pool, concertina_free, concertina_malloc,
    concertina_memory_fraction, concertina_pool_id, concertina_record_stream,
    concertina_release_pool, cxx_snapshot, each_device, ipc_tensors, memory_history, memory_stats,
    mempool_allocator, release, usable,
};
use crate::entry::panic_guard::guard;
use concertina_engine::core::{Counters, Flow};
use concertina_engine::process::allocator::is_uncached;
use concertina_engine::process::allocator::set_uncached;
use concertina_engine::process::stats::by_name;
use concertina_engine::settings::variable_text;
use concertina_engine::util::message;
use std::array;
use std::ffi::{CStr, c_double, c_int, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, Ordering::Relaxed};

/// Where in the table a function's place is.
enum Place {
    /// Where this function of `CUDAPluggableAllocator` stands.
    Of(&'static CStr),
    /// So many places into a stretch, where that is one of so many.
    Between(&'static Stretch, usize, &'static [usize]),
    /// As [`Of`], for a function that returns an object of a class. Ours take the room for it as their
    /// first argument, which is how it is passed on x86-64 and, say, not on AArch64.
    Returns(&'static CStr),
}
use Place::{Between, Of, Returns};

/// Functions without symbols, between two that have some. Both ends must be where they are known to be.
struct Stretch {
    /// Its first function, by its name in one release or another.
    from: &'static [&'static CStr],
    to: &'static CStr,
}

struct Slot {
    place: Place,
    /// `None` where PyTorch's own stays in this release.
    function: Option<*const ()>,
    /// What a program does without where it is missing, unless hooks do the same.
    loss: Option<&'static str>,
}

const EMPTY_CACHE: &CStr = member!("10emptyCacheESt4pairIyyE");
/// That of releases up to 2.7.
const EMPTY_ALL: &CStr = member!("10emptyCacheEv");
const RELEASE_POOL: &CStr = member!("11releasePoolEaSt4pairIyyE");
const MEMCPY_ASYNC: &CStr = member!("11memcpyAsyncEPviPKvimP11CUstream_stb");
const SHARE_IPC_HANDLE: &CStr = member!("14shareIpcHandleEPv");

/// Where it is that of 2.11.
pub const SNAPSHOT: &CStr = member!("8snapshotESt4pairIyyEb");

/// What there is to know of allocators' tables once one has been fitted.
struct Tables {
    /// Where the table of a `CUDAPluggableAllocator` begins: PyTorch's, and ours.
    begin: [usize; 2],
    /// The places of `raw_alloc` and `raw_delete`, in the tables of all allocators.
    raw: Option<(usize, usize)>,
    /// What was put into ours for functions with objects: the place, what PyTorch has there, and what a
    /// program does without it.
    objects: Vec<(&'static AtomicUsize, usize, Option<&'static str>)>,
}

static TABLES: OnceLock<Tables> = OnceLock::new();

/// How an allocator of PyTorch's allocates and frees; `None` where that is not known, or ends in
/// [`allocate`].
///
/// # Safety
/// `object` is a live `CUDAAllocator`.
pub unsafe fn raw_functions(object: *mut c_void) -> Option<(*const (), *const ())> {
    let tables = TABLES.get()?;
    let (alloc, delete) = tables.raw?;
    // SAFETY: an object begins with a pointer to its table, of which all classes of allocators share the
    // first part; a `CUDAPluggableAllocator` has the function that it allocates by as its second word.
    unsafe {
        let words = &*object.cast::<[AtomicUsize; 2]>();
        let table = words[0].load(Relaxed);
        let ours = [allocate as *const (), concertina_malloc as *const ()];
        if tables.begin.contains(&table) && ours.contains(&(words[1].load(Relaxed) as *const ())) {
            return None;
        }
        let table = table as *const *const ();
        Some((*table.add(alloc), *table.add(delete)))
    }
}

const POOLS: Stretch = Stretch {
    from: &[RELEASE_POOL],
    to: SHARE_IPC_HANDLE,
};

/// `enable` and `isEnabled`, behind one function or another, by release.
const SWITCH: Stretch = Stretch {
    from: &[
        member!("25getExpandableSegmentSizesEa"),
        EMPTY_CACHE,
        EMPTY_ALL,
        member!("17setMemoryFractionEda"),
    ],
    to: member!("9cacheInfoEaPm"),
};

/// `recordHistory` and what follows it.
const HISTORY: Stretch = Stretch {
    from: &[
        member!(
            "13recordHistoryEbPFSt10shared_ptrIN3c1015GatheredContextEEvEmNS4_22\
             CachingDeviceAllocator13RecordContextEbRKSt6vectorINSt7__cxx1112basic_stringIcSt11\
             char_traitsIcESaIcEEESaISH_EE"
        ),
        member!(
            "13recordHistoryEbPFSt10shared_ptrIN3c1015GatheredContextEEvEmNS4_4cuda20\
             CUDACachingAllocator13RecordContextEb"
        ),
        member!(
            "13recordHistoryEbPFSt10shared_ptrIN3c1015GatheredContextEEvEmNS4_4cuda20\
             CUDACachingAllocator13RecordContextE"
        ),
    ],
    to: member!("25attachOutOfMemoryObserverESt8functionIFvlmmmEE"),
};

const MEM_POOL: &str = "torch.cuda.MemPool";
const GRAPHS: &str = "CUDA graphs";
const STATISTICS: &str = "statistics for C++";
const FRACTION: &str = "the memory fraction";
const SWITCHING: &str = "torch.cuda.caching_allocator_enable";
const SHARING: &str = "torch.multiprocessing";
const NAMES: &str = "record_function in memory snapshots";
const SNAPSHOTS: &str = "memory snapshots for C++";

/// Functions that take and answer numbers and addresses alone, and `std::function`s, which are libstdc++'s:
/// right in every release that has them.
fn plain_slots() -> Vec<Slot> {
    let slot = |place, function, loss| Slot {
        place,
        function: Some(function),
        loss: Some(loss),
    };
    vec![
        slot(
            Of(member!("9cacheInfoEaPm")),
            cache_info as *const (),
            "torch.backends.cudnn.benchmark",
        ),
        slot(
            Of(member!("17getMemoryFractionEa")),
            get_memory_fraction as *const (),
            FRACTION,
        ),
        slot(
            Of(member!("17setMemoryFractionEda")),
            set_memory_fraction as *const (),
            FRACTION,
        ),
        slot(
            Of(member!("21resetAccumulatedStatsEa")),
            reset_accumulated_stats as *const (),
            STATISTICS,
        ),
        slot(
            Of(member!("14resetPeakStatsEa")),
            reset_peak_stats as *const (),
            STATISTICS,
        ),
        slot(
            Of(member!(
                "19beginAllocateToPoolEaSt4pairIyyESt8functionIFbP11CUstream_stEE"
            )),
            begin_allocate_to_pool as *const (),
            GRAPHS,
        ),
        slot(
            Of(member!("17endAllocateToPoolEaSt4pairIyyE")),
            end_allocate_to_pool as *const (),
            GRAPHS,
        ),
        slot(Of(RELEASE_POOL), release_pool as *const (), GRAPHS),
        slot(
            Of(MEMCPY_ASYNC),
            memcpy_async as *const (),
            "copies between GPUs that do not reach each other",
        ),
        slot(
            Between(&POOLS, 1, &[4, 5, 6]),
            get_pool_use_count as *const (),
            MEM_POOL,
        ),
        slot(Between(&SWITCH, 1, &[3]), enable as *const (), SWITCHING),
        slot(
            Between(&SWITCH, 2, &[3]),
            is_enabled as *const (),
            SWITCHING,
        ),
    ]
}

/// Functions with objects of PyTorch's classes, and those without symbols whose arguments changed: PyTorch's
/// own stay where a class is not known.
fn object_slots(release: Option<&Release>) -> Vec<Slot> {
    let slot = |place, function: Option<*const ()>, loss| Slot {
        place,
        function,
        loss: Some(loss),
    };
    let of_known = |function: *const ()| release.map(|_| function);
    let of_strings = |function: *const ()| release.filter(|it| it.strings).map(|_| function);
    let stats = release.map(|it| match it.device_stats {
        Stats::Plain => get_device_stats::<0, 0> as *const (),
        Stats::Rejections => get_device_stats::<0, 1> as *const (),
        Stats::ByPool => get_device_stats::<1, 1> as *const (),
    });
    let snapshot = release.and_then(|it| it.snapshot).map(|it| match it {
        Snapshot::Plain => cxx_snapshot::snapshot::<0, 0, 0> as *const (),
        Snapshot::Cached => cxx_snapshot::snapshot::<0, 2, 0> as *const (),
        Snapshot::Host => cxx_snapshot::snapshot::<0, 2, 2> as *const (),
        Snapshot::Internal => cxx_snapshot::snapshot::<1, 2, 2> as *const (),
    });
    let record = release.map(|it| match it.snapshot {
        Some(_) => cxx_snapshot::record_history as *const (),
        None => cxx_snapshot::follow_history as *const (),
    });
    let pools = release.map(|it| match it.pools {
        Pools::Bare => (retain_pool as *const (), lend_pool as *const ()),
        Pools::Address => (create_or_incref_pool as *const (), lend_pool as *const ()),
        Pools::Shared => (
            create_or_incref_pool as *const (),
            set_use_on_oom as *const (),
        ),
    });
    let empty = match release.map(|it| it.pools) {
        Some(Pools::Bare) => (EMPTY_ALL, empty_all as *const ()),
        _ => (EMPTY_CACHE, empty_cache as *const ()),
    };
    vec![
        slot(Of(empty.0), Some(empty.1), MEM_POOL),
        Slot {
            // What the hook does, too.
            loss: None,
            place: Of(member!(
                "12recordStreamERKN3c107DataPtrENS3_4cuda10CUDAStreamE"
            )),
            function: of_known(record_stream as *const ()),
        },
        slot(
            Between(&POOLS, 2, &[4, 5, 6]),
            pools.map(|it| it.0),
            MEM_POOL,
        ),
        slot(Between(&POOLS, 3, &[5, 6]), pools.map(|it| it.1), MEM_POOL),
        slot(
            Between(&POOLS, 4, &[6]),
            of_known(set_no_split as *const ()),
            MEM_POOL,
        ),
        slot(Between(&HISTORY, 0, &[2, 4, 6, 8]), record, NAMES),
        slot(
            Between(&HISTORY, 1, &[2, 4, 6, 8]),
            of_strings(memory_history::record_annotation as *const ()),
            NAMES,
        ),
        slot(
            Between(&HISTORY, 2, &[4, 6, 8]),
            of_strings(memory_history::push_compile_context as *const ()),
            NAMES,
        ),
        slot(
            Between(&HISTORY, 3, &[4, 6, 8]),
            of_known(memory_history::pop_compile_context as *const ()),
            NAMES,
        ),
        slot(Returns(member!("14getDeviceStatsEa")), stats, STATISTICS),
        slot(Returns(SNAPSHOT), snapshot, SNAPSHOTS),
        slot(
            Returns(SHARE_IPC_HANDLE),
            of_strings(ipc_tensors::share_ipc_handle as *const ()),
            SHARING,
        ),
        slot(
            Returns(member!(
                "12getIpcDevPtrENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
            )),
            of_strings(ipc_tensors::get_ipc_dev_ptr as *const ()),
            SHARING,
        ),
    ]
}

/// Words before the first function of a table: the object's offset, and its type.
const BEFORE: usize = 2;

/// `c10::cuda::CUDACachingAllocator::allocator`, a `std::atomic<CUDAAllocator*>`.
const CURRENT: &CStr = c"_ZN3c104cuda20CUDACachingAllocator9allocatorE";
const TABLE: &CStr = c"_ZTVN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocatorE";

/// PyTorch's present allocator, which is a `CUDAPluggableAllocator`.
pub struct Object {
    torch: Library,
    words: &'static [AtomicUsize; 6],
    /// Its table as PyTorch made it, with what comes before the first function.
    table: &'static [usize],
}

impl Object {
    /// `None` where PyTorch's allocator is another, or is not found where it was looked for.
    pub fn current() -> Option<Object> {
        let torch = Library::loaded(c"libtorch_cuda.so")?;
        let current = Library::loaded(c"libc10_cuda.so")?.symbol(CURRENT)?;
        let (table, bytes) = torch.object(TABLE)?;
        // SAFETY: the symbols are a pointer that PyTorch reads and writes atomically, and a constant
        // of so many bytes. Allocators and libraries live as long as the process. An object begins
        // with a pointer to its table's first function; one of this class is far larger than six
        // words.
        unsafe {
            let object = (*current.cast::<AtomicPtr<AtomicUsize>>()).load(Relaxed);
            let table =
                std::slice::from_raw_parts(table.cast::<usize>(), bytes / size_of::<usize>());
            let plain = table.as_ptr_range().start.wrapping_add(BEFORE) as usize;
            if object.is_null() || (*object).load(Relaxed) != plain {
                return None;
            }
            Some(Object {
                torch,
                words: &*object.cast::<[AtomicUsize; 6]>(),
                table,
            })
        }
    }

    /// Whether it allocates by [`allocate`]. What calls [`concertina_malloc`], since nobody was there
    /// to see it made, is turned to that.
    ///
    /// The first members are the `std::function`s that allocate and free, of four words each. PyTorch
    /// makes them from the address of a function, which is then the first word.
    pub fn is_ours(&self) -> bool {
        let turn = |word: &AtomicUsize, from: *const (), to: *const ()| {
            let turned = word.compare_exchange(from as usize, to as usize, Relaxed, Relaxed);
            turned.is_ok() || turned == Err(to as usize)
        };
        turn(
            &self.words[1],
            concertina_malloc as *const (),
            allocate as *const (),
        ) && turn(
            &self.words[5],
            concertina_free as *const (),
            release as *const (),
        )
    }

    /// The release of PyTorch that it is of, where its classes are known.
    pub fn release(&self) -> Option<&'static Release> {
        Release::loaded(self.table.len())
    }

    /// Puts our functions into its table. Answers what is missing.
    pub fn fit(&self) -> Vec<&'static str> {
        let mut table = self.table.to_vec();
        let mut missing = Vec::new();
        let release = self.release();
        let mut objects = Vec::new();
        let plain = plain_slots().into_iter().map(|slot| (slot, false));
        let with_objects = object_slots(release).into_iter().map(|slot| (slot, true));
        for (slot, has_objects) in plain.chain(with_objects) {
            match (self.place(&slot.place), slot.function) {
                (Some(at), Some(function)) => {
                    table[at] = function as usize;
                    if has_objects {
                        objects.push((at, slot.loss));
                    }
                }
                // A shorter stretch of a known release has no such function.
                (None, Some(_)) if release.is_some() && self.is_shorter(&slot.place) => {}
                _ => missing.extend(slot.loss.filter(|loss| !missing.contains(loss))),
            }
        }
        // All or none: PyTorch's own take back only what PyTorch's own handed out.
        let straight = release.map(|_| tensors::slots()).unwrap_or_default();
        let straight: Option<Vec<_>> = straight
            .into_iter()
            .map(|(name, function)| Some((self.place_of(name)?, function)))
            .collect();
        for (at, function) in straight.into_iter().flatten() {
            table[at] = function as usize;
        }
        // For as long as the process lives, as the object does.
        let table: Vec<AtomicUsize> = table.into_iter().map(AtomicUsize::new).collect();
        let table: &'static [AtomicUsize] = Box::leak(table.into_boxed_slice());
        let objects = objects.into_iter();
        let objects = objects.map(|(at, loss)| (&table[at], self.table[at], loss));
        let raw = self.place_of(RAW_ALLOC).zip(self.place_of(RAW_DELETE));
        if raw.is_none() {
            missing.push("allocators of a torch.cuda.MemPool's own");
        }
        let begin = [
            self.table[BEFORE..].as_ptr() as usize,
            table[BEFORE..].as_ptr() as usize,
        ];
        // Whoever sees the table sees what is in it.
        self.words[0].store(begin[1], Ordering::Release);
        let raw = raw.map(|(alloc, delete)| (alloc - BEFORE, delete - BEFORE));
        // The first to be fitted is the one that stays PyTorch's.
        let _ = TABLES.set(Tables {
            begin,
            raw,
            objects: objects.collect(),
        });
        enable(ptr::null_mut(), true);
        missing
    }

    fn place(&self, place: &Place) -> Option<usize> {
        match place {
            Of(name) => self.place_of(name),
            Returns(name) if cfg!(target_arch = "x86_64") => self.place_of(name),
            Returns(_) => None,
            Between(stretch, after, lengths) => {
                let mut stretches = self.stretches(stretch);
                let (start, _) = stretches.find(|(_, length)| lengths.contains(length))?;
                Some(start + after)
            }
        }
    }

    /// Whether a stretch is there, and too short for this place.
    fn is_shorter(&self, place: &Place) -> bool {
        let Between(stretch, _, lengths) = place else {
            return false;
        };
        let mut found = self.stretches(stretch).peekable();
        found.peek().is_some() && found.all(|(_, length)| lengths.iter().all(|it| length < *it))
    }

    /// Where a stretch may begin, and how long it is then.
    fn stretches(&self, stretch: &Stretch) -> impl Iterator<Item = (usize, usize)> {
        let end = self.place_of(stretch.to);
        let starts = stretch.from.iter().filter_map(|name| self.place_of(name));
        starts.filter_map(move |start| Some((start, end?.checked_sub(start)?)))
    }

    /// The one place in the table that has the function of this name.
    fn place_of(&self, name: &CStr) -> Option<usize> {
        let function = self.torch.symbol(name)? as usize;
        let is_it = |word: &usize| *word == function;
        let functions = &self.table[BEFORE..];
        let at = functions.iter().position(is_it)?;
        let once = functions.iter().rposition(is_it) == Some(at);
        once.then_some(BEFORE + at)
    }

    /// Its address.
    pub fn address(&self) -> *mut c_void {
        ptr::from_ref(self.words).cast_mut().cast()
    }
}

// ---- the functions: `this` comes first, and a device is a signed byte ---------------------------

type This = *mut c_void;

extern "C-unwind" fn empty_cache(_: This, pool: concertina_pool_id) {
    // What is free in a private pool may belong to a graph that will be replayed: it goes back when
    // the pool is released.
    if (pool.graph, pool.user) == (0, 0) {
        concertina_empty_cache();
    }
    // No guard: an allocator of the program's may throw.
    each_device(|device| device.return_supplied());
}

extern "C-unwind" fn empty_all(this: This) {
    empty_cache(this, concertina_pool_id { graph: 0, user: 0 });
}

/// PyTorch's variable turns caching off for good, whatever the program says.
extern "C" fn enable(_: This, caching: bool) {
    const NEVER: &str = "PYTORCH_NO_CUDA_MEMORY_CACHING";
    guard((), || {
        set_uncached(!caching || variable_text(NEVER).is_some())
    });
}

extern "C" fn is_enabled(_: This) -> bool {
    !is_uncached()
}

/// The largest block that cuDNN may try to work with.
extern "C" fn cache_info(_: This, device: i8, largest: *mut usize) {
    let bytes = guard(0, || {
        usable(device.into()).map_or(0, |it| it.largest_obtainable())
    });
    if !largest.is_null() {
        // SAFETY: the caller vouches for a size_t behind a pointer that is not null.
        unsafe { *largest = (*largest).max(bytes as usize) };
    }
}

extern "C" fn get_memory_fraction(_: This, device: i8) -> c_double {
    memory_stats::fraction(device.into())
}

extern "C" fn set_memory_fraction(_: This, fraction: c_double, device: i8) {
    concertina_memory_fraction(fraction, device.into());
}

/// The statistics as PyTorch's class; `None` where there is no libstdc++ for what is in it.
fn device_stats<const BY_POOL: usize, const REJECTIONS: usize>(
    counters: &Counters,
) -> Option<DeviceStats<BY_POOL, REJECTIONS>> {
    let pools = [&counters.all, &counters.small, &counters.large].map(by_name);
    let figure =
        |flow: &Flow| [flow.current, flow.peak, flow.allocated, flow.freed].map(|it| it as i64);
    let figures = |at: usize| -> Figures { array::from_fn(|pool| figure(pools[pool][at].1)) };
    let maps: Option<Vec<PoolMap>> = (0..BY_POOL).map(|_| PoolMap::empty()).collect();
    Some(DeviceStats {
        usage: array::from_fn(figures),
        // Python is told of pools by `attach.py`.
        reserved_bytes_by_private_pools: maps?.try_into().ok()?,
        more_usage: array::from_fn(|at| figures(6 + at)),
        num_alloc_retries: counters.alloc_retries as i64,
        num_ooms: counters.ooms as i64,
        // No block is kept from being split.
        oversize_allocations: [0; 4],
        oversize_segments: [0; 4],
        num_sync_all_streams: counters.syncs as i64,
        num_device_alloc: counters.device_allocs as i64,
        num_device_free: counters.device_frees as i64,
        // Nothing is refused ahead of time.
        num_oom_rejections: [0; REJECTIONS],
        max_split_size: -1,
    })
}

unsafe extern "C-unwind" fn get_device_stats<const BY_POOL: usize, const REJECTIONS: usize>(
    result: *mut DeviceStats<BY_POOL, REJECTIONS>,
    _: This,
    device: i8,
) -> *mut DeviceStats<BY_POOL, REJECTIONS> {
    let made = guard(None, || {
        device_stats(&memory_stats::counters(device.into()))
    });
    match made {
        Some(mut made) => {
            if NUMBERED.load(Relaxed) {
                made.number();
            }
            // SAFETY: the caller's room.
            unsafe { result.write(made) }
        }
        // SAFETY: PyTorch, which called, lets exceptions through.
        None => unsafe {
            raise(Failure::Other("libstdc++ is not to be found".into()));
        },
    }
    result
}

/// While it is set, [`get_device_stats`] answers with a number of its own for each figure.
static NUMBERED: AtomicBool = AtomicBool::new(false);

/// Until it says that that is over, statistics for C++ are the numbers from 1000 on, in their order: how
/// PyTorch reads them shows whether its class is laid out as ours.
pub extern "C" fn number_stats(begins: bool) {
    NUMBERED.store(begins, Relaxed);
}

/// PyTorch's own functions with objects are put back, as its classes turn out to be others than those of its
/// release.
pub extern "C" fn withdraw_objects() {
    guard((), || {
        let mut missing = Vec::new();
        for (place, theirs, loss) in TABLES.get().into_iter().flat_map(|it| &it.objects) {
            place.store(*theirs, Relaxed);
            missing.extend(loss.filter(|loss| !missing.contains(loss)));
        }
        if !missing.is_empty() {
            message::print(&format!(
                "this PyTorch's classes are not those of its release; what works as under any \
                 pluggable allocator only: {}",
                missing.join(", ")
            ));
        }
    });
}

impl<const BY_POOL: usize, const REJECTIONS: usize> DeviceStats<BY_POOL, REJECTIONS> {
    fn number(&mut self) {
        let usage = self.usage.iter_mut().chain(&mut self.more_usage);
        let figures = usage.flatten().flatten();
        let figures = figures
            .chain([&mut self.num_alloc_retries, &mut self.num_ooms])
            .chain(&mut self.oversize_allocations)
            .chain(&mut self.oversize_segments)
            .chain([
                &mut self.num_sync_all_streams,
                &mut self.num_device_alloc,
                &mut self.num_device_free,
            ])
            .chain(&mut self.num_oom_rejections)
            .chain([&mut self.max_split_size]);
        for (figure, number) in figures.zip(1000..) {
            *figure = number;
        }
    }
}

extern "C" fn reset_accumulated_stats(_: This, device: i8) {
    memory_stats::reset_accumulated(device.into());
}

extern "C" fn reset_peak_stats(_: This, device: i8) {
    memory_stats::reset_peaks(device.into());
}

/// `data` is a `c10::DataPtr`, whose first word is the address.
unsafe extern "C-unwind" fn record_stream(_: This, data: *const *mut c_void, stream: CxxStream) {
    if let Some(handle) = tensors::handle_of(stream) {
        // SAFETY: the caller vouches for the reference.
        unsafe { concertina_record_stream(*data, handle) };
    }
}

unsafe extern "C" fn begin_allocate_to_pool(
    _: This,
    device: i8,
    pool: concertina_pool_id,
    filter: *const c_void,
) {
    // SAFETY: the caller passes a `std::function` as C++ passes one by value: by its address.
    unsafe { concertina_begin_allocate_to_pool(device.into(), pool, filter) };
}

extern "C" fn end_allocate_to_pool(_: This, device: i8, pool: concertina_pool_id) {
    concertina_end_allocate_to_pool(device.into(), pool);
}

extern "C" fn release_pool(_: This, device: i8, pool: concertina_pool_id) {
    concertina_release_pool(device.into(), pool);
}

extern "C" fn get_pool_use_count(_: This, device: i8, pool: concertina_pool_id) -> c_int {
    guard(0, || {
        usable(device.into()).map_or(0, |it| it.pool_users((pool.graph, pool.user)) as c_int)
    })
}

type MemcpyAsync = unsafe extern "C-unwind" fn(
    This,
    *mut c_void,
    c_int,
    *const c_void,
    c_int,
    usize,
    *mut CUstream_st,
    bool,
) -> c_int;

/// Mapped memory of a device that `stream`'s cannot reach is copied by the call that names both.
unsafe extern "C-unwind" fn memcpy_async(
    this: This,
    to: *mut c_void,
    to_device: c_int,
    from: *const c_void,
    from_device: c_int,
    bytes: usize,
    stream: *mut CUstream_st,
    reachable: bool,
) -> c_int {
    type Peer = unsafe extern "C-unwind" fn(
        *mut c_void,
        c_int,
        *const c_void,
        c_int,
        usize,
        *mut CUstream_st,
    ) -> c_int;
    static FUNCTIONS: OnceLock<Option<(MemcpyAsync, Peer)>> = OnceLock::new();
    let functions = FUNCTIONS.get_or_init(|| {
        let torch = Library::loaded(c"libtorch_cuda.so")?;
        let (plain, peer) = (
            torch.symbol(MEMCPY_ASYNC)?,
            torch.symbol(c"cudaMemcpyPeerAsync")?,
        );
        // SAFETY: the mangled name says what the first takes, CUDA's header what the second does;
        // both answer a `cudaError_t`.
        Some(unsafe {
            (
                transmute::<*mut c_void, MemcpyAsync>(plain),
                transmute::<*mut c_void, Peer>(peer),
            )
        })
    });
    /// `cudaErrorNotSupported`.
    const NOT_SUPPORTED: c_int = 801;
    // SAFETY: the arguments are the caller's, handed on.
    unsafe {
        match functions {
            Some((_, peer)) if to_device != from_device && !reachable => {
                peer(to, to_device, from, from_device, bytes, stream)
            }
            Some((plain, _)) => plain(
                this,
                to,
                to_device,
                from,
                from_device,
                bytes,
                stream,
                reachable,
            ),
            None => NOT_SUPPORTED,
        }
    }
}

/// A pool with an allocator of its own has its memory from there.
unsafe extern "C" fn create_or_incref_pool(
    _: This,
    device: i8,
    pool: concertina_pool_id,
    allocator: *const c_void,
) {
    guard((), || {
        if let Some(device) = usable(device.into()) {
            // SAFETY: as PyTorch passed it.
            device.retain_pool((pool.graph, pool.user), unsafe {
                mempool_allocator::of(allocator)
            });
        }
    });
}

extern "C" fn set_use_on_oom(_: This, device: i8, pool: concertina_pool_id, lent: bool) {
    guard((), || {
        if let Some(device) = usable(device.into()) {
            device.set_use_on_oom((pool.graph, pool.user), lent);
        }
    });
}

/// The same where there is no flag, and pools always lend.
extern "C" fn lend_pool(this: This, device: i8, pool: concertina_pool_id) {
    set_use_on_oom(this, device, pool, true);
}

/// [`create_or_incref_pool`] where pools have no allocator of their own.
extern "C" fn retain_pool(this: This, device: i8, pool: concertina_pool_id) {
    // SAFETY: there is no allocator.
    unsafe { create_or_incref_pool(this, device, pool, ptr::null()) };
}

extern "C" fn set_no_split(_: This, device: i8, pool: concertina_pool_id) {
    guard((), || {
        if let Some(device) = usable(device.into()) {
            device.set_no_split((pool.graph, pool.user));
        }
    });
}
