//! PyTorch's GPU trace (`torch.cuda._gpu_trace`, which `torch.cuda._sanitizer` reads): its callbacks are told
//! of each block that comes and goes. That is the allocator's business, and PyTorch's wrapper of other
//! allocators does not do it.
//!
//! Whoever wants the trace activates it in Python, which `attach.py` sees; it never ends. The callbacks take
//! the interpreter's lock, and are called with none of ours held.

use super::symbols::Library;
use super::{TRACED, set_listening};
use crate::entry::panic_guard::guard;
use crate::entry::python::{Interpreter, Object};
use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The Python function that calls the callbacks, with an address and whether the block goes. It is never let
/// go of.
static FIRE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Called by `attach.py`: this Python function is to be told of blocks from now on.
pub extern "C" fn trace_gpu(fire: usize) {
    FIRE.store(fire as Object, Ordering::Release);
    set_listening(TRACED, true);
}

/// Whether the trace is active, which nobody may have seen begin.
pub extern "C" fn is_gpu_traced() -> bool {
    guard(false, || {
        let c10 = Library::loaded(c"libc10.so");
        let state = c10.and_then(|c10| c10.object(c"_ZN3c104impl8GPUTrace9haveStateE"));
        // SAFETY: `static bool haveState`, of the one byte that a bool has; it is set once, and never reset.
        state.is_some_and(|(state, size)| size == 1 && unsafe { *state.cast::<u8>() } != 0)
    })
}

/// A block was handed out.
#[cold]
pub fn allocated(address: u64) {
    tell(address, false);
}

/// A block is about to go.
#[cold]
pub fn freeing(address: u64) {
    tell(address, true);
}

fn tell(address: u64, goes: bool) {
    let fire: Object = FIRE.load(Ordering::Acquire);
    if fire.is_null() {
        return;
    }
    let Some(python) = Interpreter::get() else {
        return;
    };
    // SAFETY: no lock of ours is held. `fire` is a callable object that is never let go of; a tuple takes what
    // it is given over, and null for nothing.
    unsafe {
        python.with_gil(|| {
            let arguments = (python.PyTuple_New)(2);
            if arguments.is_null() {
                return;
            }
            for (at, value) in [address as usize, usize::from(goes)]
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
