//! The driver's functions, looked up once.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::mem::transmute;
use std::sync::OnceLock;

/// Statuses that this library itself answers with; the driver's numbers are the runtime's.
pub(crate) const INVALID: u32 = 1;
pub(crate) const NO_DEVICE: u32 = 100;
pub(crate) const INVALID_DEVICE: u32 = 101;
pub(crate) const NOT_SUPPORTED: u32 = 801;
const NO_DRIVER: u32 = 35;

pub(crate) type Pointer = *mut c_void;
pub(crate) type Address = u64;
pub(crate) type Answer<T = ()> = Result<T, u32>;

/// The driver's answer as a result.
pub(crate) fn check(status: u32) -> Answer {
    match status {
        0 => Ok(()),
        status => Err(status),
    }
}

/// The version of CUDA whose signatures are used here, whatever version this library stands for.
pub(crate) const SIGNATURES: c_int = 13000;

macro_rules! driver {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {
        /// The addresses of the driver's functions; 0 where it has none of that name.
        pub(crate) struct Driver { $($name: usize,)* }

        impl Driver {
            /// # Safety
            /// The look-up answers with functions of the signatures below.
            unsafe fn new(find: impl Fn(&str) -> usize) -> Driver {
                Driver { $($name: find(concat!(stringify!($name), "\0")),)* }
            }

            $(
                /// # Safety
                /// As the driver asks of this function's callers.
                pub unsafe fn $name(&self, $($argument: $kind),*) -> Answer {
                    if self.$name == 0 {
                        return Err(NOT_SUPPORTED);
                    }
                    // SAFETY: the function of this name has this signature (`cuda.h`).
                    let function = unsafe {
                        transmute::<usize, unsafe extern "C" fn($($kind),*) -> u32>(self.$name)
                    };
                    // SAFETY: the caller's promise.
                    check(unsafe { function($($argument),*) })
                }
            )*
        }
    };
}

