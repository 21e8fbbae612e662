//! What has to be done inside the Python interpreter, where the process is one.
//!
//! Nothing of Python is linked: its functions are looked up in the process. Work is handed over as a
//! pending call, which the interpreter makes on its main thread before that thread's next statement.

use super::guard::guard;
use concertina_engine::runtime::{lifecycle, message};
use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

type Object = *mut c_void;
type Function = unsafe extern "C" fn(Object, Object) -> Object;

/// The interpreter's functions that are used here; all but the last two belong to its stable ABI,
/// and those have been there as long.
macro_rules! interpreter {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        #[allow(non_snake_case)]
        struct Interpreter {
            $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Interpreter {
            /// `None` where the process holds no Python.
            fn find() -> Option<Interpreter> {
                Some(Interpreter {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: the name ends in a zero; a function that Python exports under it
                        // has this signature in every Python 3.
                        unsafe {
                            let address = libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr().cast());
                            if address.is_null() {
                                return None;
                            }
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(address)
                        }
                    },)*
                })
            }
        }
    };
}
interpreter! {
    Py_IsInitialized: fn() -> c_int;
    Py_AddPendingCall: fn(unsafe extern "C" fn(*mut c_void) -> c_int, *mut c_void) -> c_int;
    PyDict_New: fn() -> Object;
    PyDict_SetItemString: fn(Object, *const c_char, Object) -> c_int;
    PyEval_GetBuiltins: fn() -> Object;
    PyErr_Clear: fn();
    PyLong_FromLong: fn(c_long) -> Object;
    Py_DecRef: fn(Object);
    Py_CompileString: fn(*const c_char, *const c_char, c_int) -> Object;
    PyEval_EvalCode: fn(Object, Object, Object) -> Object;
    PyCFunction_NewEx: fn(*mut MethodDef, Object, Object) -> Object;
}

/// Python's `PyMethodDef`.
#[repr(C)]
struct MethodDef {
    name: *const c_char,
    function: Function,
    flags: c_int,
    doc: *const c_char,
}

/// Python keeps a pointer to it for good.
struct Method(std::cell::UnsafeCell<MethodDef>);
// SAFETY: nobody writes to it; Python asks for a mutable pointer and only reads.
unsafe impl Sync for Method {}

const METH_NOARGS: c_int = 4;
const PY_FILE_INPUT: c_int = 257;

static WRITE_STATISTICS: Method = Method(std::cell::UnsafeCell::new(MethodDef {
    name: c"write_statistics".as_ptr(),
    function: write_statistics,
    flags: METH_NOARGS,
    doc: ptr::null(),
}));

const EXIT: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("exit.py"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("exit.py holds a zero"),
    };

/// Asks the interpreter to make `os._exit` write the statistics, if there is one and it runs. May be
/// called again, from any thread: once it has been asked, nothing more happens.
pub fn schedule() {
    static ASKED: AtomicBool = AtomicBool::new(false);
    if ASKED.load(Ordering::Relaxed) {
        return;
    }
    let Some(python) = Interpreter::find() else {
        return;
    };
    // SAFETY: both may be called from any thread, the second in an initialised interpreter.
    unsafe {
        if (python.Py_IsInitialized)() != 0
            && !ASKED.swap(true, Ordering::Relaxed)
            && (python.Py_AddPendingCall)(pending, ptr::null_mut()) != 0
        {
            // The queue is full: another time.
            ASKED.store(false, Ordering::Relaxed);
        }
    }
}

/// Runs on the interpreter's main thread, with its lock held. Its answer, 0, is that no Python
/// exception is pending.
unsafe extern "C" fn pending(_: *mut c_void) -> c_int {
    guard((), || {
        let wrapped = Interpreter::find().is_some_and(|python| {
            // SAFETY: the interpreter's lock is held.
            unsafe { run(&python, c"<concertina>", EXIT) }
        });
        if !wrapped {
            message::say("os._exit could not be wrapped: it will leave no statistics");
        }
    });
    0
}

/// Runs `text` as a module of its own, with `write_statistics` in it.
///
/// # Safety
/// The interpreter's lock must be held.
unsafe fn run(python: &Interpreter, name: &CStr, text: &CStr) -> bool {
    // SAFETY: the lock is held; every result is checked before it is used, and what is owned here is
    // let go of.
    unsafe {
        let globals = (python.PyDict_New)();
        let function =
            (python.PyCFunction_NewEx)(WRITE_STATISTICS.0.get(), ptr::null_mut(), ptr::null_mut());
        let code = (python.Py_CompileString)(text.as_ptr(), name.as_ptr(), PY_FILE_INPUT);
        let builtins = (python.PyEval_GetBuiltins)();
        let mut result = ptr::null_mut();
        if ![globals, function, code, builtins].contains(&ptr::null_mut())
            && (python.PyDict_SetItemString)(globals, c"__builtins__".as_ptr(), builtins) == 0
            && (python.PyDict_SetItemString)(globals, c"write_statistics".as_ptr(), function) == 0
        {
            result = (python.PyEval_EvalCode)(code, globals, globals);
        }
        if result.is_null() {
            (python.PyErr_Clear)();
        }
        // Each takes a null for nothing.
        for owned in [result, code, function, globals] {
            (python.Py_DecRef)(owned);
        }
        !result.is_null()
    }
}

/// The function that `exit.py` calls.
unsafe extern "C" fn write_statistics(_: Object, _: Object) -> Object {
    guard((), lifecycle::before_exit);
    guard(ptr::null_mut(), || {
        let python = Interpreter::find();
        // SAFETY: Python called, so it is there and its lock is held.
        python.map_or(ptr::null_mut(), |python| unsafe {
            (python.PyLong_FromLong)(0)
        })
    })
}
