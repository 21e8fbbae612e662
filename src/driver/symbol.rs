//! The C library's own `dlsym`.
//!
//! The shared library puts a `dlsym` of its own before it, and so may others. What is looked up for
//! the pool has to be the driver's function and nothing that leads back to the pool, so it is asked
//! for here.

use std::ffi::{CStr, c_char, c_void};
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// The signature of `dlsym`.
pub type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The version under which the C library has had `dlsym` from its beginning on this kind of machine,
/// and still has it.
const VERSION: &CStr = if cfg!(target_arch = "x86_64") {
    c"GLIBC_2.2.5"
} else {
    c"GLIBC_2.17"
};

static REAL: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// The `dlsym` that comes after this library: the C library's, or that of another one between.
///
/// One relaxed load but for the first call, which allocates nothing where the look-up succeeds.
#[inline]
pub fn real_dlsym() -> Dlsym {
    let mut real = REAL.load(Relaxed);
    if real.is_null() {
        real = find();
    }
    // SAFETY: `find` stored a function of this signature.
    unsafe { mem::transmute::<*mut c_void, Dlsym>(real) }
}

#[cold]
fn find() -> *mut c_void {
    // SAFETY: constant NUL-terminated names. No library hooks `dlvsym` to find the same name again.
    let found = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), VERSION.as_ptr()) };
    let found = if found.is_null() {
        nothing as *mut c_void
    } else {
        found
    };
    REAL.store(found, Relaxed);
    found
}

/// Stands in where the C library has no `dlsym`, which none is known to.
unsafe extern "C" fn nothing(_: *mut c_void, _: *const c_char) -> *mut c_void {
    ptr::null_mut()
}
