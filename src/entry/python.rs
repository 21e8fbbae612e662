//! Running Python code in the process's interpreter, if it has one.
//!
//! Nothing of Python is linked: its functions are looked up in the process. A script is scheduled as a
//! pending call, which the interpreter makes on its main thread before that thread's next statement.

use super::panic_guard::guard;
use concertina_engine::process::exit;
use concertina_engine::process::stats_output;
use concertina_engine::util::message;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// A `PyObject *`.
pub type Object = *mut c_void;

/// The interpreter's functions that are used here: of its stable ABI, or as old.
macro_rules! interpreter {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        #[allow(non_snake_case)]
        pub struct Interpreter {
            $(pub $name: unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?,)*
        }

        impl Interpreter {
            /// `None` where the process holds no Python.
            pub fn get() -> Option<&'static Interpreter> {
                static FOUND: OnceLock<Interpreter> = OnceLock::new();
                if FOUND.get().is_none() {
                    // Python may be loaded later.
                    let _ = FOUND.set(Interpreter::find()?);
                }
                FOUND.get()
            }

            fn find() -> Option<Interpreter> {
                Some(Interpreter {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: the name ends in a NUL; the function that Python exports under it
                        // has this signature in every Python 3.
                        unsafe {
                            let address = libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr().cast());
                            if address.is_null() {
                                return None;
                            }
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C-unwind" fn($($argument),*) $(-> $result)?,
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
    PyErr_Fetch: fn(*mut Object, *mut Object, *mut Object);
    PyErr_Restore: fn(Object, Object, Object);
    PyGILState_Ensure: fn() -> c_int;
    PyGILState_Release: fn(c_int);
    PyObject_CallObject: fn(Object, Object) -> Object;
    PyLong_FromSize_t: fn(usize) -> Object;
    PyTuple_New: fn(isize) -> Object;
    PyTuple_SetItem: fn(Object, isize, Object) -> c_int;
    Py_DecRef: fn(Object);
    Py_CompileString: fn(*const c_char, *const c_char, c_int) -> Object;
    PyEval_EvalCode: fn(Object, Object, Object) -> Object;
}

const PY_FILE_INPUT: c_int = 257;

impl Interpreter {
    /// Runs `body` with the interpreter's lock (the GIL), on any thread and in any state: a pending exception
    /// is kept and restored, and one that `body` leaves is cleared. `None` if the interpreter is not
    /// initialised or has been finalised. Does not return if it is finalised meanwhile: then Python ends the
    /// thread.
    ///
    /// # Safety
    /// The caller holds no lock for which a thread that holds the GIL may wait.
    pub unsafe fn with_gil<T>(&self, body: impl FnOnce() -> T) -> Option<T> {
        // SAFETY: any thread may ask whether the interpreter is initialised, and once it is, acquire its
        // lock, which is released again; an exception is fetched and restored under it.
        unsafe {
            if (self.Py_IsInitialized)() == 0 {
                return None;
            }
            let state = (self.PyGILState_Ensure)();
            let mut error = [ptr::null_mut(); 3];
            let [kind, value, trace] = &mut error;
            (self.PyErr_Fetch)(kind, value, trace);
            let result = body();
            (self.PyErr_Clear)();
            (self.PyErr_Restore)(error[0], error[1], error[2]);
            (self.PyGILState_Release)(state);
            Some(result)
        }
    }
}

/// Python code that is run once, with global variables of its own.
pub struct Script {
    name: &'static CStr,
    text: &'static CStr,
    functions: fn() -> Vec<(&'static CStr, usize)>,
    failure: &'static str,
    /// It is scheduled, or has been.
    scheduled: AtomicBool,
    /// It has run.
    ran: AtomicBool,
}

/// The source of a script, a file beside this one, as a C string.
macro_rules! source {
    ($path:literal) => {
        match std::ffi::CStr::from_bytes_with_nul(concat!(include_str!($path), "\0").as_bytes()) {
            Ok(text) => text,
            Err(_) => panic!(concat!($path, " holds a zero")),
        }
    };
}
pub(super) use source;

static EXIT: Script = Script::new(
    c"<concertina: exit.py>",
    source!("exit.py"),
    || {
        vec![(
            c"write_statistics",
            write_statistics as extern "C" fn() as usize,
        )]
    },
    "os._exit could not be wrapped: it will leave no statistics",
);

/// Has `os._exit` write the statistics first, if they are wanted and the process has an interpreter. May be
/// called again, from any thread.
pub fn schedule_exit_hook() {
    if stats_output::is_wanted() {
        EXIT.schedule();
    }
}

extern "C" fn write_statistics() {
    guard((), exit::write_at_exit);
}

impl Script {
    /// `name` stands for the file in a traceback, `failure` is printed if the script raises. `functions`
    /// lists the addresses of C functions by name, which the script finds in its dictionary `functions` and
    /// calls by `ctypes`.
    pub const fn new(
        name: &'static CStr,
        text: &'static CStr,
        functions: fn() -> Vec<(&'static CStr, usize)>,
        failure: &'static str,
    ) -> Script {
        Script {
            name,
            text,
            functions,
            failure,
            scheduled: AtomicBool::new(false),
            ran: AtomicBool::new(false),
        }
    }

    /// Has the interpreter run the script soon, once; does nothing in a process without one. Any thread may
    /// call it.
    pub fn schedule(&'static self) {
        if self.scheduled.load(Ordering::Relaxed) {
            return;
        }
        let Some(python) = Interpreter::get() else {
            return;
        };
        let this = ptr::from_ref(self).cast_mut().cast();
        // SAFETY: any thread may call both, the second once the interpreter is initialised.
        unsafe {
            if (python.Py_IsInitialized)() != 0
                && !self.scheduled.swap(true, Ordering::Relaxed)
                && (python.Py_AddPendingCall)(pending, this) != 0
            {
                // The queue is full: to be scheduled again by a later call.
                self.scheduled.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Runs the script on this thread, unless it has run or the process has no interpreter.
    pub fn run_now(&self) {
        let Some(python) = Interpreter::get() else {
            return;
        };
        // SAFETY: any thread may ask whether the interpreter is initialised, and once it is, acquire
        // its lock, which is released again.
        unsafe {
            if (python.Py_IsInitialized)() != 0 {
                let state = (python.PyGILState_Ensure)();
                self.run_once(python);
                (python.PyGILState_Release)(state);
            }
        }
    }

    /// Runs the script unless it has run, and prints its `failure` if it raises.
    ///
    /// # Safety
    /// The interpreter's lock must be held.
    unsafe fn run_once(&self, python: &Interpreter) {
        // SAFETY: as promised by the caller.
        if !self.ran.swap(true, Ordering::Relaxed) && !unsafe { self.run(python) } {
            message::print(self.failure);
        }
    }

    /// Lets the script be scheduled and run once more.
    pub fn reset(&self) {
        self.ran.store(false, Ordering::Relaxed);
        self.scheduled.store(false, Ordering::Relaxed);
    }

    /// Runs the script. False if it raises.
    ///
    /// # Safety
    /// The interpreter's lock must be held.
    unsafe fn run(&self, python: &Interpreter) -> bool {
        let set = |dict, name: &CStr, value: Object| {
            // SAFETY: the lock is held, and neither object is null.
            !value.is_null()
                && unsafe { (python.PyDict_SetItemString)(dict, name.as_ptr(), value) == 0 }
        };
        // SAFETY: the lock is held; every result is checked before it is used, and references that
        // are owned here are released.
        unsafe {
            let globals = (python.PyDict_New)();
            let functions = (python.PyDict_New)();
            let code =
                (python.Py_CompileString)(self.text.as_ptr(), self.name.as_ptr(), PY_FILE_INPUT);
            let builtins = (python.PyEval_GetBuiltins)();
            let mut ready = ![globals, functions, code, builtins].contains(&ptr::null_mut())
                && set(globals, c"__builtins__", builtins)
                && set(globals, c"functions", functions);
            for (name, address) in (self.functions)() {
                let address = (python.PyLong_FromSize_t)(address);
                ready = ready && set(functions, name, address);
                (python.Py_DecRef)(address);
            }
            let mut result = ptr::null_mut();
            if ready {
                result = (python.PyEval_EvalCode)(code, globals, globals);
            }
            if result.is_null() {
                (python.PyErr_Clear)();
            }
            // `Py_DecRef` ignores null.
            for owned in [result, code, functions, globals] {
                (python.Py_DecRef)(owned);
            }
            !result.is_null()
        }
    }
}

/// The pending call: runs on the interpreter's main thread, with its lock held. Returns 0, as no Python
/// exception is pending afterwards.
unsafe extern "C" fn pending(script: *mut c_void) -> c_int {
    guard((), || {
        // SAFETY: `schedule` passed a static.
        let script = unsafe { &*script.cast::<Script>() };
        if let Some(python) = Interpreter::get() {
            // SAFETY: the interpreter's lock is held.
            unsafe { script.run_once(python) };
        }
    });
    0
}
