//! Memory history and snapshots for C++ (`torch::cuda::_record_memory_history`, `_memory_snapshot_pickled`):
//! they ask the allocator object, in classes that differ between releases.

use super::abi::concertina_pool_id;
use super::cxx::{CxxString, CxxVector, SharedPointer};
use super::devices;
use super::exceptions::{Failure, raise};
use super::layouts::{
    AllocatorConfigInfo, BlockInfo, SNAPSHOT, SegmentInfo, SnapshotInfo, TraceEntry,
};
use super::memory_history::{self, snapshot_of};
use super::symbols::Library;
use super::tracebacks::{self, Recorder, Source};
use crate::entry::panic_guard::guard;
use concertina_engine::device::Device;
use concertina_engine::device::history::Action;
use concertina_engine::util::message;
use serde_json::Value;
use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// `attach.py` is calling PyTorch's own function of the same purpose, so that PyTorch's part of it is done:
/// what then reaches the allocator object changes nothing, and answers nothing.
static CALLED_BY_SCRIPT: AtomicBool = AtomicBool::new(false);

/// Called by `attach.py` around such a call.
pub extern "C" fn set_called_by_script(begins: bool) {
    CALLED_BY_SCRIPT.store(begins, Relaxed);
}

type This = *mut c_void;

/// `recordHistory`, in the order of PyTorch's arguments.
pub unsafe extern "C" fn record_history(
    _: This,
    enabled: bool,
    recorder: Option<Recorder>,
    entries: usize,
    contexts: c_int,
    clear: bool,
    skip: *const CxxVector<CxxString>,
) {
    if CALLED_BY_SCRIPT.load(Relaxed) {
        return;
    }
    guard((), || {
        // SAFETY: the caller's vector, which lives until this returns.
        let skip = unsafe { (*skip).elements() };
        let skipped = |action: &Action| {
            let name = action.name().as_bytes();
            skip.iter().any(|skip| skip.bytes() == name)
        };
        let bits = Action::ALL.iter().enumerate();
        let bits = bits.map(|(at, action)| c_int::from(skipped(action)) << at);
        let (Some(recorder), true) = (recorder, enabled) else {
            return memory_history::record_with(Source::None, -1, 0, 0, clear);
        };
        let source = Source::Cxx(recorder);
        memory_history::record_with(source, contexts, entries as u64, bits.sum(), clear);
    });
}

/// `recordHistory` in releases without snapshots for C++: throws, unless `attach.py` has called.
pub unsafe extern "C-unwind" fn refuse_history(_: This) {
    if CALLED_BY_SCRIPT.load(Relaxed) {
        return;
    }
    // SAFETY: PyTorch, which called, lets exceptions through.
    let message = unsafe { raise(Failure::Other(NO_HISTORY.into())) };
    message::print(&message);
}

const NO_HISTORY: &str = "concertina records memory history for C++ from PyTorch 2.11 on";

// ---- snapshots -----------------------------------------------------------------------------------

/// `snapshot`. Its result is a class with a destructor, so the caller passes the memory for it first.
pub unsafe extern "C-unwind" fn snapshot<
    const INTERNAL: usize,
    const CACHED: usize,
    const HOST: usize,
>(
    result: *mut SnapshotInfo<INTERNAL, CACHED, HOST>,
    this: This,
    pool: concertina_pool_id,
    traces: bool,
) -> *mut SnapshotInfo<INTERNAL, CACHED, HOST> {
    type Snapshot =
        unsafe extern "C-unwind" fn(*mut c_void, This, concertina_pool_id, bool) -> *mut c_void;
    let made = guard(None, || match CALLED_BY_SCRIPT.load(Relaxed) {
        true => info(&Value::Null),
        false => info(&snapshot_of((pool.graph, pool.user), traces)),
    });
    // Before the result is PyTorch's: a tracker may throw.
    devices::all_in_use().for_each(Device::tell_trackers);
    if let Some(made) = made {
        // SAFETY: the caller's memory for the result.
        unsafe { result.write(made) };
        return result;
    }
    let theirs = Library::loaded(c"libtorch_cuda.so").and_then(|torch| torch.symbol(SNAPSHOT));
    if let Some(theirs) = theirs {
        // SAFETY: the mangled name says what it takes; it throws.
        unsafe {
            transmute::<*mut c_void, Snapshot>(theirs)(result.cast(), this, pool, traces);
        }
    }
    // PyTorch has it: the table had it where ours stands now.
    result
}

