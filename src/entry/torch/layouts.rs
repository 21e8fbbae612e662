//! Layouts of PyTorch's classes, by release.
//!
//! They are those of `c10/core/CachingDeviceAllocator.h` and `c10/cuda/CUDACachingAllocator.h`; where a
//! release has more members than the one before, a const parameter is the length of an array, 0 or more, in
//! their place. `tests/torch/layouts.py` compiles the headers of a release and compares.
//!
//! A virtual function with arguments or a result of these classes is replaced only where the release is one
//! of [`RELEASES`]: with another layout, memory beyond an object's end would be written.

use super::cxx::{self, CxxString, CxxVector, SharedPointer};
use super::symbols::{Library, member};
use std::ffi::{CStr, c_void};
use std::mem::transmute;
use std::ptr;

/// A release whose classes are known.
#[derive(Debug)]
pub struct Release {
    /// Its major and its minor number.
    pub version: (u8, u8),
    /// Words of the virtual function table of `CUDAPluggableAllocator`.
    words: usize,
    /// A symbol of a library that no later release in the list has, of those with a table of this length.
    symbol: (&'static CStr, &'static CStr),
    /// Whether `std::string` is that of GCC 5 and later.
    pub strings: bool,
    pub device_stats: Stats,
    /// `None` where there are no snapshots for C++.
    pub snapshot: Option<Snapshot>,
    /// What `setUseOnOOM` and `createOrIncrefPool` take.
    pub pools: Pools,
}

/// The layouts of `DeviceStats`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stats {
    /// As in 2.6.
    Plain,
    /// With `num_oom_rejections`.
    Rejections,
    /// With a map of private pools besides.
    ByPool,
}

/// The layouts of `SnapshotInfo` and of what is in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Snapshot {
    /// As in 2.11.
    Plain,
    /// Two more numbers in the configuration.
    Cached,
    /// Memory of the host besides.
    Host,
    /// Entries have a text of the allocator's own besides.
    Internal,
}

/// Arguments of the functions for private pools, which have no symbols to tell them by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pools {
    /// No allocator; there is no `setUseOnOOM`.
    Bare,
    /// The allocator by its address; `setUseOnOOM` has no flag.
    Address,
    /// The allocator by a `std::shared_ptr`; `setUseOnOOM` has a flag.
    Shared,
}

const TORCH: &CStr = c"libtorch_cuda.so";
const C10: &CStr = c"libc10_cuda.so";

const OLD_STRING: (&CStr, &CStr) = (TORCH, member!("12getIpcDevPtrESs"));
const NEW_STRING: (&CStr, &CStr) = (
    TORCH,
    member!("12getIpcDevPtrENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"),
);
const OF_A_POOL: (&CStr, &CStr) = (TORCH, member!("8snapshotESt4pairIyyE"));
/// `snapshot` from 2.11 on.
pub const SNAPSHOT: &CStr = member!("8snapshotESt4pairIyyEb");
const WITH_TRACES: (&CStr, &CStr) = (TORCH, SNAPSHOT);
const REJECTIONS: (&CStr, &CStr) = (
    TORCH,
    member!("26attachOomRejectionObserverESt8functionIFvlmmmEE"),
);
const SEGMENTS_COUNT: (&CStr, &CStr) = (
    C10,
    c"_ZN3c104cuda20CUDACachingAllocator26getExpandableSegmentsCountEv",
);

macro_rules! releases {
    ($($major:literal.$minor:literal: $words:literal $symbol:ident $strings:literal $stats:ident
        $snapshot:expr, $pools:ident;)*) => {
        /// Of two with the same number of words, the first that has its symbol.
        const RELEASES: &[Release] = &[$(Release {
            version: ($major, $minor),
            words: $words,
            symbol: $symbol,
            strings: $strings,
            device_stats: Stats::$stats,
            snapshot: $snapshot,
            pools: Pools::$pools,
        },)*];
    };
}

releases! {
    2 . 6: 43 OLD_STRING false Plain None, Bare;
    2 . 7: 43 NEW_STRING true Plain None, Bare;
    2 . 8: 46 OF_A_POOL true Plain None, Address;
    2 . 9: 47 OF_A_POOL true Plain None, Address;
    2 . 10: 52 OF_A_POOL true Plain None, Address;
    2 . 11: 52 WITH_TRACES true Plain Some(Snapshot::Plain), Shared;
    2 . 12: 54 REJECTIONS true Rejections Some(Snapshot::Plain), Shared;
    2 . 13: 57 REJECTIONS true ByPool Some(Snapshot::Cached), Shared;
    2 . 15: 59 SEGMENTS_COUNT true ByPool Some(Snapshot::Internal), Shared;
    2 . 14: 59 REJECTIONS true ByPool Some(Snapshot::Host), Shared;
}

