//! The C library's own `dlsym`.
//!
//! The shared library interposes `dlsym`, and other preloaded libraries may, too. The driver's functions are
//! looked up here, so that the result is the driver's own function and not one that leads back to the pool.

use std::ffi::{CStr, c_char, c_void};
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// The signature of `dlsym`.
pub type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The oldest symbol version of `dlsym` on this architecture, which glibc still has.
const VERSION: &CStr = if cfg!(target_arch = "x86_64") {
    c"GLIBC_2.2.5"
} else {
    c"GLIBC_2.17"
};

static REAL: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// The next `dlsym` after this library's: the C library's, or that of another library in between.
///
/// One relaxed load after the first call, which allocates nothing if the look-up succeeds.
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
        find_nothing as *mut c_void
    } else {
        found
    };
    REAL.store(found, Relaxed);
    found
}

/// In place of `dlsym` if the C library has none of this version.
unsafe extern "C" fn find_nothing(_: *mut c_void, _: *const c_char) -> *mut c_void {
    ptr::null_mut()
}
