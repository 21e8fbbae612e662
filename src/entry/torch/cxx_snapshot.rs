//! Memory history for C++: `torch::cuda::_record_memory_history` and `_memory_snapshot_pickled` ask the
//! allocator object itself, in classes that differ from release to release.

use super::concertina_pool_id;
use super::cxx::{CxxString, CxxVector, SharedPointer};
use super::exceptions::{Failure, raise};
use super::layouts::{AllocatorConfigInfo, BlockInfo, SegmentInfo, SnapshotInfo, TraceEntry};
use super::memory_history::{self, Gather, snapshot_of};
use super::symbols::Library;
use super::vtable::SNAPSHOT;
use crate::entry::panic_guard::guard;
use concertina_engine::device::history::{Action, Context, Place};
use concertina_engine::util::message;
use serde_json::Value;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::mem::{take, transmute};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// `attach.py` records or reads, and has PyTorch take part in it: its call says nothing new, and asks for
/// nothing.
static FOLLOWS: AtomicBool = AtomicBool::new(false);

/// Until it says that that is over, PyTorch follows `attach.py`.
pub extern "C" fn follows(begins: bool) {
    FOLLOWS.store(begins, Relaxed);
}

type This = *mut c_void;

/// Makes a traceback. What it returns is no plain data, so the caller passes room for it first.
pub type Recorder = unsafe extern "C-unwind" fn(*mut SharedPointer) -> *mut SharedPointer;

/// Tracebacks of C++: those in use by their numbers, and others, which are let go of while no lock is held.
struct Tracebacks {
    used: Option<HashMap<u64, SharedPointer>>,
    unneeded: Vec<SharedPointer>,
}

static TRACEBACKS: Mutex<Tracebacks> = Mutex::new(Tracebacks {
    used: None,
    unneeded: Vec::new(),
});

fn tracebacks() -> MutexGuard<'static, Tracebacks> {
    TRACEBACKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A `c10::GatheredContext`. Its number is its address and one, which no object of Python's has.
struct Traceback(u64);

impl Place for Traceback {
    fn number(&self) -> u64 {
        self.0
    }
}

impl Drop for Traceback {
    fn drop(&mut self) {
        let mut tracebacks = tracebacks();
        let used = tracebacks.used.as_mut();
        if let Some(pointer) = used.and_then(|used| used.remove(&self.0)) {
            tracebacks.unneeded.push(pointer);
        }
    }
}

/// Where this thread is. No lock may be held. What the recorder throws goes on to the caller.
pub fn gather(recorder: Recorder) -> Context {
    guard((), || {
        let unneeded = take(&mut tracebacks().unneeded);
        drop(unneeded);
    });
    let mut pointer = SharedPointer::NULL;
    // SAFETY: PyTorch's function, and room for what it returns, where nothing has to be dropped.
    unsafe { recorder(&mut pointer) };
    guard(None, || {
        let number = pointer.address() as u64 | 1;
        if pointer.address().is_null() {
            return None;
        }
        let mut tracebacks = tracebacks();
        tracebacks
            .used
            .get_or_insert_default()
            .insert(number, pointer);
        Some(Arc::new(Traceback(number)))
    })
}

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
    if FOLLOWS.load(Relaxed) {
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
            return memory_history::record_by(Gather::Nothing, -1, 0, 0, clear);
        };
        let by = Gather::Cxx(recorder);
        memory_history::record_by(by, contexts, entries as u64, bits.sum(), clear);
    });
}

/// The same in releases of which C++ gets no snapshot: PyTorch may take part in what `attach.py` records, and
/// C++ may not ask for more.
pub unsafe extern "C-unwind" fn follow_history(_: This) {
    if FOLLOWS.load(Relaxed) {
        return;
    }
    // SAFETY: PyTorch, which called, lets exceptions through.
    let unsaid = unsafe { raise(Failure::Other(NO_HISTORY.into())) };
    message::print(&unsaid);
}

const NO_HISTORY: &str = "concertina records memory history for C++ from PyTorch 2.11 on";

// ---- snapshots -----------------------------------------------------------------------------------

/// `snapshot`. What it returns is no plain data, so the caller passes room for it first.
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
    let made = guard(None, || match FOLLOWS.load(Relaxed) {
        true => info(&Value::Null),
        false => info(&snapshot_of((pool.graph, pool.user), traces)),
    });
    if let Some(made) = made {
        // SAFETY: the caller's room.
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
    // It was found when the table was fitted.
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
        host: all(|| CxxVector::of(Vec::new()))?,
    })
}

/// So many of what is made one by one.
fn all<T, const COUNT: usize>(make: impl Fn() -> Option<T>) -> Option<[T; COUNT]> {
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
            mempool: [0; 2],
            time: number(&value["time_us"]),
            compile_context: text("compile_context")?,
            user_metadata: text("user_metadata")?,
            internal_metadata: all(|| CxxString::of(b""))?,
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

/// Its traceback, unless that is Python's, or gone meanwhile.
fn context(value: &Value) -> SharedPointer {
    let number = number(&value["context"]);
    let tracebacks = tracebacks();
    let used = tracebacks.used.as_ref();
    let pointer = used.and_then(|used| used.get(&number));
    pointer.map_or(SharedPointer::NULL, SharedPointer::clone)
}
