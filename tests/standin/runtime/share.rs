//! Memory and events shared between processes.

use crate::driver::{Address, Driver, Pointer, SIGNATURES, check, source};
use crate::thread::{ready, run};
use std::ffi::c_uint;
use std::mem::transmute;

runtime! {
    cudaIpcGetMemHandle(handle: *mut [u8; 64], address: Address) ready().cuIpcGetMemHandle(handle, address);
    cudaIpcCloseMemHandle(address: Address) ready().cuIpcCloseMemHandle(address);
    cudaIpcGetEventHandle(handle: *mut [u8; 64], event: Pointer) ready().cuIpcGetEventHandle(handle, event);
}

/// A handle of 64 bytes as C passes it: by value.
#[derive(Clone, Copy)]
#[repr(C)]
struct Handle([u8; 64]);

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaIpcOpenMemHandle(to: *mut Address, handle: Handle, flags: c_uint) -> u32 {
    run(|| {
        let _: &Driver = ready()?;
        let address = source()?.find("cuIpcOpenMemHandle\0", SIGNATURES, 0)?;
        // SAFETY: the driver's function of this name has this signature (`cuda.h`).
        let open = unsafe {
            transmute::<usize, unsafe extern "C" fn(*mut Address, Handle, c_uint) -> u32>(address)
        };
        // SAFETY: the caller's promise.
        check(unsafe { open(to, handle, flags) })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaIpcOpenEventHandle(to: *mut Pointer, handle: Handle) -> u32 {
    run(|| {
        let _: &Driver = ready()?;
        let address = source()?.find("cuIpcOpenEventHandle\0", SIGNATURES, 0)?;
        // SAFETY: as above.
        let open = unsafe {
            transmute::<usize, unsafe extern "C" fn(*mut Pointer, Handle) -> u32>(address)
        };
        // SAFETY: the caller's promise.
        check(unsafe { open(to, handle) })
    })
}
