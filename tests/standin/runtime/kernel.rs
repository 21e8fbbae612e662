//! Kernels and variables: what a program built by nvcc registers when it is loaded. A launch puts the
//! kernel's place into its stream; nothing runs.

use crate::driver::{Address, Answer, Driver, INVALID, Pointer};
use crate::thread::{device, own_default, ready, run};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::convert::identity;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

const INVALID_FUNCTION: u32 = 98;
const INVALID_SYMBOL: u32 = 13;

/// What was registered, by the host's address of it.
#[derive(Default)]
struct Registered {
    kernels: HashSet<usize>,
    /// Bytes of each variable.
    variables: HashMap<usize, usize>,
    /// Where variables are on which devices, from their first use on.
    places: HashMap<(usize, c_int), Address>,
}

static REGISTERED: Mutex<Option<Registered>> = Mutex::new(None);

fn registered<T>(act: impl FnOnce(&mut Registered) -> T) -> T {
    let mut guard: MutexGuard<'_, _> = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    act(guard.get_or_insert_default())
}

/// A variable's address on the current device, and its size.
pub(crate) fn variable(driver: &Driver, symbol: *const c_void) -> Answer<(Address, usize)> {
    let (symbol, device) = (symbol as usize, device()?);
    let size = registered(|it| it.variables.get(&symbol).copied()).ok_or(INVALID_SYMBOL)?;
    if let Some(place) = registered(|it| it.places.get(&(symbol, device)).copied()) {
        return Ok((place, size));
    }
    let mut address = 0;
    // SAFETY: the output is a local.
    unsafe {
        driver.cuMemAlloc(&mut address, size)?;
        driver.cuMemsetD8Async(address, 0, size, std::ptr::null_mut())?;
    }
    registered(|it| it.places.insert((symbol, device), address));
    Ok((address, size))
}

/// Forgets where variables were on a device that was reset.
pub(crate) fn forget(device: c_int) {
    registered(|it| it.places.retain(|(_, on), _| *on != device));
}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFatBinary(_binary: *const c_void) -> *mut Pointer {
    Box::into_raw(Box::new(std::ptr::null_mut()))
}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFatBinaryEnd(_handle: *mut Pointer) {}

#[unsafe(no_mangle)]
unsafe extern "C" fn __cudaUnregisterFatBinary(handle: *mut Pointer) {
    if !handle.is_null() {
        // SAFETY: the box that registering made; a program gives it back once.
        drop(unsafe { Box::from_raw(handle) });
    }
}

#[unsafe(no_mangle)]
extern "C" fn __cudaInitModule(_handle: *mut Pointer) -> c_char {
    1
}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterFunction(
    _handle: *mut Pointer,
    host: *const c_void,
    _device: *mut c_char,
    _name: *const c_char,
    _limit: c_int,
    _thread: *mut c_void,
    _block: *mut c_void,
    _block_size: *mut c_void,
    _grid_size: *mut c_void,
    _warp: *mut c_int,
) {
    registered(|it| it.kernels.insert(host as usize));
}

#[unsafe(no_mangle)]
extern "C" fn __cudaRegisterVar(
    _handle: *mut Pointer,
    host: *mut c_char,
    _device: *mut c_char,
    _name: *const c_char,
    _external: c_int,
    size: usize,
    _constant: c_int,
    _global: c_int,
) {
    registered(|it| it.variables.insert(host as usize, size));
}

/// `dim3`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Dim3 {
    x: c_uint,
    y: c_uint,
    z: c_uint,
}

/// What stands between the brackets of a launch.
#[derive(Clone, Copy)]
struct Call {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: usize,
}

thread_local! {
    static CALLS: RefCell<Vec<Call>> = const { RefCell::new(Vec::new()) };
}

#[unsafe(no_mangle)]
extern "C" fn __cudaPushCallConfiguration(
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: Pointer,
) -> c_uint {
    let call = Call {
        grid,
        block,
        shared,
        stream: stream as usize,
    };
    CALLS.with_borrow_mut(|calls| calls.push(call));
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __cudaPopCallConfiguration(
    grid: *mut Dim3,
    block: *mut Dim3,
    shared: *mut usize,
    stream: *mut usize,
) -> u32 {
    let Some(call) = CALLS.with_borrow_mut(Vec::pop) else {
        return INVALID;
    };
    // SAFETY: the caller, which nvcc made, has room for each.
    unsafe {
        grid.write(call.grid);
        block.write(call.block);
        shared.write(call.shared);
        stream.write(call.stream);
    }
    0
}

fn known(kernel: *const c_void) -> Answer {
    match registered(|it| it.kernels.contains(&(kernel as usize))) {
        true => Ok(()),
        false => Err(INVALID_FUNCTION),
    }
}

/// A kernel's handle is the host's address of it.
#[unsafe(no_mangle)]
unsafe extern "C" fn __cudaGetKernel(to: *mut *const c_void, kernel: *const c_void) -> u32 {
    run(|| {
        known(kernel)?;
        // SAFETY: the caller's promise.
        unsafe { to.write(kernel) };
        Ok(())
    })
}

fn launch(kernel: *const c_void, grid: Dim3, block: Dim3, shared: usize, stream: Pointer) -> u32 {
    run(|| {
        known(kernel)?;
        let driver = ready()?;
        let (kernel, null) = (kernel.cast_mut(), std::ptr::null_mut());
        let shared = c_uint::try_from(shared).map_err(|_| INVALID)?;
        // SAFETY: the driver that this library is made for takes any handle and runs nothing.
        unsafe {
            driver.cuLaunchKernel(
                kernel, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared, stream, null,
                null,
            )
        }
    })
}

/// Launches of kernels, by the stream that their default one is.
macro_rules! launches {
    ($($name:ident $stream_of:expr;)*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name(
            kernel: *const c_void,
            grid: Dim3,
            block: Dim3,
            _arguments: *mut Pointer,
            shared: usize,
            stream: Pointer,
        ) -> u32 {
            launch(kernel, grid, block, shared, $stream_of(stream))
        }
    )*};
}

