//! Memory history and snapshots: what PyTorch's `_record_memory_history` and `_snapshot` ask.
//!
//! Where the program was is a traceback of PyTorch's own, gathered by the function that `attach.py`
//! hands over, which is called with no lock of ours held: it takes the interpreter's. Nor is it called
//! inside of [`guard`], which ends the process where a C++ exception reaches it: a recorder may throw, and
//! PyTorch's own allocator lets that go on to whoever asked for memory.

use super::cxx::{CxxString, CxxVector};
use super::cxx_snapshot::{self, Recorder};
use super::memory_stats::{Take, current_device, hand_over};
use crate::entry::panic_guard::guard;
use crate::entry::python::{Interpreter, Object};
use concertina_engine::device::Device;
use concertina_engine::device::PoolId;
use concertina_engine::device::history::{self, Action, Context, Contexts, Place, Plan};
use concertina_engine::process::allocator::allocator_in_use;
use concertina_engine::process::allocator::record_history;
use concertina_engine::util::fork;
use serde_json::{Value, json};
use std::ffi::{c_int, c_ulonglong, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What makes a traceback.
pub enum Gather {
    Nothing,
    /// A Python object that is never let go of.
    Python(Object),
    /// A function of PyTorch's.
    Cxx(Recorder),
}

/// [`Gather::Python`].
static GATHER: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// [`Gather::Cxx`], where it is that.
static RECORDER: Mutex<Option<Recorder>> = Mutex::new(None);

/// Tracebacks that nobody needs, as addresses: let go of when the interpreter's lock is held.
static UNNEEDED: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// How many snapshots are being read, in which tracebacks are known by their numbers alone.
static READING: AtomicUsize = AtomicUsize::new(0);

/// A traceback: a Python object.
struct Traceback(usize);

impl Place for Traceback {
    fn number(&self) -> u64 {
        self.0 as u64
    }
}

impl Drop for Traceback {
    fn drop(&mut self) {
        let mut unneeded = UNNEEDED.lock().unwrap_or_else(PoisonError::into_inner);
        unneeded.push(self.0);
    }
}

/// Where this thread is, if such places are wanted. What PyTorch's recorder throws goes on to the caller.
fn gather(wanted: Contexts) -> Context {
    if !history::wants(wanted) {
        return None;
    }
    let recorder = *RECORDER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(recorder) = recorder {
        // SAFETY: any thread may ask.
        let ended = Interpreter::get().is_some_and(|it| unsafe { (it.Py_IsInitialized)() } == 0);
        return (!ended).then(|| cxx_snapshot::gather(recorder)).flatten();
    }
    let gather: Object = GATHER.load(Ordering::Acquire);
    let python = Interpreter::get()?;
    if gather.is_null() {
        return None;
    }
    // SAFETY: no lock of ours is held. `gather` is a callable object that is never let go of.
    let traceback = unsafe {
        python.with_gil(|| {
            if READING.load(Ordering::Relaxed) == 0 {
                let unneeded = UNNEEDED
                    .lock()
                    .map(|mut all| std::mem::take(&mut *all))
                    .unwrap_or_default();
                for object in unneeded {
                    (python.Py_DecRef)(object as Object);
                }
            }
            (python.PyObject_CallObject)(gather, ptr::null_mut())
        })
    }?;
    match traceback.is_null() {
        true => None,
        false => Some(Arc::new(Traceback(traceback as usize))),
    }
}

/// PyTorch got a block.
#[cold]
pub fn allocated(device: &Device, address: u64, size: usize, stream: u64) {
    if history::is_recorded() {
        let place = gather(Contexts::State);
        guard((), || {
            device.note_allocated(address, size as u64, stream, place);
        });
    }
}

/// PyTorch is about to give a block back.
#[cold]
pub fn freeing(device: &Device, address: u64, size: usize, stream: u64) {
    if history::is_recorded() {
        let place = gather(Contexts::All);
        guard((), || {
            device.note_freed(address, size as u64, stream, place);
        });
    }
}

/// Where PyTorch is about to have memory given back to the driver, for [`emptied`].
pub fn emptying() -> Context {
    // After a fork nothing is given back, and another thread may have held a lock that this takes.
    match fork::in_forked_child() {
        true => None,
        false => gather(Contexts::All),
    }
}

/// PyTorch had memory given back to the driver.
pub fn emptied(device: &Device, place: &Context) {
    if history::is_recorded() {
        device.note_happenings(place.clone());
    }
}

/// PyTorch got nothing.
#[cold]
pub fn out_of_memory(device: &Device, size: usize, stream: u64) {
    if history::is_recorded() {
        let place = gather(Contexts::State);
        guard((), || {
            device.note_out_of_memory(size as u64, stream, place);
        });
    }
}

/// Records from now on. `contexts` counts from 0, as in [`Contexts`]; below 0, nothing is recorded.
/// `skip` is a bit for each of [`Action::ALL`]. `gather` is a Python object that is called without
/// arguments for a traceback.
pub extern "C" fn record(
    contexts: c_int,
    entries: c_ulonglong,
    skip: c_int,
    clear: bool,
    new_gather: usize,
) {
    let gather = Gather::Python(new_gather as Object);
    guard((), || record_by(gather, contexts, entries, skip, clear));
}

/// The same with what makes a traceback, for Python and for C++.
pub fn record_by(gather: Gather, contexts: c_int, entries: u64, skip: c_int, clear: bool) {
    let contexts = match contexts {
        0 => Contexts::Never,
        1 => Contexts::State,
        2 => Contexts::Alloc,
        3.. => Contexts::All,
        ..0 => return record_history(None, clear),
    };
    let (object, recorder) = match gather {
        Gather::Nothing => (ptr::null_mut(), None),
        Gather::Python(object) => (object, None),
        Gather::Cxx(recorder) => (ptr::null_mut(), Some(recorder)),
    };
    *RECORDER.lock().unwrap_or_else(PoisonError::into_inner) = recorder;
    GATHER.store(object, Ordering::Release);
    let plan = Plan {
        entries: entries as usize,
        contexts,
        skip: skip as u16,
    };
    record_history(Some(plan), clear);
}

/// The names of the actions, as a list.
pub extern "C" fn actions(take: Take) {
    let names: Vec<_> = Action::ALL.iter().map(|action| action.name()).collect();
    guard((), || hand_over(&json!(names), take));
}

/// Whether anything is recorded.
pub extern "C" fn is_recorded() -> bool {
    history::is_recorded()
}

/// Until [`reading`] says that it has been read, the tracebacks that a snapshot names stay.
pub extern "C" fn reading(begins: bool) {
    match begins {
        true => READING.fetch_add(1, Ordering::Relaxed),
        false => READING.fetch_sub(1, Ordering::Relaxed),
    };
}

/// All that there is, or one private pool's. To be called between [`reading`]'s two calls.
pub extern "C" fn tell_all(graph: c_ulonglong, user: c_ulonglong, traces: bool, take: Take) {
    guard((), || hand_over(&snapshot_of((graph, user), traces), take));
}

/// All that there is, or one private pool's.
pub fn snapshot_of(pool: PoolId, traces: bool) -> Value {
    let only = Some(pool).filter(|pool| *pool != (0, 0));
    match allocator_in_use() {
        Some(allocator) if !fork::in_forked_child() => allocator.snapshot(only, traces),
        _ => json!({"segments": [], "device_traces": [], "external_annotations": []}),
    }
}

/// The program's text for entries from now on; of so many bytes.
///
/// # Safety
/// `text` points to so many.
pub unsafe extern "C" fn set_metadata(text: *const u8, size: usize) {
    guard((), || {
        // SAFETY: as promised by the caller.
        let text = unsafe { std::slice::from_raw_parts(text, size) };
        history::set_metadata(&String::from_utf8_lossy(text));
    });
}

// ---- functions of the allocator object's table: `this` comes first -------------------------------

type This = *mut c_void;

/// Names of what the program is at, from `torch.profiler.record_function`: a
/// `std::vector<std::pair<std::string, std::string>>` of a name and a stage.
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
            current_device().unwrap_or(0),
            name.unwrap_or_default(),
            stage.unwrap_or_default(),
        );
    });
}

pub unsafe extern "C" fn push_compile_context(_: This, name: *const CxxString) {
    guard((), || {
        // SAFETY: the caller's string, which lives until this returns.
        let name = unsafe { (*name).bytes() };
        history::enter_region(&String::from_utf8_lossy(name));
    });
}

pub extern "C" fn pop_compile_context(_: This) {
    guard((), history::leave_region);
}
