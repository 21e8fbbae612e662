//! Libraries of kernels that a program loads while it runs.

use crate::driver::{Address, Pointer, driver};
use crate::thread::ready;
use std::ffi::{c_char, c_int, c_uint, c_void};

runtime! {
    cudaLibraryLoadData(library: *mut Pointer, code: *const c_void, options: *mut c_uint, values: *mut Pointer, count: c_uint, library_options: *mut c_uint, library_values: *mut Pointer, library_count: c_uint)
        driver().cuLibraryLoadData(library, code, options, values, count, library_options, library_values, library_count);
    cudaLibraryLoadFromFile(library: *mut Pointer, path: *const c_char, options: *mut c_uint, values: *mut Pointer, count: c_uint, library_options: *mut c_uint, library_values: *mut Pointer, library_count: c_uint)
        driver().cuLibraryLoadFromFile(library, path, options, values, count, library_options, library_values, library_count);
    cudaLibraryUnload(library: Pointer) driver().cuLibraryUnload(library);
    cudaLibraryGetKernel(kernel: *mut Pointer, library: Pointer, name: *const c_char) driver().cuLibraryGetKernel(kernel, library, name);
    cudaLibraryGetKernelCount(count: *mut c_uint, library: Pointer) driver().cuLibraryGetKernelCount(count, library);
    cudaLibraryGetGlobal(address: *mut Address, bytes: *mut usize, library: Pointer, name: *const c_char) ready().cuLibraryGetGlobal(address, bytes, library, name);
    cudaLibraryGetManaged(address: *mut Address, bytes: *mut usize, library: Pointer, name: *const c_char) ready().cuLibraryGetManaged(address, bytes, library, name);
    cudaLibraryGetUnifiedFunction(function: *mut Pointer, library: Pointer, name: *const c_char) ready().cuLibraryGetUnifiedFunction(function, library, name);
    cudaKernelSetAttributeForDevice(kernel: Pointer, attribute: c_uint, value: c_int, device: c_int) driver().cuKernelSetAttribute(attribute, value, kernel, device);
}