driver! {
    cuInit(flags: c_uint);
    cuDriverGetVersion(version: *mut c_int);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int);
    cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int);
    cuDeviceTotalMem(bytes: *mut usize, device: c_int);
    cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int);
    cuDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int);
    cuDeviceGetByPCIBusId(device: *mut c_int, text: *const c_char);
    cuDeviceGetP2PAttribute(value: *mut c_int, attribute: c_uint, device: c_int, peer: c_int);
    cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int);
    cuDevicePrimaryCtxRetain(context: *mut Pointer, device: c_int);
    cuDevicePrimaryCtxReset(device: c_int);
    cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int);
    cuDevicePrimaryCtxSetFlags(device: c_int, flags: c_uint);
    cuCtxGetCurrent(context: *mut Pointer);
    cuCtxSetCurrent(context: Pointer);
    cuCtxGetDevice(device: *mut c_int);
    cuCtxSynchronize();
    cuCtxGetStreamPriorityRange(least: *mut c_int, most: *mut c_int);
    cuCtxGetLimit(value: *mut usize, limit: c_uint);
    cuCtxSetLimit(limit: c_uint, value: usize);
    cuCtxEnablePeerAccess(peer: Pointer, flags: c_uint);
    cuCtxDisablePeerAccess(peer: Pointer);
    cuMemGetInfo(free: *mut usize, total: *mut usize);
    cuMemAlloc(address: *mut Address, bytes: usize);
    cuMemAllocPitch(address: *mut Address, pitch: *mut usize, width: usize, height: usize, element: c_uint);
    cuMemAllocManaged(address: *mut Address, bytes: usize, flags: c_uint);
    cuMemFree(address: Address);
    cuMemHostAlloc(to: *mut Pointer, bytes: usize, flags: c_uint);
    cuMemFreeHost(address: Pointer);
    cuMemHostRegister(address: Pointer, bytes: usize, flags: c_uint);
    cuMemHostUnregister(address: Pointer);
    cuMemHostGetDevicePointer(to: *mut Address, address: Pointer, flags: c_uint);
    cuMemHostGetFlags(flags: *mut c_uint, address: Pointer);
    cuPointerGetAttribute(data: Pointer, attribute: c_uint, address: Address);
    cuMemcpy(to: Address, from: Address, bytes: usize);
    cuMemcpyAsync(to: Address, from: Address, bytes: usize, stream: Pointer);
    cuMemcpyPeerAsync(to: Address, to_context: Pointer, from: Address, from_context: Pointer, bytes: usize, stream: Pointer);
    cuMemsetD8Async(address: Address, value: u8, count: usize, stream: Pointer);
    cuMemsetD2D8Async(address: Address, pitch: usize, value: u8, width: usize, height: usize, stream: Pointer);
    cuStreamCreateWithPriority(stream: *mut Pointer, flags: c_uint, priority: c_int);
    cuStreamDestroy(stream: Pointer);
    cuStreamGetPriority(stream: Pointer, priority: *mut c_int);
    cuStreamGetFlags(stream: Pointer, flags: *mut c_uint);
    cuStreamGetId(stream: Pointer, id: *mut c_ulonglong);
    cuStreamGetDevice(stream: Pointer, device: *mut c_int);
    cuStreamQuery(stream: Pointer);
    cuStreamSynchronize(stream: Pointer);
    cuStreamWaitEvent(stream: Pointer, event: Pointer, flags: c_uint);
    cuStreamAddCallback(stream: Pointer, function: Pointer, argument: Pointer, flags: c_uint);
    cuStreamIsCapturing(stream: Pointer, status: *mut c_uint);
    cuStreamBeginCapture(stream: Pointer, mode: c_uint);
    cuStreamEndCapture(stream: Pointer, graph: *mut Pointer);
    cuStreamGetCaptureInfo(stream: Pointer, status: *mut c_uint, id: *mut c_ulonglong, graph: *mut Pointer, dependencies: *mut *const Pointer, edges: *mut Pointer, count: *mut usize);
    cuThreadExchangeStreamCaptureMode(mode: *mut c_uint);
    cuGraphDestroy(graph: Pointer);
    cuGraphAddNode(node: *mut Pointer, graph: Pointer, dependencies: *const Pointer, edges: *const c_void, count: usize, parameters: Pointer);
    cuGraphConditionalHandleCreate(handle: *mut c_ulonglong, graph: Pointer, context: Pointer, default: c_uint, flags: c_uint);
    cuGraphRetainUserObject(graph: Pointer, object: Pointer, count: c_uint, flags: c_uint);
    cuUserObjectCreate(object: *mut Pointer, data: Pointer, destroy: Pointer, count: c_uint, flags: c_uint);
    cuUserObjectRelease(object: Pointer, count: c_uint);
    cuDeviceGetGraphMemAttribute(device: c_int, attribute: c_uint, value: Pointer);
    cuDeviceSetGraphMemAttribute(device: c_int, attribute: c_uint, value: Pointer);
    cuStreamBeginCaptureToGraph(stream: Pointer, graph: Pointer, dependencies: *const Pointer, edges: *const c_void, count: usize, mode: c_uint);
    cuGraphGetNodes(graph: Pointer, nodes: *mut Pointer, count: *mut usize);
    cuGraphAddEmptyNode(node: *mut Pointer, graph: Pointer, dependencies: *const Pointer, count: usize);
    cuGraphNodeGetType(node: Pointer, kind: *mut c_uint);
    cuGraphNodeGetDependencies(node: Pointer, dependencies: *mut Pointer, edges: Pointer, count: *mut usize);
    cuStreamUpdateCaptureDependencies(stream: Pointer, dependencies: *mut Pointer, edges: Pointer, count: usize, flags: c_uint);
    cuGraphInstantiateWithFlags(executable: *mut Pointer, graph: Pointer, flags: c_ulonglong);
    cuGraphExecDestroy(executable: Pointer);
    cuGraphLaunch(executable: Pointer, stream: Pointer);
    cuGraphDebugDotPrint(graph: Pointer, path: *const c_char, flags: c_uint);
    cuEventCreate(event: *mut Pointer, flags: c_uint);
    cuEventDestroy(event: Pointer);
    cuEventElapsedTime(milliseconds: *mut f32, start: Pointer, end: Pointer);
    cuEventQuery(event: Pointer);
    cuEventRecordWithFlags(event: Pointer, stream: Pointer, flags: c_uint);
    cuEventSynchronize(event: Pointer);
    cuLaunchHostFunc(stream: Pointer, function: Pointer, argument: Pointer);
    cuLaunchKernel(function: Pointer, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared: c_uint, stream: Pointer, arguments: *mut Pointer, extra: *mut Pointer);
    cuKernelSetAttribute(attribute: c_uint, value: c_int, kernel: Pointer, device: c_int);
    cuLibraryGetGlobal(address: *mut Address, bytes: *mut usize, library: Pointer, name: *const c_char);
    cuLibraryGetKernel(kernel: *mut Pointer, library: Pointer, name: *const c_char);
    cuLibraryGetKernelCount(count: *mut c_uint, library: Pointer);
    cuLibraryGetManaged(address: *mut Address, bytes: *mut usize, library: Pointer, name: *const c_char);
    cuLibraryGetUnifiedFunction(function: *mut Pointer, library: Pointer, name: *const c_char);
    cuLibraryLoadData(library: *mut Pointer, code: *const c_void, options: *mut c_uint, values: *mut Pointer, count: c_uint, library_options: *mut c_uint, library_values: *mut Pointer, library_count: c_uint);
    cuLibraryLoadFromFile(library: *mut Pointer, path: *const c_char, options: *mut c_uint, values: *mut Pointer, count: c_uint, library_options: *mut c_uint, library_values: *mut Pointer, library_count: c_uint);
    cuLibraryUnload(library: Pointer);
    cuDeviceGetDefaultMemPool(pool: *mut Pointer, device: c_int);
    cuDeviceGetMemPool(pool: *mut Pointer, device: c_int);
    cuDeviceSetMemPool(device: c_int, pool: Pointer);
    cuMemAllocAsync(address: *mut Address, bytes: usize, stream: Pointer);
    cuMemAllocFromPoolAsync(address: *mut Address, bytes: usize, pool: Pointer, stream: Pointer);
    cuMemFreeAsync(address: Address, stream: Pointer);
    cuMemPoolCreate(pool: *mut Pointer, properties: *const c_void);
    cuMemPoolDestroy(pool: Pointer);
    cuMemPoolTrimTo(pool: Pointer, keep: usize);
    cuMemPoolGetAttribute(pool: Pointer, attribute: c_uint, value: Pointer);
    cuMemPoolSetAttribute(pool: Pointer, attribute: c_uint, value: Pointer);
    cuMemPoolGetAccess(flags: *mut c_uint, pool: Pointer, location: *mut c_void);
    cuMemPoolSetAccess(pool: Pointer, access: *const c_void, count: usize);
    cuIpcGetMemHandle(handle: *mut [u8; 64], address: Address);
    cuIpcCloseMemHandle(address: Address);
    cuIpcGetEventHandle(handle: *mut [u8; 64], event: Pointer);
}