/// `None` where there is no libstdc++.
fn info<const INTERNAL: usize, const CACHED: usize, const HOST: usize>(
    value: &Value,
) -> Option<SnapshotInfo<INTERNAL, CACHED, HOST>> {
    let segments: Option<Vec<_>> = list(&value["segments"]).iter().map(segment).collect();
    let segments = segments?;
    let expandable = segments.iter().all(|it| it.is_expandable);
    let traces = list(&value["device_traces"]).iter().enumerate();
    let traces: Option<Vec<_>> = traces.map(|(device, it)| trace(device, it)).collect();
    Some(SnapshotInfo {
        segments: CxxVector::of(segments)?,
        device_traces: CxxVector::of(traces?)?,
        external_annotations: CxxVector::of(Vec::new())?,
        config_metadata: AllocatorConfigInfo {
            garbage_collection_threshold: 0.0,
            max_split_size: u64::MAX,
            pinned_num_register_threads: 1,
            expandable_segments: expandable,
            release_lock_on_malloc: false,
            pinned_use_host_register: false,
            graph_capture_record_stream_reuse: value["graph_capture_record_stream_reuse"] == true,
            last_allocator_settings: CxxString::of(b"")?,
            roundup_power2_divisions: CxxVector::of(Vec::new())?,
            most: [u64::MAX; CACHED],
        },
        host: array(|| CxxVector::of(Vec::new()))?,
    })
}

/// `COUNT` of what `make` makes; `None` where it fails.
fn array<T, const COUNT: usize>(make: impl Fn() -> Option<T>) -> Option<[T; COUNT]> {
    let made: Option<Vec<T>> = (0..COUNT).map(|_| make()).collect();
    made?.try_into().ok()
}

fn segment(value: &Value) -> Option<SegmentInfo> {
    let block = |value: &Value| BlockInfo {
        size: number(&value["size"]),
        requested_size: number(&value["requested_size"]),
        gc_counter: 0,
        allocated: value["state"] == "active_allocated",
        active: value["state"] != "inactive",
        context_when_allocated: context(value),
    };
    Some(SegmentInfo {
        device: number(&value["device"]) as i8,
        registration_counter: -1,
        address: number(&value["address"]),
        total_size: number(&value["total_size"]),
        requested_size: number(&value["requested_size"]),
        allocated_size: number(&value["allocated_size"]),
        active_size: number(&value["active_size"]),
        stream: number(&value["stream"]),
        is_large: true,
        is_expandable: value["is_expandable"] == true,
        owner_private_pool_id: pool_of(&value["segment_pool_id"]),
        blocks: CxxVector::of(list(&value["blocks"]).iter().map(block).collect())?,
        context_when_allocated: SharedPointer::NULL,
    })
}

fn trace<const INTERNAL: usize>(
    device: usize,
    value: &Value,
) -> Option<CxxVector<TraceEntry<INTERNAL>>> {
    let entry = |value: &Value| {
        let action = Action::ALL
            .iter()
            .position(|it| value["action"] == it.name());
        let address = value.get("addr").unwrap_or(&value["device_free"]);
        let text = |name| CxxString::of(value[name].as_str().unwrap_or_default().as_bytes());
        Some(TraceEntry {
            // In PyTorch's order.
            action: action? as u32,
            device: device as i8,
            address: number(address),
            context: context(value),
            stream: number(&value["stream"]),
            size: number(&value["size"]),
            mempool: pool_of(&value["pool_id"]),
            time: number(&value["time_us"]),
            compile_context: text("compile_context")?,
            user_metadata: text("user_metadata")?,
            internal_metadata: array(|| CxxString::of(b""))?,
        })
    };
    let entries: Option<Vec<_>> = list(value).iter().map(entry).collect();
    CxxVector::of(entries?)
}

/// The name of a private pool.
fn pool_of(value: &Value) -> [u64; 2] {
    [number(&value[0]), number(&value[1])]
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Its traceback.
fn context(value: &Value) -> SharedPointer {
    tracebacks::cxx(number(&value["context"]))
}
