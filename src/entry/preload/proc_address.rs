//! `cuGetProcAddress`: answers with the hook in place of the driver's function.

use super::abi::Answer;
use super::exports::Hook;
use super::{driver_table, mutation};
use std::ffi::{CStr, CString, c_char, c_int, c_ulonglong, c_void};
use std::ptr;

/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM` and `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const LEGACY: c_ulonglong = 1;
const PER_THREAD: c_ulonglong = 2;

/// No version of CUDA from here on is known: a function may have got a new form.
const UNKNOWN_VERSION: c_int = 14000;

/// The flags as the per-thread form of the function reads them.
pub fn per_thread(flags: c_ulonglong) -> c_ulonglong {
    match flags & (LEGACY | PER_THREAD) {
        0 => flags | PER_THREAD,
        _ => flags,
    }
}

/// Writes the hook where the driver, which answered with `status`, wrote its own function.
pub fn find(
    name: *const c_char,
    function: *mut *mut c_void,
    version: c_int,
    flags: c_ulonglong,
    status: u32,
) -> Answer {
    if status != 0 || name.is_null() || function.is_null() || mutation::is_on("proc_address") {
        return Some(status);
    }
    // SAFETY: the driver read the name and wrote the function.
    let (name, found) = unsafe { (CStr::from_ptr(name).to_bytes(), *function) };
    let hook = Hook::for_version(name, version, flags & PER_THREAD != 0, |symbol| {
        !find_symbol(symbol).is_null()
    });
    if let Some(hook) = hook.filter(|hook| !found.is_null() && is_form(hook, found, version)) {
        // SAFETY: as above.
        unsafe { *function = hook.function.0.cast_mut() };
    }
    Some(status)
}

/// Whether the driver found the form of the function that the hook replaces.
fn is_form(hook: &Hook, found: *mut c_void, version: c_int) -> bool {
    // The driver's symbol is compared only where it must be: it may answer with another address.
    version < UNKNOWN_VERSION || find_symbol(hook.symbol) == found
}

/// The driver's own function of a symbol; null where there is none.
fn find_symbol(symbol: &str) -> *mut c_void {
    CString::new(symbol).map_or(ptr::null_mut(), |symbol| driver_table::find(&symbol))
}
