//! Memory pools, and memory allocated in stream order.

use crate::driver::{Address, Answer, Driver, Pointer};
use crate::memory::something;
use crate::thread::ready;
use std::ffi::{c_int, c_uint, c_void};

runtime! {
    cudaDeviceGetDefaultMemPool(pool: *mut Pointer, device: c_int) ready().cuDeviceGetDefaultMemPool(pool, device);
    cudaDeviceGetMemPool(pool: *mut Pointer, device: c_int) ready().cuDeviceGetMemPool(pool, device);
    cudaDeviceSetMemPool(device: c_int, pool: Pointer) ready().cuDeviceSetMemPool(device, pool);
    cudaMemPoolCreate(pool: *mut Pointer, properties: *const c_void) ready().cuMemPoolCreate(pool, properties);
    cudaMemPoolDestroy(pool: Pointer) ready().cuMemPoolDestroy(pool);
    cudaMemPoolTrimTo(pool: Pointer, keep: usize) ready().cuMemPoolTrimTo(pool, keep);
    cudaMemPoolGetAttribute(pool: Pointer, attribute: c_uint, value: Pointer) ready().cuMemPoolGetAttribute(pool, attribute, value);
    cudaMemPoolSetAttribute(pool: Pointer, attribute: c_uint, value: Pointer) ready().cuMemPoolSetAttribute(pool, attribute, value);
    cudaMemPoolGetAccess(flags: *mut c_uint, pool: Pointer, location: *mut c_void) ready().cuMemPoolGetAccess(flags, pool, location);
    cudaMemPoolSetAccess(pool: Pointer, access: *const c_void, count: usize) ready().cuMemPoolSetAccess(pool, access, count);
}

stream_runtime! {
    cudaMallocAsync[stream](address: *mut Address, bytes: usize, stream: Pointer) ready().malloc_async(address, bytes, stream);
    cudaMallocFromPoolAsync[stream](address: *mut Address, bytes: usize, pool: Pointer, stream: Pointer) ready().cuMemAllocFromPoolAsync(address, bytes, pool, stream);
    cudaFreeAsync[stream](address: Address, stream: Pointer) ready().free_async(address, stream);
}

impl Driver {
    unsafe fn malloc_async(&self, address: *mut Address, bytes: usize, stream: Pointer) -> Answer {
        match something(address, bytes, 0)? {
            // SAFETY: the caller's promise.
            true => unsafe { self.cuMemAllocAsync(address, bytes, stream) },
            false => Ok(()),
        }
    }

    unsafe fn free_async(&self, address: Address, stream: Pointer) -> Answer {
        match address {
            0 => Ok(()),
            // SAFETY: the caller's promise.
            _ => unsafe { self.cuMemFreeAsync(address, stream) },
        }
    }
}
