//! The seam to the GPU: the CUDA driver API's own functions, as a table. `cuda` fills it from
//! `libcuda.so.1` at run time, `sim` from the simulated GPU under `tests/sim`.

mod functions;
mod cuda;
mod sim;

use cudarc::driver::sys::*;
use functions::driver_functions;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

macro_rules! define_table {
    ($($name:ident: fn($($argument:ident: $kind:ty),*);)*) => {
        /// The driver functions that concertina calls, under the driver's own names.
        #[allow(non_snake_case, missing_docs)]
        #[derive(Clone, Copy)]
        pub struct Functions {
            $(pub $name: unsafe extern "C" fn($($argument: $kind),*) -> u32,)*
        }

        /// The names in [`Functions`], in order.
        pub const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}
driver_functions!(define_table);
