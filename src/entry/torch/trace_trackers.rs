//! Trackers of memory events: the C++ functions that PyTorch, or an extension, attaches to its allocator
//! (`attachAllocatorTraceTracker`). ProcessGroupNCCL registers memory with NCCL by them.
//!
//! They are called as `trackers.rs` of the engine says, in the order in which they were attached, and are never
//! detached.

use super::cxx::{CxxString, SharedPointer};
use super::exceptions::{Failure, raise};
use super::layouts::TraceEntry;
use super::observers::{self, TRACKERS};
use crate::entry::panic_guard::guard;
use concertina_engine::device::history::Entry;
use concertina_engine::process::allocator::track_events;
use concertina_engine::process::settings;
use concertina_engine::settings::variable_text;
use concertina_engine::util::message;
use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A copy of a `std::function<void(const TraceEntry&)>`, as libstdc++ lays it out (`stream_filter.rs`).
#[repr(C)]
pub struct Tracker {
    state: [usize; 2],
    manager: Option<unsafe extern "C-unwind" fn(*mut [usize; 2], *const [usize; 2], c_int) -> bool>,
    invoker: Option<unsafe extern "C-unwind" fn(*const [usize; 2], *const c_void)>,
}

/// `_Manager_operation` of libstdc++: to copy.
const CLONE: c_int = 2;

// SAFETY: PyTorch calls trackers from every thread that allocates.
unsafe impl Send for Tracker {}
// SAFETY: as above; two threads call one at a time only for different devices, as under PyTorch's own allocator.
unsafe impl Sync for Tracker {}

static ATTACHED: Mutex<Vec<Arc<Tracker>>> = Mutex::new(Vec::new());

/// `attachAllocatorTraceTracker`, which PyTorch passes the function as C++ passes one by value: by its address.
pub unsafe extern "C-unwind" fn attach<const INTERNAL: usize>(
    _: *mut c_void,
    function: *const Tracker,
) {
    if is_hook_set() && guard(false, || settings::process_settings().expandable_segments) {
        // SAFETY: PyTorch, which called, lets exceptions through.
        let message = unsafe { raise(Failure::Other(NOT_MAPPED.into())) };
        return message::print(&message);
    }
    // SAFETY: the caller's function.
    let Some(Tracker {
        state,
        manager: Some(manager),
        invoker: Some(invoker),
    }) = (unsafe { function.as_ref() })
    else {
        return;
    };
    let mut copied = [0; 2];
    // SAFETY: the manager fills `copied` with a copy of the state. The copy is never destroyed.
    unsafe { manager(&mut copied, state, CLONE) };
    let tracker = Tracker {
        state: copied,
        manager: Some(*manager),
        invoker: Some(*invoker),
    };
    guard((), || {
        attached().push(Arc::new(tracker));
        track_events(tell::<INTERNAL>);
        observers::set_observer(TRACKERS, true);
    });
}

fn attached() -> MutexGuard<'static, Vec<Arc<Tracker>>> {
    ATTACHED.lock().unwrap_or_else(PoisonError::into_inner)
}

const NOT_MAPPED: &str = "concertina: NCCL can register each segment \
    (TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK) where segments stay where they are, not of mapped memory: set \
    expandable_segments:False, or unset the variable";

/// Whether ProcessGroupNCCL registers all memory. PyTorch ignores the variable where its own allocator maps memory:
/// NCCL would go on using what was mapped when it was registered.
fn is_hook_set() -> bool {
    let value = variable_text("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK");
    value.is_some_and(|it| {
        ["y", "yes", "1", "t", "true"].contains(&it.to_ascii_lowercase().as_str())
    })
}

/// Calls the trackers with an event.
fn tell<const INTERNAL: usize>(device: i32, event: &Entry) {
    let text = |text: &Option<Arc<str>>, other: &CStr| {
        let text = text.as_deref().and_then(|text| CString::new(text).ok());
        text.unwrap_or_else(|| other.to_owned())
    };
    let region = text(&event.region, c"N/A");
    let metadata = text(&event.metadata, c"");
    let entry = TraceEntry::<INTERNAL> {
        // In PyTorch's order.
        action: event.action as u32,
        device: device as i8,
        address: event.address,
        context: SharedPointer::NULL,
        stream: event.stream,
        size: event.size,
        mempool: [event.pool.0, event.pool.1],
        time: approximate_time(),
        compile_context: CxxString::borrowing(&region),
        user_metadata: CxxString::borrowing(&metadata),
        internal_metadata: [(); INTERNAL].map(|()| CxxString::borrowing(c"")),
    };
    // Called without the lock: a tracker may attach another.
    let trackers = attached().clone();
    for tracker in trackers {
        if let Some(invoker) = tracker.invoker {
            // SAFETY: the state is a live copy that this invoker was made for, and takes an entry of this release.
            unsafe { invoker(&tracker.state, (&raw const entry).cast()) };
        }
    }
}

/// `c10::getApproximateTime()`, which is the time in entries that are not in a snapshot.
fn approximate_time() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has it.
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.unwrap_or_default().as_nanos() as u64
    }
}
