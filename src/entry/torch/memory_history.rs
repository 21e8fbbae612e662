//! The memory history (`torch.cuda.memory._record_memory_history`, `_snapshot`), for Python, and annotations.

use super::cxx::{CxxString, CxxVector};
use super::devices;
use super::json::{JsonCallback, send};
use super::tracebacks::{self, Source, gather};
use crate::entry::panic_guard::guard;
use crate::entry::python::Object;
use concertina_engine::device::Device;
use concertina_engine::device::PoolId;
use concertina_engine::device::history::{self, Action, Context, Contexts, Plan};
use concertina_engine::process::allocator::allocator_in_use;
use concertina_engine::process::allocator::record_history;
use concertina_engine::util::fork;
use serde_json::{Value, json};
use std::ffi::{c_int, c_ulonglong, c_void};

/// Records that PyTorch got a block.
#[cold]
pub fn allocated(device: &Device, address: u64, size: usize, stream: u64) {
    if history::is_noted() {
        let context = gather(Contexts::State);
        guard((), || {
            device.record_allocated(address, size as u64, stream, context);
        });
    }
}

/// Records that PyTorch frees a block.
#[cold]
pub fn freeing(device: &Device, address: u64, size: usize, stream: u64) {
    if history::is_noted() {
        let context = gather(Contexts::All);
        guard((), || {
            device.record_freed(address, size as u64, stream, context);
        });
    }
}

/// The traceback of an `empty_cache` that is about to begin, for [`emptied`].
pub fn emptying() -> Context {
    // After a fork nothing is returned, and another thread may have held a lock that this takes.
    match fork::in_forked_child() {
        true => None,
        false => gather(Contexts::All),
    }
}

/// Records what an `empty_cache` returned to the driver.
pub fn emptied(device: &Device, context: &Context) {
    if history::is_noted() {
        device.record_events(context.clone());
    }
}

/// Records that a request of PyTorch's could not be met.
#[cold]
pub fn out_of_memory(device: &Device, size: usize, stream: u64, pool: PoolId) {
    if history::is_noted() {
        let context = gather(Contexts::State);
        guard((), || {
            device.record_out_of_memory(size as u64, stream, context, pool);
        });
    }
}

/// Called by `attach.py`: starts or ends recording. `contexts` is one of [`Contexts`], counted from 0;
/// negative to end. `skip` is a bit for each of [`Action::ALL`]. `source` is a Python object that returns a
/// traceback when called without arguments.
pub extern "C" fn record(
    contexts: c_int,
    entries: c_ulonglong,
    skip: c_int,
    clear: bool,
    source: usize,
) {
    let source = Source::Python(source as Object);
    guard((), || record_with(source, contexts, entries, skip, clear));
}

/// [`record`] with tracebacks of Python or of C++.
pub fn record_with(source: Source, contexts: c_int, entries: u64, skip: c_int, clear: bool) {
    let contexts = match contexts {
        0 => Contexts::Never,
        1 => Contexts::State,
        2 => Contexts::Alloc,
        3.. => Contexts::All,
        ..0 => return record_history(None, clear),
    };
    tracebacks::set_source(source);
    let plan = Plan {
        entries: entries as usize,
        contexts,
        skip: skip as u16,
    };
    record_history(Some(plan), clear);
}

/// The names of the actions, as a list.
pub extern "C" fn actions(callback: JsonCallback) {
    let names: Vec<_> = Action::ALL.iter().map(|action| action.name()).collect();
    guard((), || send(&json!(names), callback));
}

/// Whether anything is recorded.
pub extern "C" fn is_recorded() -> bool {
    history::is_recorded()
}

/// [`snapshot_of`] for `attach.py`, which keeps tracebacks meanwhile (`keep_tracebacks`).
///
/// Trackers are told of it, which may throw.
pub extern "C-unwind" fn snapshot(
    graph: c_ulonglong,
    user: c_ulonglong,
    traces: bool,
    callback: JsonCallback,
) {
    guard((), || {
        send(&snapshot_of((graph, user), traces), callback);
    });
    devices::all_in_use().for_each(Device::tell_trackers);
}

/// Segments and history of all memory; of one private pool where `pool` is not `(0, 0)`.
pub fn snapshot_of(pool: PoolId, traces: bool) -> Value {
    let only = Some(pool).filter(|pool| *pool != (0, 0));
    match allocator_in_use() {
        Some(allocator) if !fork::in_forked_child() => allocator.snapshot(only, traces),
        _ => json!({"segments": [], "device_traces": [], "external_annotations": []}),
    }
}

/// Sets the text that entries have from now on as `user_metadata`.
///
/// # Safety
/// `text` points to `size` bytes.
pub unsafe extern "C" fn set_metadata(text: *const u8, size: usize) {
    guard((), || {
        // SAFETY: as promised by the caller.
        let text = unsafe { std::slice::from_raw_parts(text, size) };
        history::set_metadata(&String::from_utf8_lossy(text));
    });
}

// ---- virtual functions of the allocator object: `this` comes first -------------------------------

type This = *mut c_void;

/// `recordAnnotation`: a `torch.profiler.record_function` begins or ends. `pairs` is a
/// `std::vector<std::pair<std::string, std::string>>` with its name and stage.
pub unsafe extern "C" fn record_annotation(_: This, pairs: *const CxxVector<[CxxString; 2]>) {
    guard((), || {
        if !history::is_recorded() {
            return;
        }
        // SAFETY: the caller's vector, which lives until this returns.
        let pairs = unsafe { (*pairs).elements() };
        let value = |key: &[u8]| {
            let pair = pairs.iter().find(|[name, _]| name.bytes() == key)?;
            Some(String::from_utf8_lossy(pair[1].bytes()).into_owned())
        };
        let (name, stage) = (value(b"name"), value(b"stage"));
        history::annotate(
            devices::current().unwrap_or(0),
            name.unwrap_or_default(),
            stage.unwrap_or_default(),
        );
    });
}

/// `pushCompileContext`: the program enters a compiled region.
pub unsafe extern "C" fn push_compile_context(_: This, name: *const CxxString) {
    guard((), || {
        // SAFETY: the caller's string, which lives until this returns.
        let name = unsafe { (*name).bytes() };
        history::enter_region(&String::from_utf8_lossy(name));
    });
}

/// `popCompileContext`: it leaves the region.
pub extern "C" fn pop_compile_context(_: This) {
    guard((), history::leave_region);
}
