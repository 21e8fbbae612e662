//! Errors as PyTorch throws them: C++ exceptions that it turns into Python's.
//!
//! `torch.OutOfMemoryError` is `c10::OutOfMemoryError`: a `c10::Error` with another table of virtual
//! functions. Its constructor is inline, so the object is made as `c10::Error` and given that table.

use super::cxx::CxxString;
use super::symbols::Library;
use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::transmute;
use std::sync::OnceLock;

/// An error to throw, with its message.
pub enum Failure {
    /// `torch.OutOfMemoryError`.
    OutOfMemory(String),
    /// `RuntimeError`.
    Other(String),
}

/// Bytes for the exception: more than any `c10::Error` needs (128 in PyTorch 2.11).
const BYTES: usize = 4096;

/// `c10::SourceLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

type Construct = unsafe extern "C-unwind" fn(*mut c_void, SourceLocation, *mut CxxString);
type Throw = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, *mut c_void) -> !;
type Fail = unsafe extern "C-unwind" fn(*const c_char, *const c_char, u32, *const c_char);

/// The functions of PyTorch and libstdc++ that throw `c10::OutOfMemoryError`.
struct OutOfMemoryError {
    allocate_exception: unsafe extern "C" fn(usize) -> *mut c_void,
    construct: Construct,
    throw: Throw,
    /// The first virtual function; the table's first is the complete destructor.
    table: *const *mut c_void,
    type_info: *mut c_void,
}

// SAFETY: functions and constants of libraries that are never unloaded.
unsafe impl Send for OutOfMemoryError {}
// SAFETY: as above.
unsafe impl Sync for OutOfMemoryError {}

impl OutOfMemoryError {
    fn find() -> Option<OutOfMemoryError> {
        let c10 = Library::loaded(c"libc10.so")?;
        let c10_cuda = Library::loaded(c"libc10_cuda.so")?;
        let cxx = Library::loaded(c"libstdc++.so.6")?;
        let table = c10_cuda.symbol(c"_ZTVN3c1016OutOfMemoryErrorE")?;
        // SAFETY: the mangled names say what each function takes; a table of virtual functions has
        // two words before its first function.
        unsafe {
            Some(OutOfMemoryError {
                allocate_exception: transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(usize) -> *mut c_void,
                >(cxx.symbol(c"__cxa_allocate_exception")?),
                construct: transmute::<*mut c_void, Construct>(c10.symbol(
                    c"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
                )?),
                throw: transmute::<*mut c_void, Throw>(cxx.symbol(c"__cxa_throw")?),
                table: table.cast::<*mut c_void>().add(2),
                type_info: c10_cuda.symbol(c"_ZTIN3c1016OutOfMemoryErrorE")?,
            })
        }
    }

    fn get() -> Option<&'static OutOfMemoryError> {
        static FOUND: OnceLock<Option<OutOfMemoryError>> = OnceLock::new();
        FOUND.get_or_init(OutOfMemoryError::find).as_ref()
    }

    /// # Safety
    /// Every frame up to PyTorch's must let a C++ exception through.
    unsafe fn throw(&self, mut message: CxxString) -> ! {
        // SAFETY: the constructor takes the string's text over, so that nothing of it is left to be
        // freed. The exception is big enough, and it is thrown with its own type and destructor.
        unsafe {
            let exception = (self.allocate_exception)(BYTES);
            (self.construct)(exception, here(), &mut message);
            exception.cast::<*const *mut c_void>().write(self.table);
            (self.throw)(exception, self.type_info, *self.table)
        }
    }
}

const FUNCTION: &CStr = c"allocate";
const FILE: &CStr = c"concertina";

fn here() -> SourceLocation {
    SourceLocation {
        function: FUNCTION.as_ptr(),
        file: FILE.as_ptr(),
        line: 0,
    }
}

/// Whether `torch.OutOfMemoryError` can be thrown.
pub fn has_out_of_memory_error() -> bool {
    OutOfMemoryError::get().is_some()
}

/// Throws the failure into PyTorch. Returns its message only where that is not possible.
///
/// # Safety
/// Every frame up to PyTorch's must let a C++ exception through.
pub unsafe fn raise(failure: Failure) -> String {
    let message = match failure {
        Failure::OutOfMemory(message) => {
            if let Some(error) = OutOfMemoryError::get()
                && let Some(text) = CxxString::of(message.as_bytes())
            {
                drop(message);
                // SAFETY: as promised by the caller.
                unsafe { error.throw(text) }
            }
            message
        }
        Failure::Other(message) => message,
    };
    let fail = Library::loaded(c"libc10.so")
        .and_then(|c10| c10.symbol(c"_ZN3c106detail14torchCheckFailEPKcS2_jS2_"));
    if let (Some(fail), Ok(text)) = (fail, CString::new(message.as_str())) {
        // SAFETY: the mangled name says what the function takes. It copies the text and throws; what
        // is owned here is dropped on the way.
        unsafe {
            let fail = transmute::<*mut c_void, Fail>(fail);
            fail(FUNCTION.as_ptr(), FILE.as_ptr(), 0, text.as_ptr());
        }
    }
    message
}
