//! Look-up of functions by name and version, and the names that older and per-thread-default-stream
//! programs use.

use crate::function::{address_of, own_address_of};
use crate::machine::ready;
use cudarc::driver::sys::{CUdriverProcAddressQueryResult, CUresult};
use std::ffi::{CStr, c_char, c_int, c_ulonglong, c_void};

const INVALID: u32 = CUresult::CUDA_ERROR_INVALID_VALUE as u32;

/// Functions that changed: the plain name, the first CUDA version (1000 × major + 10 × minor) whose
/// programs mean this symbol by it. The newest first.
const VERSIONS: &[(&str, c_int, &str)] = &[
    ("cuCtxCreate", 3020, "cuCtxCreate_v2"),
    ("cuCtxDestroy", 4000, "cuCtxDestroy_v2"),
    ("cuCtxPopCurrent", 4000, "cuCtxPopCurrent_v2"),
    ("cuCtxPushCurrent", 4000, "cuCtxPushCurrent_v2"),
    ("cuDeviceGetUuid", 9020, "cuDeviceGetUuid_v2"),
    (
        "cuDevicePrimaryCtxRelease",
        11000,
        "cuDevicePrimaryCtxRelease_v2",
    ),
    (
        "cuDevicePrimaryCtxReset",
        11000,
        "cuDevicePrimaryCtxReset_v2",
    ),
    (
        "cuDevicePrimaryCtxSetFlags",
        11000,
        "cuDevicePrimaryCtxSetFlags_v2",
    ),
    ("cuDeviceTotalMem", 3020, "cuDeviceTotalMem_v2"),
    ("cuEventDestroy", 4000, "cuEventDestroy_v2"),
    ("cuEventElapsedTime", 2000, "cuEventElapsedTime_v2"),
    ("cuGetProcAddress", 12000, "cuGetProcAddress_v2"),
    ("cuGetProcAddress", 11030, "cuGetProcAddress"),
    ("cuIpcOpenMemHandle", 11000, "cuIpcOpenMemHandle_v2"),
    ("cuMemAlloc", 3020, "cuMemAlloc_v2"),
    ("cuMemAllocHost", 3020, "cuMemAllocHost_v2"),
    ("cuMemAllocPitch", 3020, "cuMemAllocPitch_v2"),
    ("cuMemFree", 3020, "cuMemFree_v2"),
    ("cuMemGetAddressRange", 3020, "cuMemGetAddressRange_v2"),
    ("cuMemGetInfo", 3020, "cuMemGetInfo_v2"),
    (
        "cuMemHostGetDevicePointer",
        3020,
        "cuMemHostGetDevicePointer_v2",
    ),
    ("cuMemHostRegister", 6050, "cuMemHostRegister_v2"),
    ("cuMemcpy2D", 3020, "cuMemcpy2D_v2"),
    ("cuMemcpy2DAsync", 3020, "cuMemcpy2DAsync_v2"),
    ("cuMemcpy2DUnaligned", 3020, "cuMemcpy2DUnaligned_v2"),
    ("cuMemcpy3D", 3020, "cuMemcpy3D_v2"),
    ("cuMemcpy3DAsync", 3020, "cuMemcpy3DAsync_v2"),
    ("cuMemcpyDtoD", 3020, "cuMemcpyDtoD_v2"),
    ("cuMemcpyDtoDAsync", 3020, "cuMemcpyDtoDAsync_v2"),
    ("cuMemcpyDtoH", 3020, "cuMemcpyDtoH_v2"),
    ("cuMemcpyDtoHAsync", 3020, "cuMemcpyDtoHAsync_v2"),
    ("cuMemcpyHtoD", 3020, "cuMemcpyHtoD_v2"),
    ("cuMemcpyHtoDAsync", 3020, "cuMemcpyHtoDAsync_v2"),
    ("cuMemsetD16", 3020, "cuMemsetD16_v2"),
    ("cuMemsetD2D16", 3020, "cuMemsetD2D16_v2"),
    ("cuMemsetD2D32", 3020, "cuMemsetD2D32_v2"),
    ("cuMemsetD2D8", 3020, "cuMemsetD2D8_v2"),
    ("cuMemsetD32", 3020, "cuMemsetD32_v2"),
    ("cuMemsetD8", 3020, "cuMemsetD8_v2"),
    ("cuGraphInstantiate", 12000, "cuGraphInstantiateWithFlags"),
    (
        "cuGraphNodeGetDependencies",
        12030,
        "cuGraphNodeGetDependencies_v2",
    ),
    (
        "cuStreamUpdateCaptureDependencies",
        12030,
        "cuStreamUpdateCaptureDependencies_v2",
    ),
    ("cuStreamBeginCapture", 10010, "cuStreamBeginCapture_v2"),
    ("cuStreamDestroy", 4000, "cuStreamDestroy_v2"),
    ("cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"),
];

