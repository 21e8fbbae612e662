//! The virtual functions of PyTorch's allocator object that this library replaces, release by release.

use super::layouts::{Pools, Release, SNAPSHOT, Snapshot, Stats};
use super::symbols::member;
use super::vtable::{
    Location::{In, Of, Returns},
    Slot, SlotRange,
};
use super::{cxx_snapshot, ipc_tensors, memory_history, trace_trackers};
use super::{device_stats::get_device_stats, virtual_functions::*};
use std::ffi::CStr;

const EMPTY_CACHE: &CStr = member!("10emptyCacheESt4pairIyyE");
/// That of releases up to 2.7.
const EMPTY_ALL: &CStr = member!("10emptyCacheEv");
const RELEASE_POOL: &CStr = member!("11releasePoolEaSt4pairIyyE");
const SHARE_IPC_HANDLE: &CStr = member!("14shareIpcHandleEPv");

const POOLS: SlotRange = SlotRange {
    from: &[RELEASE_POOL],
    to: SHARE_IPC_HANDLE,
};

/// `enable` and `isEnabled`; what stands before them differs between releases.
const SWITCH: SlotRange = SlotRange {
    from: &[
        member!("25getExpandableSegmentSizesEa"),
        EMPTY_CACHE,
        EMPTY_ALL,
        member!("17setMemoryFractionEda"),
    ],
    to: member!("9cacheInfoEaPm"),
};

/// `recordHistory` and what follows it.
const HISTORY: SlotRange = SlotRange {
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

const ATTACH_TRACKER: &CStr = member!(
    "27attachAllocatorTraceTrackerESt8functionIFvRKN3c1022CachingDeviceAllocator10TraceEntryEEE"
);
/// That of releases up to 2.10.
const ATTACH_CUDA_TRACKER: &CStr = member!(
    "27attachAllocatorTraceTrackerESt8functionIFvRKN3c104cuda20CUDACachingAllocator10\
     TraceEntryEEE"
);

const MEM_POOL: &str = "torch.cuda.MemPool";
const GRAPHS: &str = "CUDA graphs";
const STATISTICS: &str = "statistics for C++";
const FRACTION: &str = "the memory fraction";
const SWITCHING: &str = "torch.cuda.caching_allocator_enable";
const SHARING: &str = "torch.multiprocessing";
const NAMES: &str = "record_function in memory snapshots";
const TRACKERS: &str = "registering memory with NCCL";
const SNAPSHOTS: &str = "memory snapshots for C++";

/// Functions whose arguments and results are numbers, addresses and `std::function`s: they are right in every
/// release that has them.
pub fn plain_slots() -> Vec<Slot> {
    let slot = |location, function, loss| Slot {
        location,
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
            In(&POOLS, 1, &[4, 5, 6]),
            get_pool_use_count as *const (),
            MEM_POOL,
        ),
        slot(In(&SWITCH, 1, &[3]), enable as *const (), SWITCHING),
        slot(In(&SWITCH, 2, &[3]), is_enabled as *const (), SWITCHING),
    ]
}

/// Functions with arguments or results of PyTorch's classes, and those without symbols whose arguments have
/// changed. PyTorch's own stay where the release does not tell.
pub fn class_slots(release: Option<&Release>) -> Vec<Slot> {
    let slot = |location, function: Option<*const ()>, loss| Slot {
        location,
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
        None => cxx_snapshot::refuse_history as *const (),
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
    let attach_tracker = match release {
        Some(it) if it.snapshot == Some(Snapshot::Internal) => {
            Some(trace_trackers::attach::<1> as *const ())
        }
        // Up to 2.7 an entry has no pool.
        Some(it) if it.pools != Pools::Bare => Some(trace_trackers::attach::<0> as *const ()),
        _ => None,
    };
    let tracker = match release {
        Some(it) if it.snapshot.is_none() => ATTACH_CUDA_TRACKER,
        _ => ATTACH_TRACKER,
    };
    vec![
        slot(Of(empty.0), Some(empty.1), MEM_POOL),
        Slot {
            location: Of(tracker),
            function: attach_tracker,
            loss: Some(TRACKERS).filter(|_| release.is_none_or(|it| it.pools != Pools::Bare)),
        },
        Slot {
            // The hook does the same.
            loss: None,
            location: Of(member!(
                "12recordStreamERKN3c107DataPtrENS3_4cuda10CUDAStreamE"
            )),
            function: of_known(record_stream as *const ()),
        },
        slot(In(&POOLS, 2, &[4, 5, 6]), pools.map(|it| it.0), MEM_POOL),
        slot(In(&POOLS, 3, &[5, 6]), pools.map(|it| it.1), MEM_POOL),
        slot(
            In(&POOLS, 4, &[6]),
            of_known(set_no_split as *const ()),
            MEM_POOL,
        ),
        slot(In(&HISTORY, 0, &[2, 4, 6, 8]), record, NAMES),
        slot(
            In(&HISTORY, 1, &[2, 4, 6, 8]),
            of_strings(memory_history::record_annotation as *const ()),
            NAMES,
        ),
        slot(
            In(&HISTORY, 2, &[4, 6, 8]),
            of_strings(memory_history::push_compile_context as *const ()),
            NAMES,
        ),
        slot(
            In(&HISTORY, 3, &[4, 6, 8]),
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
