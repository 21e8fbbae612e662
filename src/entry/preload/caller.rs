//! The library that a call came from: the nearest one on the stack that is neither this library nor CUDA's runtime or
//! driver. Walking the stack takes microseconds.

use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::{Mutex, PoisonError};

/// The callers that are no libraries, such as code made at run time.
const UNKNOWN: &str = "unknown";

/// Libraries of which the names begin so only pass calls on.
const PASSING: [&str; 2] = ["libcudart", "libcuda.so"];

/// No program's stack is looked at further down.
const DEEPEST: usize = 64;

/// The unwinder of the compiler's run-time library, which Rust's own panics use.
/// (Itanium C++ ABI, exception handling, level I.)
///
/// cbindgen:ignore
mod unwind {
    use super::{c_int, c_void};

    pub type Context = *mut c_void;
    pub const NO_REASON: c_int = 0;
    pub const END_OF_STACK: c_int = 5;

    unsafe extern "C" {
        pub fn _Unwind_Backtrace(
            visit: extern "C" fn(Context, *mut c_void) -> c_int,
            argument: *mut c_void,
        ) -> c_int;
        pub fn _Unwind_GetIP(context: Context) -> usize;
    }
}

struct Walk {
    depth: usize,
    found: Option<&'static str>,
}

/// The file name of the library, or of the program.
#[cold]
#[inline(never)]
pub fn name() -> &'static str {
    let mut walk = Walk {
        depth: 0,
        found: None,
    };
    // SAFETY: `visit` has the signature that is asked for, unwinds nothing, and gets `walk`, which
    // outlives the call.
    unsafe { unwind::_Unwind_Backtrace(visit, (&raw mut walk).cast()) };
    walk.found.unwrap_or(UNKNOWN)
}

extern "C" fn visit(context: unwind::Context, walk: *mut c_void) -> c_int {
    // SAFETY: the unwinder hands over a live context, and `name` its walk.
    let (walk, address) = unsafe { (&mut *walk.cast::<Walk>(), unwind::_Unwind_GetIP(context)) };
    walk.depth += 1;
    walk.found = object(address);
    match walk.found.is_some() || walk.depth == DEEPEST {
        true => unwind::END_OF_STACK,
        false => unwind::NO_REASON,
    }
}

/// The name of what the code at an address belongs to; `None` where that only passes calls on.
fn object(address: usize) -> Option<&'static str> {
    /// By address: a program has few places that call. A library that takes the place of another one
    /// that was unloaded may go by its name.
    static KNOWN: Mutex<Option<HashMap<usize, Option<&'static str>>>> = Mutex::new(None);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);

    let found = known().get_or_insert_default().get(&address).copied();
    // Not under our lock: the linker has one of its own, and may call a constructor that allocates.
    found.unwrap_or_else(|| {
        let found = look_up(address);
        *known()
            .get_or_insert_default()
            .entry(address)
            .or_insert(found)
    })
}

fn look_up(address: usize) -> Option<&'static str> {
    let file_of = |address: usize| {
        let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: `info` is filled in where the answer is not 0; its name is a string of the linker's.
        unsafe {
            let found = libc::dladdr(address as *const c_void, info.as_mut_ptr()) != 0;
            let info = info.assume_init();
            let name = (found && !info.dli_fname.is_null()).then(|| CStr::from_ptr(info.dli_fname));
            name.map(|name| (info.dli_fbase, name))
        }
    };
    let own = file_of(name as *const () as usize).map(|(base, _)| base);
    let Some((base, file)) = file_of(address) else {
        return Some(UNKNOWN);
    };
    let path = file.to_string_lossy();
    let name = path.rsplit('/').next().unwrap_or_default();
    let passes = Some(base) == own || PASSING.iter().any(|it| name.starts_with(it));
    (!passes).then(|| &*String::from(name).leak())
}