impl Release {
    /// The release that the process has loaded, given the words of its table. `None` where it is not in the
    /// list.
    pub fn loaded(words: usize) -> Option<&'static Release> {
        Release::find(words, stated_version(), |library, symbol| {
            Library::loaded(library).is_some_and(|it| it.symbol(symbol).is_some())
        })
    }

    /// The release with this table and symbols. One that states its version (from 2.9 on) has to be that one:
    /// a later release may have the same table and other classes.
    fn find(
        words: usize,
        stated: Option<(u8, u8)>,
        has: impl Fn(&CStr, &CStr) -> bool,
    ) -> Option<&'static Release> {
        let found = RELEASES
            .iter()
            .find(|it| it.words == words && has(it.symbol.0, it.symbol.1))?;
        stated
            .is_none_or(|stated| stated == found.version)
            .then_some(found)
    }
}

/// The release as PyTorch states it to extensions, from 2.9 on.
fn stated_version() -> Option<(u8, u8)> {
    type Version = unsafe extern "C" fn() -> u64;
    let function = Library::loaded(c"libtorch_cpu.so")?.symbol(c"aoti_torch_abi_version")?;
    // SAFETY: PyTorch's header has it take nothing and answer a number, of a byte for each part.
    let [major, minor, ..] = unsafe { transmute::<*mut c_void, Version>(function)() }.to_be_bytes();
    Some((major, minor))
}

// ---- the classes --------------------------------------------------------------------------------

/// `c10::CachingAllocator::Stat`: current, peak, allocated, freed.
pub type Figure = [i64; 4];

/// `c10::CachingAllocator::StatArray`: of all memory, of the small and of the large pool.
pub type Figures = [Figure; 3];

/// `c10::CachingDeviceAllocator::DeviceStats`.
#[repr(C)]
pub struct DeviceStats<const BY_POOL: usize, const REJECTIONS: usize> {
    /// `allocation` to `reserved_bytes`.
    pub usage: [Figures; 6],
    pub reserved_bytes_by_private_pools: [PoolMap; BY_POOL],
    /// `active_bytes` to `requested_bytes`.
    pub more_usage: [Figures; 3],
    pub num_alloc_retries: i64,
    pub num_ooms: i64,
    pub oversize_allocations: Figure,
    pub oversize_segments: Figure,
    pub num_sync_all_streams: i64,
    pub num_device_alloc: i64,
    pub num_device_free: i64,
    pub num_oom_rejections: [i64; REJECTIONS],
    pub max_split_size: i64,
}

const _: () = assert!(size_of::<DeviceStats<0, 0>>() == 976);
const _: () = assert!(size_of::<DeviceStats<0, 1>>() == 984);
const _: () = assert!(size_of::<DeviceStats<1, 1>>() == 1016);

/// `ska::flat_hash_map<c10::MempoolId_t, StatArray, c10::MempoolIdHash>`, an empty one. PyTorch
/// frees its entries.
#[repr(C)]
pub struct PoolMap {
    entries: *mut c_void,
    slots_but_one: u64,
    hash_policy: i8,
    max_lookups: i8,
    max_load_factor: f32,
    count: u64,
}

/// An entry of such a map. `distance` is how far it is from the slot of its hash, negative for an empty one.
#[repr(C)]
struct PoolEntry {
    distance: i8,
    pool: [u64; 2],
    figures: Figures,
}

const _: () = assert!(size_of::<PoolMap>() == 32 && size_of::<PoolEntry>() == 120);

impl PoolMap {
    /// `None` where there is no libstdc++.
    pub fn empty() -> Option<PoolMap> {
        /// An empty map has this many entries; the last marks the end.
        const LOOKUPS: usize = 4;
        let entries = cxx::allocate(LOOKUPS * size_of::<PoolEntry>())?;
        for at in 0..LOOKUPS {
            let distance = if at + 1 == LOOKUPS { 0 } else { -1 };
            // SAFETY: one of the entries that were allocated, which are plain data.
            unsafe {
                let entry = entries.cast::<PoolEntry>().add(at);
                ptr::write_bytes(entry, 0, 1);
                (*entry).distance = distance;
            }
        }
        Some(PoolMap {
            entries,
            slots_but_one: 0,
            hash_policy: 63,
            max_lookups: LOOKUPS as i8 - 1,
            max_load_factor: 0.5,
            count: 0,
        })
    }
}

