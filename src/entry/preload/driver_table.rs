//! The table of the driver's real functions.

use super::abi::{AccessDesc, AllocationProp, IpcHandle};
use super::hooks::{interposed, retried};
use concertina_engine::driver::LIBRARY;
use concertina_engine::driver::symbol::real_dlsym;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::mem;
use std::ptr;
use std::sync::OnceLock;

macro_rules! table {
    ($name:ident: $($symbol:ident: ($($argument:ident: $kind:ty),*);)*) => {
        /// Functions of the driver by symbol, as far as it has them.
        #[allow(non_snake_case)]
        pub struct $name {
            $(pub $symbol: Option<unsafe extern "C" fn($($kind),*) -> u32>,)*
        }

        impl $name {
            /// The table, filled at the first call.
            #[inline]
            pub fn get() -> &'static $name {
                static TABLE: OnceLock<$name> = OnceLock::new();
                TABLE.get_or_init($name::load)
            }

            fn load() -> $name {
                $name {
                    $($symbol: {
                        let name = concat!(stringify!($symbol), "\0").as_bytes();
                        let address = CStr::from_bytes_with_nul(name).map_or(ptr::null_mut(), find);
                        // SAFETY: the driver's function of this name has this signature (`cuda.h` of
                        // CUDA 11 to 13), and null is no function.
                        unsafe {
                            mem::transmute::<
                                *mut c_void,
                                Option<unsafe extern "C" fn($($kind),*) -> u32>,
                            >(address)
                        }
                    },)*
                }
            }
        }
    };
}

macro_rules! listed {
    ($($symbol:ident $([$function:ident: $bytes:expr])?: $base:literal, $since:literal,
        $stream:ident, ($($argument:ident: $kind:ty),*) => $body:expr;)*) => {
        table!(Listed: $($symbol: ($($argument: $kind),*);)*);
    };
}
interposed!(listed);

macro_rules! listed_retried {
    ($($symbol:ident $([$values:ident; $count:ident])?: $base:literal, $since:literal, $stream:ident,
        $reach:ident, ($($argument:ident: $kind:ty),*);)*) => {
        table!(Retried: $($symbol: ($($argument: $kind),*);)*);
    };
}
retried!(listed_retried);

table! { Asked:
    cuCtxGetCurrent: (context: *mut usize);
    cuCtxGetDevice: (device: *mut c_int);
    cuDevicePrimaryCtxGetState: (device: c_int, flags: *mut c_uint, active: *mut c_int);
    cuDevicePrimaryCtxRetain: (context: *mut usize, device: c_int);
    cuDevicePrimaryCtxRelease_v2: (device: c_int);
    cuDeviceGetDefaultMemPool: (pool: *mut *mut c_void, device: c_int);
    cuStreamGetCtx: (stream: u64, context: *mut usize);
    cuStreamGetId: (stream: u64, number: *mut u64);
    cuStreamIsCapturing: (stream: u64, status: *mut c_uint);
}

/// The driver's own function of a symbol; null where there is none, or no driver.
pub fn find(symbol: &CStr) -> *mut c_void {
    let library = driver();
    if library.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: a live handle, as nobody unloads the driver under a program that uses it.
    unsafe { real_dlsym()(library, symbol.as_ptr()) }
}

/// The driver's library if the process has loaded it, else null. Who loads it decides when.
fn driver() -> *mut c_void {
    // SAFETY: a constant NUL-terminated name; nothing is loaded.
    unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) }
}

/// Calls a function of one of the two tables.
macro_rules! call_in {
    ($table:ident, $symbol:ident($($argument:expr),*)) => {
        match $crate::entry::preload::driver_table::$table::get().$symbol {
            // SAFETY: the arguments are the program's, or point to locals that outlive the call.
            Some(function) => unsafe { function($($argument),*) },
            None => $crate::entry::preload::abi::NOT_FOUND,
        }
    };
}

/// Calls the real function of a hook.
macro_rules! call {
    ($symbol:ident($($argument:expr),*)) => {
        $crate::entry::preload::driver_table::call_in!(Listed, $symbol($($argument),*))
    };
}

/// Calls a function of the driver that has no hook.
macro_rules! ask {
    ($symbol:ident($($argument:expr),*)) => {
        $crate::entry::preload::driver_table::call_in!(Asked, $symbol($($argument),*))
    };
}

/// Calls the real function of a hook that only retries.
macro_rules! repeat {
    ($symbol:ident($($argument:expr),*)) => {
        $crate::entry::preload::driver_table::call_in!(Retried, $symbol($($argument),*))
    };
}
pub(super) use {ask, call, call_in, repeat};
