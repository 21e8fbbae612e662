//! Memory of devices and of the host.

use crate::driver::{Address, Answer, Driver, INVALID, Pointer, version};
use crate::thread::{ready, run};
use std::ffi::{c_int, c_uint};

/// What sizes of 0 get: success, and null.
pub(crate) fn something<T>(to: *mut T, bytes: usize, null: T) -> Answer<bool> {
    if to.is_null() {
        return Err(INVALID);
    }
    if bytes == 0 {
        // SAFETY: the caller's promise: an output that is not null may be written.
        unsafe { to.write(null) };
    }
    Ok(bytes > 0)
}

runtime! {
    cudaMemGetInfo(free: *mut usize, total: *mut usize) ready().cuMemGetInfo(free, total);
    cudaHostAlloc(to: *mut Pointer, bytes: usize, flags: c_uint) ready().host_alloc(to, bytes, flags);
    cudaMallocHost(to: *mut Pointer, bytes: usize) ready().host_alloc(to, bytes, 0);
    cudaHostRegister(address: Pointer, bytes: usize, flags: c_uint) ready().cuMemHostRegister(address, bytes, flags);
    cudaHostUnregister(address: Pointer) ready().cuMemHostUnregister(address);
    cudaHostGetDevicePointer(to: *mut Address, address: Pointer, flags: c_uint) ready().cuMemHostGetDevicePointer(to, address, flags);
    cudaHostGetFlags(flags: *mut c_uint, address: Pointer) ready().cuMemHostGetFlags(flags, address);
    cudaMalloc(address: *mut Address, bytes: usize) ready().malloc(address, bytes);
    cudaMallocManaged(address: *mut Address, bytes: usize, flags: c_uint) ready().cuMemAllocManaged(address, bytes, flags);
    cudaMallocPitch(address: *mut Address, pitch: *mut usize, width: usize, height: usize) ready().malloc_rows(address, pitch, width, height);
    cudaFree(address: Address) ready().cuMemFree(address);
    cudaFreeHost(address: Pointer) ready().host_free(address);
}

impl Driver {
    unsafe fn malloc(&self, address: *mut Address, bytes: usize) -> Answer {
        match something(address, bytes, 0)? {
            // SAFETY: the caller's promise.
            true => unsafe { self.cuMemAlloc(address, bytes) },
            false => Ok(()),
        }
    }

    unsafe fn malloc_rows(
        &self,
        address: *mut Address,
        pitch: *mut usize,
        width: usize,
        height: usize,
    ) -> Answer {
        if pitch.is_null() {
            return Err(INVALID);
        }
        if something(address, width.min(height), 0)? {
            // SAFETY: the caller's promise.
            return unsafe { self.cuMemAllocPitch(address, pitch, width, height, 4) };
        }
        // SAFETY: the caller's promise.
        unsafe { pitch.write(0) };
        Ok(())
    }

    unsafe fn host_alloc(&self, to: *mut Pointer, bytes: usize, flags: c_uint) -> Answer {
        match something(to, bytes, std::ptr::null_mut())? {
            // SAFETY: the caller's promise.
            true => unsafe { self.cuMemHostAlloc(to, bytes, flags) },
            false => Ok(()),
        }
    }

    unsafe fn host_free(&self, address: Pointer) -> Answer {
        match address.is_null() {
            true => Ok(()),
            // SAFETY: the caller's promise.
            false => unsafe { self.cuMemFreeHost(address) },
        }
    }
}

/// `cudaPitchedPtr`.
#[repr(C)]
struct Pitched {
    address: Address,
    pitch: usize,
    width: usize,
    height: usize,
}

/// `cudaExtent`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Extent {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMalloc3D(to: *mut Pitched, extent: Extent) -> u32 {
    run(|| {
        let driver = ready()?;
        let mut made = Pitched {
            address: 0,
            pitch: 0,
            width: extent.width,
            height: extent.height,
        };
        let rows = extent.height.checked_mul(extent.depth).ok_or(INVALID)?;
        if to.is_null() {
            return Err(INVALID);
        }
        // SAFETY: outputs that are locals.
        unsafe { driver.malloc_rows(&mut made.address, &mut made.pitch, extent.width, rows)? };
        // SAFETY: the caller's promise.
        unsafe { to.write(made) };
        Ok(())
    })
}

/// `cudaPointerAttributes`; what follows in CUDA 13 is reserved.
#[repr(C)]
struct Attributes {
    kind: c_int,
    device: c_int,
    device_pointer: Address,
    host_pointer: Address,
}

/// `cudaMemoryType`.
const UNREGISTERED: c_int = 0;
const MANAGED: c_int = 3;

/// `CUpointer_attribute`.
const MEMORY_TYPE: c_uint = 2;
const DEVICE_POINTER: c_uint = 3;
const HOST_POINTER: c_uint = 4;
const IS_MANAGED: c_uint = 8;
const DEVICE_ORDINAL: c_uint = 9;

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaPointerGetAttributes(to: *mut Attributes, address: Address) -> u32 {
    run(|| {
        let driver = ready()?;
        if to.is_null() {
            return Err(INVALID);
        }
        let ask = |attribute, data: Pointer| {
            // SAFETY: the attribute's value fits into the local behind `data`.
            unsafe { driver.cuPointerGetAttribute(data, attribute, address) }
        };
        let mut found = Attributes {
            kind: UNREGISTERED,
            device: -2,
            device_pointer: 0,
            host_pointer: address,
        };
        if ask(MEMORY_TYPE, (&raw mut found.kind).cast()).is_ok() {
            // What the address has none of stays null.
            found.host_pointer = 0;
            let _ = ask(DEVICE_ORDINAL, (&raw mut found.device).cast());
            let _ = ask(DEVICE_POINTER, (&raw mut found.device_pointer).cast());
            let _ = ask(HOST_POINTER, (&raw mut found.host_pointer).cast());
            let mut managed: c_int = 0;
            let _ = ask(IS_MANAGED, (&raw mut managed).cast());
            if managed != 0 {
                found.kind = MANAGED;
            }
        }
        // SAFETY: the caller's promise: room for the structure of its CUDA version.
        unsafe {
            to.write(found);
            if version() >= 13000 {
                to.add(1).cast::<[u64; 8]>().write([0; 8]);
            }
        }
        Ok(())
    })
}
