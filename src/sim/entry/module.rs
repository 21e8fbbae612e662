//! Modules and arrays, whose memory the driver allocates by itself.

use crate::call::{call, check_output, write_output};
use crate::failure::Function;
use crate::memory::AllocationKind;
use crate::run::Session;
use crate::state::DriverResult;
use cudarc::driver::sys::{
    CUDA_ARRAY_DESCRIPTOR, CUarray, CUarray_format, CUfunction, CUjit_option, CUmodule, CUresult,
};
use std::ffi::{CStr, c_char, c_uint, c_void};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Memory of the current device, named by its address.
fn allocate(session: &mut Session<'_>, name: &str, bytes: u64) -> Result<*mut c_void, CUresult> {
    let device = session.state.device()?;
    session.state.outside_capture(name)?;
    session.state.check_not_faulted(device)?;
    let memory = &mut session.state.memory;
    let found = memory.allocate(device, bytes, AllocationKind::Device)?;
    Ok(found as *mut c_void)
}

fn free(session: &mut Session<'_>, handle: *mut c_void) -> DriverResult {
    let found = session.state.memory.allocation(handle as u64);
    let (_, device) = found.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    session.synchronise_device(device)?;
    session.state.memory.free(handle as u64)
}

/// Bytes of the variables of a module in PTX: what stands in the brackets of its lines with `.global .b8`.
fn variables(text: &str) -> u64 {
    let lines = text.lines().filter(|line| line.contains(".global"));
    let size = |line: &str| {
        line.split_once('[')?
            .1
            .split_once(']')?
            .0
            .parse::<u64>()
            .ok()
    };
    lines.filter_map(size).sum()
}

/// Loads a module in PTX, which may be freed then.
///
/// # Safety
/// The module's contract.
unsafe fn load(
    session: &mut Session<'_>,
    name: &str,
    to: *mut CUmodule,
    image: *const c_void,
) -> DriverResult {
    check_output(to)?;
    if image.is_null() {
        return Err(INVALID);
    }
    // SAFETY: the caller's promise: PTX ends in a null.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
    let found = allocate(session, name, variables(&text).max(1))?;
    // SAFETY: the caller's promise.
    unsafe { write_output(to, found.cast()) }
}

/// Loads a module.
pub unsafe extern "C" fn cuModuleLoadData(to: *mut CUmodule, image: *const c_void) -> u32 {
    call(Function::cuModuleLoadData, |session| {
        // SAFETY: the module's contract.
        unsafe { load(session, "cuModuleLoadData", to, image) }
    })
}

/// The same with options, of which the size of the buffer for messages is one: what it holds then is written
/// in its place, and of a module that is not loaded there is no message.
pub unsafe extern "C" fn cuModuleLoadDataEx(
    to: *mut CUmodule,
    image: *const c_void,
    count: c_uint,
    options: *mut CUjit_option,
    values: *mut *mut c_void,
) -> u32 {
    /// Bytes of the message.
    const MESSAGE: usize = 24;
    call(Function::cuModuleLoadDataEx, |session| {
        // SAFETY: the module's contract.
        let loaded = unsafe { load(session, "cuModuleLoadDataEx", to, image) };
        let message = if loaded.is_ok() { MESSAGE } else { 0 };
        for at in 0..count as usize {
            // SAFETY: the module's contract: so many of each.
            let (option, value) = unsafe { (*options.add(at), &mut *values.add(at)) };
            if option == CUjit_option::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES {
                *value = std::ptr::without_provenance_mut(value.addr().min(message));
            }
        }
        loaded
    })
}

/// Unloads a module, after all work of its device.
pub unsafe extern "C" fn cuModuleUnload(module: CUmodule) -> u32 {
    call(Function::cuModuleUnload, |session| {
        free(session, module.cast())
    })
}

/// A kernel of a module; there is one of any name.
pub unsafe extern "C" fn cuModuleGetFunction(
    to: *mut CUfunction,
    module: CUmodule,
    name: *const c_char,
) -> u32 {
    call(Function::cuModuleGetFunction, |session| {
        check_output(to)?;
        let found = session.state.memory.allocation(module as u64);
        if name.is_null() || found.is_none() {
            return Err(INVALID);
        }
        // SAFETY: the module's contract.
        unsafe { write_output(to, module.cast()) }
    })
}

/// Makes an array of one or two dimensions.
pub unsafe extern "C" fn cuArrayCreate_v2(
    to: *mut CUarray,
    what: *const CUDA_ARRAY_DESCRIPTOR,
) -> u32 {
    call(Function::cuArrayCreate_v2, |session| {
        check_output(to)?;
        // SAFETY: the module's contract.
        let what = unsafe { what.as_ref() }.ok_or(INVALID)?;
        let element = match what.Format {
            CUarray_format::CU_AD_FORMAT_FLOAT => 4,
            CUarray_format::CU_AD_FORMAT_UNSIGNED_INT8 => 1,
            _ => return Err(INVALID),
        };
        let row = what.Width * what.NumChannels as usize * element;
        let bytes = row * what.Height.max(1);
        let found = allocate(session, "cuArrayCreate", bytes as u64)?;
        // SAFETY: the module's contract.
        unsafe { write_output(to, found.cast()) }
    })
}

/// Destroys an array, after all work of its device.
pub unsafe extern "C" fn cuArrayDestroy(array: CUarray) -> u32 {
    call(Function::cuArrayDestroy, |session| {
        free(session, array.cast())
    })
}
