//! PyTorch's GPU trace (`torch.cuda._gpu_trace`, which `torch.cuda._sanitizer` reads): its callbacks are
//! called for each block that is allocated or freed. PyTorch leaves that to its own allocator.
//!
//! A program activates the trace in Python, which `attach.py` sees; it never ends. The callbacks take the
//! interpreter's lock, and are called with no lock of this library held.

use super::state::{GPU_TRACE, set_observer};
use super::symbols::Library;
use crate::entry::panic_guard::guard;
use crate::entry::python::{Interpreter, Object};
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The Python function that calls the callbacks, with an address and whether the block is freed. It is never
/// freed itself.
static FIRE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Called by `attach.py`: this Python function is called for blocks from now on.
pub extern "C" fn start_gpu_trace(fire: usize) {
    FIRE.store(fire as Object, Ordering::Release);
    set_observer(GPU_TRACE, true);
}

/// Whether the trace is active already.
pub extern "C" fn is_gpu_traced() -> bool {
    guard(false, || {
        let c10 = Library::loaded(c"libc10.so");
        let state = c10.and_then(|c10| c10.object(c"_ZN3c104impl8GPUTrace9haveStateE"));
        // SAFETY: `static bool haveState`, of the one byte that a bool has; it is set once, and never reset.
        state.is_some_and(|(state, size)| size == 1 && unsafe { *state.cast::<u8>() } != 0)
    })
}

/// A block was allocated.
#[cold]
pub fn allocated(address: u64) {
    call(address, false);
}

/// A block is about to be freed.
#[cold]
pub fn freeing(address: u64) {
    call(address, true);
}

fn call(address: u64, frees: bool) {
    let fire: Object = FIRE.load(Ordering::Acquire);
    if fire.is_null() {
        return;
    }
    let Some(python) = Interpreter::get() else {
        return;
    };
    // SAFETY: no lock of ours is held. `fire` is a callable object that is never freed; a tuple takes what
    // it is given over, and null for nothing.
    unsafe {
        python.with_gil(|| {
            let arguments = (python.PyTuple_New)(2);
            if arguments.is_null() {
                return;
            }
            for (at, value) in [address as usize, usize::from(frees)]
                .into_iter()
                .enumerate()
            {
                (python.PyTuple_SetItem)(arguments, at as isize, (python.PyLong_FromSize_t)(value));
            }
            let result = (python.PyObject_CallObject)(fire, arguments);
            (python.Py_DecRef)(result);
            (python.Py_DecRef)(arguments);
        });
    }
}
