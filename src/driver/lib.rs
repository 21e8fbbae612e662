//! The CUDA driver API as a table of functions. [`cuda`] fills it from `libcuda.so.1` at run time; the
//! simulated GPU (`src/sim`) has a table of its own.

mod cuda;
mod functions;
pub mod symbol;

pub use self::cuda::{LIBRARY, cuda, is_loaded};

use cudarc::driver::sys::*;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

pub use cudarc::driver::sys;

macro_rules! define_table {
    ($($name:ident: fn($($argument:ident: $kind:ty),*);)*) => {
        /// The driver functions that concertina calls, under the driver's own names.
        #[allow(non_snake_case, missing_docs)]
        #[derive(Clone, Copy)]
        pub struct Functions {
            /// The functions are the simulated GPU's: the time that a call takes means nothing.
            pub simulated: bool,
            $(pub $name: unsafe extern "C" fn($($argument: $kind),*) -> u32,)*
        }
    };
}
driver_functions!(define_table);

impl Functions {
    /// For a thread that the library started: its calls are allowed while other threads capture streams, and
    /// are no part of what is captured.
    pub fn relax_capture_mode(&self) {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: `mode` outlives the call.
        unsafe { (self.cuThreadExchangeStreamCaptureMode)(&mut mode) };
    }

    /// The driver's own name for an error.
    pub fn error_name(&self, error: u32) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: `name` is valid for writing; the driver sets it to a static string.
        let known = unsafe { (self.cuGetErrorName)(error, &mut name) } == 0 && !name.is_null();
        match known {
            // SAFETY: a NUL-terminated static string, as above.
            true => unsafe { CStr::from_ptr(name) }
                .to_string_lossy()
                .into_owned(),
            false => format!("CUDA error {error}"),
        }
    }
}