launches! {
    cudaLaunchKernel identity;
    cudaLaunchKernel_ptsz own_default;
    __cudaLaunchKernel identity;
    __cudaLaunchKernel_ptsz own_default;
    cudaLaunchCooperativeKernel identity;
    cudaLaunchCooperativeKernel_ptsz own_default;
}

/// `cudaLaunchConfig_t`, as far as it is looked at.
#[repr(C)]
struct Configuration {
    grid: Dim3,
    block: Dim3,
    shared: usize,
    stream: Pointer,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaLaunchKernelExC(
    configuration: *const Configuration,
    kernel: *const c_void,
    _arguments: *mut Pointer,
) -> u32 {
    // SAFETY: the caller's promise.
    match unsafe { configuration.as_ref() } {
        Some(it) => launch(kernel, it.grid, it.block, it.shared, it.stream),
        None => run(|| Err(INVALID)),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaLaunchKernelExC_ptsz(
    configuration: *const Configuration,
    kernel: *const c_void,
    _arguments: *mut Pointer,
) -> u32 {
    // SAFETY: the caller's promise.
    match unsafe { configuration.as_ref() } {
        Some(it) => launch(kernel, it.grid, it.block, it.shared, own_default(it.stream)),
        None => run(|| Err(INVALID)),
    }
}

/// `cudaFuncAttributes`, as far as it is not zero.
#[repr(C)]
struct Attributes {
    shared: usize,
    constant: usize,
    local: usize,
    max_threads: c_int,
    registers: c_int,
    ptx: c_int,
    binary: c_int,
    cache: c_int,
    max_dynamic_shared: c_int,
    rest: [c_int; 24],
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaFuncGetAttributes(to: *mut Attributes, kernel: *const c_void) -> u32 {
    run(|| {
        known(kernel)?;
        let attributes = Attributes {
            shared: 0,
            constant: 0,
            local: 0,
            max_threads: 1024,
            registers: 32,
            ptx: 90,
            binary: 90,
            cache: 0,
            max_dynamic_shared: 49152,
            rest: [0; 24],
        };
        // SAFETY: the caller's promise.
        unsafe { to.write(attributes) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaFuncSetAttribute(kernel: *const c_void, _which: c_uint, _value: c_int) -> u32 {
    run(|| known(kernel))
}

#[unsafe(no_mangle)]
extern "C" fn cudaFuncSetCacheConfig(kernel: *const c_void, _preference: c_uint) -> u32 {
    run(|| known(kernel))
}

/// How many blocks of so many threads a multiprocessor of 2048 takes.
unsafe fn occupancy(blocks: *mut c_int, kernel: *const c_void, threads: c_int) -> u32 {
    run(|| {
        known(kernel)?;
        if blocks.is_null() || threads < 1 {
            return Err(INVALID);
        }
        // SAFETY: the caller's promise.
        unsafe { blocks.write((2048 / threads).min(32)) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut c_int,
    kernel: *const c_void,
    threads: c_int,
    _shared: usize,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { occupancy(blocks, kernel, threads) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    blocks: *mut c_int,
    kernel: *const c_void,
    threads: c_int,
    _shared: usize,
    _flags: c_uint,
) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { occupancy(blocks, kernel, threads) }
}

runtime! {
    cudaGetSymbolAddress(to: *mut Address, symbol: *const c_void) ready().address_of(to, symbol);
    cudaGetSymbolSize(to: *mut usize, symbol: *const c_void) ready().size_of(to, symbol);
}

impl Driver {
    unsafe fn address_of(&self, to: *mut Address, symbol: *const c_void) -> Answer {
        let (address, _) = variable(self, symbol)?;
        // SAFETY: the caller's promise.
        unsafe { to.write(address) };
        Ok(())
    }

    unsafe fn size_of(&self, to: *mut usize, symbol: *const c_void) -> Answer {
        let (_, size) = variable(self, symbol)?;
        // SAFETY: the caller's promise.
        unsafe { to.write(size) };
        Ok(())
    }
}
