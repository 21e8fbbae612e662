//! Tracebacks of the program: where a block was allocated or freed, gathered by PyTorch's own functions.
//!
//! A traceback is a Python object where `attach.py` started the recording, and a `c10::GatheredContext` where
//! C++ did. Gathering takes the interpreter's lock, so no lock of this library may be held meanwhile. It is
//! not done inside a panic guard, which would end the process where a C++ exception reaches it: a recorder
//! may throw, and under PyTorch's own allocator that reaches the code that allocated.

use super::cxx::SharedPointer;
use crate::entry::panic_guard::guard;
use crate::entry::python::{Interpreter, Object};
use concertina_engine::device::history::{self, Context, Contexts, Traceback};
use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::take;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A C++ function that makes a traceback. Its result is a class with a destructor, so the caller passes the
/// memory for it first.
pub type Recorder = unsafe extern "C-unwind" fn(*mut SharedPointer) -> *mut SharedPointer;

/// What makes tracebacks.
pub enum Source {
    None,
    /// A Python object that is called without arguments, and never freed.
    Python(Object),
    Cxx(Recorder),
}

/// [`Source::Python`], else null.
static PYTHON: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// [`Source::Cxx`].
static RECORDER: Mutex<Option<Recorder>> = Mutex::new(None);

/// Sets what makes tracebacks from now on.
pub fn set_source(source: Source) {
    let (object, recorder) = match source {
        Source::None => (ptr::null_mut(), None),
        Source::Python(object) => (object, None),
        Source::Cxx(recorder) => (ptr::null_mut(), Some(recorder)),
    };
    *RECORDER.lock().unwrap_or_else(PoisonError::into_inner) = recorder;
    PYTHON.store(object, Ordering::Release);
}

/// A traceback of the calling thread, if such ones are recorded. What PyTorch's recorder throws goes on to
/// the caller.
pub fn gather(wanted: Contexts) -> Context {
    if !history::keeps(wanted) {
        return None;
    }
    let recorder = *RECORDER.lock().unwrap_or_else(PoisonError::into_inner);
    match recorder {
        Some(recorder) => gather_cxx(recorder),
        None => gather_python(),
    }
}

// ---- Python's -----------------------------------------------------------------------------------

/// Python tracebacks to be freed, as addresses: they are, once the interpreter's lock is held.
static UNUSED_PYTHON: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// How many snapshots are being read. They name tracebacks by number alone, so that none is freed meanwhile.
static READERS: AtomicUsize = AtomicUsize::new(0);

/// Called by `attach.py` before and after it reads a snapshot: tracebacks stay in between.
pub extern "C" fn keep_tracebacks(begins: bool) {
    match begins {
        true => READERS.fetch_add(1, Ordering::Relaxed),
        false => READERS.fetch_sub(1, Ordering::Relaxed),
    };
}

/// A Python object.
struct PythonTraceback(usize);

impl Traceback for PythonTraceback {
    fn number(&self) -> u64 {
        self.0 as u64
    }
}

impl Drop for PythonTraceback {
    fn drop(&mut self) {
        let mut unused = UNUSED_PYTHON.lock().unwrap_or_else(PoisonError::into_inner);
        unused.push(self.0);
    }
}

fn gather_python() -> Context {
    let source: Object = PYTHON.load(Ordering::Acquire);
    let python = Interpreter::get()?;
    if source.is_null() {
        return None;
    }
    // SAFETY: no lock of ours is held. `source` is a callable object that is never freed.
    let traceback = unsafe {
        python.with_gil(|| {
            if READERS.load(Ordering::Relaxed) == 0 {
                let unused = UNUSED_PYTHON
                    .lock()
                    .map(|mut all| take(&mut *all))
                    .unwrap_or_default();
                for object in unused {
                    (python.Py_DecRef)(object as Object);
                }
            }
            (python.PyObject_CallObject)(source, ptr::null_mut())
        })
    }?;
    match traceback.is_null() {
        true => None,
        false => Some(Arc::new(PythonTraceback(traceback as usize))),
    }
}

// ---- C++'s --------------------------------------------------------------------------------------

/// C++ tracebacks: those in use by their numbers, and those to be freed once no lock is held.
struct CxxTracebacks {
    used: Option<HashMap<u64, SharedPointer>>,
    unused: Vec<SharedPointer>,
}

static CXX: Mutex<CxxTracebacks> = Mutex::new(CxxTracebacks {
    used: None,
    unused: Vec::new(),
});

fn cxx_tracebacks() -> MutexGuard<'static, CxxTracebacks> {
    CXX.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A `c10::GatheredContext`. Its number is its address with the lowest bit set, which no address of a Python
/// object has.
struct CxxTraceback(u64);

impl Traceback for CxxTraceback {
    fn number(&self) -> u64 {
        self.0
    }
}

impl Drop for CxxTraceback {
    fn drop(&mut self) {
        let mut tracebacks = cxx_tracebacks();
        let used = tracebacks.used.as_mut();
        if let Some(pointer) = used.and_then(|used| used.remove(&self.0)) {
            tracebacks.unused.push(pointer);
        }
    }
}

fn gather_cxx(recorder: Recorder) -> Context {
    // SAFETY: any thread may ask.
    if Interpreter::get().is_some_and(|it| unsafe { (it.Py_IsInitialized)() } == 0) {
        return None;
    }
    guard((), || {
        let unused = take(&mut cxx_tracebacks().unused);
        drop(unused);
    });
    let mut pointer = SharedPointer::NULL;
    // SAFETY: PyTorch's function, and memory for its result, which holds nothing that has to be dropped.
    unsafe { recorder(&mut pointer) };
    guard(None, || {
        let number = pointer.address() as u64 | 1;
        if pointer.address().is_null() {
            return None;
        }
        let mut tracebacks = cxx_tracebacks();
        let used = tracebacks.used.get_or_insert_default();
        used.insert(number, pointer);
        Some(Arc::new(CxxTraceback(number)))
    })
}

/// The C++ traceback of this number; null where it is Python's, or not in use any more.
pub fn cxx(number: u64) -> SharedPointer {
    let tracebacks = cxx_tracebacks();
    let used = tracebacks.used.as_ref();
    let pointer = used.and_then(|used| used.get(&number));
    pointer.map_or(SharedPointer::NULL, SharedPointer::clone)
}
