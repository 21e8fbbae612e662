//! A stand-in for `libcudart.so.12` and `libcudart.so.13`: the functions of the CUDA runtime that
//! PyTorch and the tests use, over the driver API. `scripts/standin.sh` links it.
//!
//! It reaches the driver as the real runtime does (`dlopen`, `dlsym`, `cuGetProcAddress`), so that
//! what comes between a program and the driver also comes between the two here. Memory, streams and
//! events are the driver's; what is the runtime's own (the current device and the last error of a
//! thread, kernels and variables that a program registers) is here.
//!
//! # Safety
//! The functions ask of their callers what the CUDA runtime asks: outputs are null or may be
//! written, inputs may be read. Their arguments go to the driver, which asks the same.
#![allow(non_snake_case)]
#![allow(clippy::too_many_arguments, reason = "the functions are CUDA's")]

/// Functions of the runtime that are one function of the driver: `name(arguments) ready().function(
/// arguments);` makes the driver ready, calls, and keeps the error as the thread's last one.
macro_rules! runtime {
    ($($name:ident($($argument:ident: $kind:ty),*) $ready:ident().$function:ident($($value:expr),*);)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $kind),*) -> u32 {
            $crate::thread::run(|| {
                let driver = $ready()?;
                // SAFETY: the crate's contract, which the caller keeps.
                unsafe { driver.$function($($value),*) }
            })
        }
    )*};
}

/// The same for functions that take a stream, named in brackets: each is there twice, and to the one
/// that ends in `_ptsz` a null stream is the calling thread's own.
macro_rules! stream_runtime {
    ($($name:ident[$stream:ident]($($argument:ident: $kind:ty),*) $ready:ident().$function:ident($($value:expr),*);)*) => {$(
        runtime! { $name($($argument: $kind),*) $ready().$function($($value),*); }

        const _: () = {
            #[unsafe(export_name = concat!(stringify!($name), "_ptsz"))]
            unsafe extern "C" fn own($($argument: $kind),*) -> u32 {
                let $stream = $crate::thread::own_default($stream);
                // SAFETY: the crate's contract, which the caller keeps.
                unsafe { $name($($argument),*) }
            }
        };
    )*};
}

mod copy;
mod device;
mod driver;
mod entrypoint;
mod error;
mod event;
mod graph;
mod kernel;
mod library;
mod memory;
mod pool;
mod properties;
mod share;
mod stream;
mod thread;