type GetProcAddress =
    unsafe extern "C" fn(*const c_char, *mut Pointer, c_int, c_ulonglong, *mut c_uint) -> u32;

/// Where functions come from: the driver's own look-up, and the version that this library stands
/// for (13000 for CUDA 13.0).
#[derive(Clone, Copy)]
pub(crate) struct Source {
    look_up: GetProcAddress,
}

impl Source {
    /// The address of a function of that version, if the driver has it. The name ends in a zero.
    pub fn find(self, name: &str, version: c_int, flags: c_ulonglong) -> Answer<usize> {
        let mut address = std::ptr::null_mut();
        // SAFETY: a name that ends in a zero, and outputs that are locals.
        let status = unsafe {
            let name = name.as_ptr().cast();
            (self.look_up)(name, &mut address, version, flags, std::ptr::null_mut())
        };
        check(status).map(|()| address as usize)
    }
}

unsafe extern "C" {
    /// The version of CUDA that this library stands for; `scripts/standin.sh` defines it.
    static standin_runtime_version: c_int;
}

/// The version of CUDA that this library stands for: 13000 for CUDA 13.0.
pub(crate) fn version() -> c_int {
    // SAFETY: a constant.
    unsafe { standin_runtime_version }
}

struct Loaded {
    driver: Driver,
    source: Source,
}

static LOADED: OnceLock<Answer<Loaded>> = OnceLock::new();

fn loaded() -> Answer<&'static Loaded> {
    LOADED.get_or_init(load).as_ref().map_err(|status| *status)
}

/// The driver, initialised.
pub(crate) fn driver() -> Answer<&'static Driver> {
    Ok(&loaded()?.driver)
}

/// Where the driver's functions come from.
pub(crate) fn source() -> Answer<Source> {
    Ok(loaded()?.source)
}

fn load() -> Answer<Loaded> {
    // SAFETY: constant names that end in a zero; loading a driver runs only its own initialisers.
    let look_up = unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
        if library.is_null() {
            return Err(NO_DRIVER);
        }
        libc::dlsym(library, c"cuGetProcAddress_v2".as_ptr())
    };
    if look_up.is_null() {
        return Err(NO_DRIVER);
    }
    // SAFETY: the driver's function of this name has this signature (`cuda.h`).
    let look_up = unsafe { transmute::<*mut c_void, GetProcAddress>(look_up) };
    let source = Source { look_up };
    // SAFETY: functions of these names have these signatures.
    let driver = unsafe { Driver::new(|name| source.find(name, SIGNATURES, 0).unwrap_or(0)) };
    // SAFETY: no pointers.
    unsafe { driver.cuInit(0) }?;
    Ok(Loaded { driver, source })
}