#[repr(C)]
pub struct BlockInfo {
    pub size: u64,
    pub requested_size: u64,
    pub gc_counter: i32,
    pub allocated: bool,
    pub active: bool,
    pub context_when_allocated: SharedPointer,
}

#[repr(C)]
pub struct SegmentInfo {
    pub device: i8,
    pub registration_counter: i32,
    pub address: u64,
    pub total_size: u64,
    pub requested_size: u64,
    pub allocated_size: u64,
    pub active_size: u64,
    pub stream: u64,
    pub is_large: bool,
    pub is_expandable: bool,
    pub owner_private_pool_id: [u64; 2],
    pub blocks: CxxVector<BlockInfo>,
    pub context_when_allocated: SharedPointer,
}

#[repr(C)]
pub struct TraceEntry<const INTERNAL: usize> {
    pub action: u32,
    pub device: i8,
    pub address: u64,
    pub context: SharedPointer,
    pub stream: u64,
    pub size: u64,
    pub mempool: [u64; 2],
    pub time: u64,
    pub compile_context: CxxString,
    pub user_metadata: CxxString,
    pub internal_metadata: [CxxString; INTERNAL],
}

#[repr(C)]
pub struct AllocatorConfigInfo<const CACHED: usize> {
    pub garbage_collection_threshold: f64,
    pub max_split_size: u64,
    pub pinned_num_register_threads: u64,
    pub expandable_segments: bool,
    pub release_lock_on_malloc: bool,
    pub pinned_use_host_register: bool,
    pub graph_capture_record_stream_reuse: bool,
    pub last_allocator_settings: CxxString,
    pub roundup_power2_divisions: CxxVector<u64>,
    /// `max_round_threshold` and `max_cached_size`.
    pub most: [u64; CACHED],
}

#[repr(C)]
pub struct SnapshotInfo<const INTERNAL: usize, const CACHED: usize, const HOST: usize> {
    pub segments: CxxVector<SegmentInfo>,
    pub device_traces: CxxVector<CxxVector<TraceEntry<INTERNAL>>>,
    /// `AnnotationEntry`; none, as `attach.py` adds them.
    pub external_annotations: CxxVector<[u64; 9]>,
    pub config_metadata: AllocatorConfigInfo<CACHED>,
    /// `HostSegmentInfo`s and `TraceEntry`s; none, as host memory is PyTorch's.
    pub host: [CxxVector<u64>; HOST],
}

const _: () = assert!(size_of::<BlockInfo>() == 40 && size_of::<SegmentInfo>() == 120);
const _: () = assert!(size_of::<TraceEntry<0>>() == 136 && size_of::<TraceEntry<1>>() == 168);
const _: () = assert!(size_of::<SnapshotInfo<0, 0, 0>>() == 160);
const _: () = assert!(size_of::<SnapshotInfo<0, 2, 0>>() == 176);
const _: () = assert!(size_of::<SnapshotInfo<0, 2, 2>>() == 224);
const _: () = assert!(size_of::<SnapshotInfo<1, 2, 2>>() == 224);

/// `c10::cuda::CUDACachingAllocator::ShareableHandle`.
#[repr(C)]
pub struct ShareableHandle {
    pub offset: isize,
    pub text: CxxString,
}

const _: () = assert!(size_of::<ShareableHandle>() == 40);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_told_by_their_table_and_a_symbol() {
        for known in RELEASES {
            let has = |_: &CStr, symbol: &CStr| symbol == known.symbol.1;
            let found = Release::find(known.words, Some(known.version), has);
            assert_eq!(found.map(|it| it.version), Some(known.version));
            let unstated = Release::find(known.words, None, has);
            assert_eq!(unstated.map(|it| it.version), Some(known.version));
        }
    }

    #[test]
    fn releases_that_differ_anywhere_are_unknown() {
        for known in RELEASES {
            let (major, minor) = known.version;
            let has = |_: &CStr, symbol: &CStr| symbol == known.symbol.1;
            assert!(Release::find(known.words + 1, Some(known.version), has).is_none());
            assert!(Release::find(known.words + 100, None, has).is_none());
            assert!(Release::find(known.words, Some((major, 99)), has).is_none());
            assert!(Release::find(known.words, Some((major + 1, minor)), has).is_none());
            assert!(Release::find(known.words, None, |_, _| false).is_none());
        }
    }
}
