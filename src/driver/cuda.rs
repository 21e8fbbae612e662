//! Loading the CUDA driver, `libcuda.so.1`, at run time: nothing of CUDA is needed to build or to load the
//! library.

use crate::Functions;
use crate::driver_functions;
use crate::symbol::real_dlsym;
use cudarc::driver::sys::*;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::mem;

/// The driver's library. Not `libcuda.so`, which is a stub on machines with the CUDA toolkit.
pub const LIBRARY: &CStr = c"libcuda.so.1";

/// Whether the process has loaded the driver.
pub fn is_loaded() -> bool {
    // SAFETY: a constant NUL-terminated name; the flag loads nothing, and the handle is closed again.
    unsafe {
        let how = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
        let library = libc::dlopen(LIBRARY.as_ptr(), how);
        !library.is_null() && libc::dlclose(library) == 0
    }
}

/// Loads the CUDA driver of this machine. An error is one line that says why there is none.
pub fn cuda() -> Result<Functions, String> {
    // SAFETY: a constant NUL-terminated name; loading the driver runs only its own initialisers.
    // It is never unloaded.
    let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        return Err(format!("no CUDA driver: {}", last_error()));
    }
    let find = |name: &str| {
        let symbol = CString::new(name).map_err(|_| String::from("a name holds a NUL"))?;
        // SAFETY: a live handle and a NUL-terminated name.
        let address = unsafe { real_dlsym()(library, symbol.as_ptr()) };
        match address.is_null() {
            true => Err(format!(
                "the CUDA driver has no {name}: it is older than CUDA 12.5"
            )),
            false => Ok(address),
        }
    };
    macro_rules! load {
        ($($name:ident: fn($($argument:ident: $kind:ty),*);)*) => {
            Functions {
                simulated: false,
                $($name: {
                    let address = find(stringify!($name))?;
                    // SAFETY: the driver's function of this name has this signature
                    // (`cuda.h` of CUDA 12 and 13); `CUresult` is a 32-bit number.
                    unsafe {
                        mem::transmute::<
                            *mut c_void,
                            unsafe extern "C" fn($($kind),*) -> u32,
                        >(address)
                    }
                },)*
            }
        };
    }
    Ok(driver_functions!(load))
}

fn last_error() -> String {
    // SAFETY: dlerror returns null or a string that stays valid until the next call on this thread.
    let message = unsafe { libc::dlerror() };
    if message.is_null() {
        return String::from("it could not be loaded");
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(message) }
        .to_string_lossy()
        .into_owned()
}