/// A function's address, or why there is none. To `own` a default stream is the calling thread's.
fn look_up(name: &str, version: c_int, own: bool) -> Result<usize, CUdriverProcAddressQueryResult> {
    use CUdriverProcAddressQueryResult::*;
    let mut versions = VERSIONS
        .iter()
        .filter(|(plain, ..)| *plain == name)
        .peekable();
    let symbol = match versions.peek() {
        None => name,
        Some(_) => versions
            .find(|(_, since, _)| *since <= version)
            .map(|(_, _, symbol)| *symbol)
            .ok_or(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT)?,
    };
    let found = match symbol {
        "cuGetProcAddress" => Some(cuGetProcAddress as *const () as usize),
        "cuGetProcAddress_v2" if own => Some(cuGetProcAddress_v2_ptsz as *const () as usize),
        "cuGetProcAddress_v2" => Some(cuGetProcAddress_v2 as *const () as usize),
        symbol if own => own_address_of(symbol).or_else(|| address_of(symbol)),
        symbol => address_of(symbol),
    };
    found.ok_or(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND)
}

/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM` and `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const LEGACY_STREAM: c_ulonglong = 1;
const OWN_STREAM: c_ulonglong = 2;

/// The address of a function by its plain name, as programs of a CUDA version mean it. A flag says
/// which stream the default one is to it.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    to: *mut *mut c_void,
    version: c_int,
    flags: c_ulonglong,
    status: *mut CUdriverProcAddressQueryResult,
) -> u32 {
    if let Err(status) = ready() {
        return status;
    }
    if symbol.is_null() || to.is_null() {
        return INVALID;
    }
    // SAFETY: the caller's promise: text that ends in a zero.
    let name = unsafe { CStr::from_ptr(symbol) };
    let found = name.to_str().map_or(
        Err(CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND),
        |name| look_up(name, version, flags & OWN_STREAM != 0),
    );
    // SAFETY: the caller's promise: outputs that may be written; the status may be null.
    unsafe {
        to.write(found.unwrap_or(0) as *mut c_void);
        if !status.is_null() {
            let success = CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS;
            status.write(found.err().unwrap_or(success));
        }
    }
    match found {
        Ok(_) => CUresult::CUDA_SUCCESS as u32,
        Err(_) => CUresult::CUDA_ERROR_NOT_FOUND as u32,
    }
}

/// The same for programs whose default stream is the calling thread's own, unless the flag says not.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress_v2_ptsz(
    symbol: *const c_char,
    to: *mut *mut c_void,
    version: c_int,
    flags: c_ulonglong,
    status: *mut CUdriverProcAddressQueryResult,
) -> u32 {
    let flags = match flags & LEGACY_STREAM {
        0 => flags | OWN_STREAM,
        _ => flags,
    };
    // SAFETY: the caller's promise.
    unsafe { cuGetProcAddress_v2(symbol, to, version, flags, status) }
}

/// The same before CUDA 12, when it did not say why.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    to: *mut *mut c_void,
    version: c_int,
    flags: c_ulonglong,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { cuGetProcAddress_v2(symbol, to, version, flags, std::ptr::null_mut()) }
}
