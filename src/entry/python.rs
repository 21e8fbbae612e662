//! What has to be done inside the Python interpreter, where the process is one.
//!
//! Nothing of Python is linked: its functions are looked up in the process. Work is handed over as a
//! pending call, which the interpreter makes on its main thread before that thread's next statement.

use super::panic_guard::guard;
use concertina_engine::process::lifecycle;
use concertina_engine::util::message;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

pub type Object = *mut c_void;

/// The interpreter's functions that are used here: of its stable ABI, or there as long.
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
                    // It may come later.
                    let _ = FOUND.set(Interpreter::find()?);
                }
                FOUND.get()
            }

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
    /// Does something that needs the interpreter's lock, whatever this thread is at: an exception that is being
    /// handled is put aside meanwhile, and one that `act` leaves is dropped. `None` where the interpreter has
    /// ended, or not begun. Does not return where it ends meanwhile: then Python ends the thread.
    ///
    /// # Safety
    /// The caller holds no lock that whoever has the interpreter's may wait for.
    pub unsafe fn aside<T>(&self, act: impl FnOnce() -> T) -> Option<T> {
        // SAFETY: any thread may ask whether the interpreter is initialised, and once it is, wait for its lock,
        // which is let go of again; an exception is fetched and restored under it.
        unsafe {
            if (self.Py_IsInitialized)() == 0 {
                return None;
            }
            let state = (self.PyGILState_Ensure)();
            let mut error = [ptr::null_mut(); 3];
            let [kind, value, trace] = &mut error;
            (self.PyErr_Fetch)(kind, value, trace);
            let done = act();
            (self.PyErr_Clear)();
            (self.PyErr_Restore)(error[0], error[1], error[2]);
            (self.PyGILState_Release)(state);
            Some(done)
        }
    }
}

/// Python that is run once, as a module of its own that nobody can import.
pub struct Script {
    /// What it is called in a traceback.
    pub name: &'static CStr,
    /// The source.
    pub text: &'static CStr,
    /// Functions of ours that it calls by `ctypes`: their addresses, by name, are its `functions`.
    pub functions: fn() -> Vec<(&'static CStr, usize)>,
    /// What to say where it fails.
    pub failure: &'static str,
    /// It has been handed over.
    pub asked: AtomicBool,
    /// It has run.
    pub ran: AtomicBool,
}

/// The source of a script as a C string.
macro_rules! source {
    ($path:literal) => {
        match std::ffi::CStr::from_bytes_with_nul(concat!(include_str!($path), "\0").as_bytes()) {
            Ok(text) => text,
            Err(_) => panic!(concat!($path, " holds a zero")),
        }
    };
}
pub(super) use source;

static EXIT: Script = Script {
    name: c"<concertina: exit.py>",
    text: source!("exit.py"),
    functions: || {
        vec![(
            c"write_statistics",
            write_statistics as extern "C" fn() as usize,
        )]
    },
    failure: "os._exit could not be wrapped: it will leave no statistics",
    asked: AtomicBool::new(false),
    ran: AtomicBool::new(false),
};

/// Asks the interpreter, if there is one and it runs, to make `os._exit` write the statistics where
/// they are wanted, and to fit PyTorch's functions to the library. May be called again, from any
/// thread: what has been asked for is not asked for again.
pub fn schedule() {
    schedule_exit();
    super::torch::ATTACH.schedule();
}

/// The first half of it alone, where PyTorch is none of our business.
pub fn schedule_exit() {
    if lifecycle::wants_statistics() {
        EXIT.schedule();
    }
}

extern "C" fn write_statistics() {
    guard((), lifecycle::before_exit);
}

impl Script {
    pub fn schedule(&'static self) {
        if self.asked.load(Ordering::Relaxed) {
            return;
        }
        let Some(python) = Interpreter::get() else {
            return;
        };
        let this = ptr::from_ref(self).cast_mut().cast();
        // SAFETY: both may be called from any thread, the second in an initialised interpreter.
        unsafe {
            if (python.Py_IsInitialized)() != 0
                && !self.asked.swap(true, Ordering::Relaxed)
                && (python.Py_AddPendingCall)(pending, this) != 0
            {
                // The queue is full: another time.
                self.asked.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Runs the script here and now, in a process whose interpreter runs, unless it has run.
    pub fn run_now(&self) {
        let Some(python) = Interpreter::get() else {
            return;
        };
        // SAFETY: any thread may ask whether the interpreter is initialised, and once it is, wait for
        // its lock, which is let go of again.
        unsafe {
            if (python.Py_IsInitialized)() != 0 {
                let state = (python.PyGILState_Ensure)();
                self.run_once(python);
                (python.PyGILState_Release)(state);
            }
        }
    }

    /// Runs the script unless it has run, and says so where it fails.
    ///
    /// # Safety
    /// The interpreter's lock must be held.
    unsafe fn run_once(&self, python: &Interpreter) {
        // SAFETY: as promised by the caller.
        if !self.ran.swap(true, Ordering::Relaxed) && !unsafe { self.run(python) } {
            message::print(self.failure);
        }
    }

    /// Has the script run again, although it has run.
    pub fn run_again(&self) {
        self.ran.store(false, Ordering::Relaxed);
        self.asked.store(false, Ordering::Relaxed);
    }

    /// # Safety
    /// The interpreter's lock must be held.
    unsafe fn run(&self, python: &Interpreter) -> bool {
        let set = |dict, name: &CStr, value: Object| {
            // SAFETY: the lock is held, and neither object is null.
            !value.is_null()
                && unsafe { (python.PyDict_SetItemString)(dict, name.as_ptr(), value) == 0 }
        };
        // SAFETY: the lock is held; every result is checked before it is used, and what is owned
        // here is let go of.
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
            // Each takes a null for nothing.
            for owned in [result, code, functions, globals] {
                (python.Py_DecRef)(owned);
            }
            !result.is_null()
        }
    }
}

/// Runs on the interpreter's main thread, with its lock held. Its answer, 0, is that no Python
/// exception is pending.
unsafe extern "C" fn pending(script: *mut c_void) -> c_int {
    guard((), || {
        // SAFETY: `schedule` handed over a static.
        let script = unsafe { &*script.cast::<Script>() };
        if let Some(python) = Interpreter::get() {
            // SAFETY: the interpreter's lock is held.
            unsafe { script.run_once(python) };
        }
    });
    0
}
