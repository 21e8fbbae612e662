//! Look-up of the driver's functions through the runtime.

use crate::driver::{INVALID, Pointer, source, version};
use crate::thread::run;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong};

/// `cudaDriverEntryPointQueryResult`.
const FOUND: c_uint = 0;
const NOT_FOUND: c_uint = 1;

/// # Safety
/// As the runtime asks of `cudaGetDriverEntryPointByVersion`'s callers.
unsafe fn find(
    symbol: *const c_char,
    to: *mut Pointer,
    version: c_int,
    flags: c_ulonglong,
    status: *mut c_uint,
) -> u32 {
    run(|| {
        if symbol.is_null() || to.is_null() {
            return Err(INVALID);
        }
        // SAFETY: the caller's promise: text that ends in a zero.
        let name = unsafe { CStr::from_ptr(symbol) }.to_bytes_with_nul();
        let name = std::str::from_utf8(name).map_err(|_| INVALID)?;
        let found = source()?.find(name, version, flags).unwrap_or(0);
        // SAFETY: the caller's promise; the status may be null.
        unsafe {
            to.write(found as Pointer);
            if !status.is_null() {
                status.write(if found == 0 { NOT_FOUND } else { FOUND });
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDriverEntryPoint(
    symbol: *const c_char,
    to: *mut Pointer,
    flags: c_ulonglong,
    status: *mut c_uint,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { find(symbol, to, version(), flags, status) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDriverEntryPointByVersion(
    symbol: *const c_char,
    to: *mut Pointer,
    version: c_uint,
    flags: c_ulonglong,
    status: *mut c_uint,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { find(symbol, to, version as c_int, flags, status) }
}

/// `cudaEnableLegacyStream` and `cudaEnablePerThreadDefaultStream`.
const LEGACY_STREAM: c_ulonglong = 1;
const OWN_STREAM: c_ulonglong = 2;

/// The flags as programs mean them whose default stream is the calling thread's own.
fn own(flags: c_ulonglong) -> c_ulonglong {
    match flags & LEGACY_STREAM {
        0 => flags | OWN_STREAM,
        _ => flags,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDriverEntryPoint_ptsz(
    symbol: *const c_char,
    to: *mut Pointer,
    flags: c_ulonglong,
    status: *mut c_uint,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { find(symbol, to, version(), own(flags), status) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDriverEntryPointByVersion_ptsz(
    symbol: *const c_char,
    to: *mut Pointer,
    version: c_uint,
    flags: c_ulonglong,
    status: *mut c_uint,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { find(symbol, to, version as c_int, own(flags), status) }
}
