//! The driver's functions under their own names, made from the simulated GPU's.

use crate::machine::ready;
use cudarc::driver::sys::*;
use std::any::Any;
use std::ffi::{c_char, c_float, c_int, c_uchar, c_uint, c_ulonglong, c_ushort, c_void};
use std::mem::transmute;

/// Calls `$then!` with the list: `name: fn(arguments);`, as the simulated GPU has them.
macro_rules! functions {
    ($then:ident) => {
        $then! {
            cuInit: fn(flags: c_uint);
            cuDriverGetVersion: fn(version: *mut c_int);
            cuGetErrorName: fn(error: u32, name: *mut *const c_char);
            cuGetErrorString: fn(error: u32, text: *mut *const c_char);
            cuDeviceGetCount: fn(count: *mut c_int);
            cuDeviceGet: fn(to: *mut CUdevice, ordinal: c_int);
            cuDeviceGetName: fn(name: *mut c_char, length: c_int, of: CUdevice);
            cuDeviceTotalMem_v2: fn(bytes: *mut usize, of: CUdevice);
            cuDeviceGetUuid_v2: fn(to: *mut CUuuid, of: CUdevice);
            cuDeviceGetPCIBusId: fn(to: *mut c_char, length: c_int, of: CUdevice);
            cuDeviceGetByPCIBusId: fn(to: *mut CUdevice, text: *const c_char);
            cuDeviceCanAccessPeer: fn(can: *mut c_int, of: CUdevice, peer: CUdevice);
            cuDevicePrimaryCtxRetain: fn(to: *mut CUcontext, of: CUdevice);
            cuDevicePrimaryCtxRelease_v2: fn(of: CUdevice);
            cuDevicePrimaryCtxGetState: fn(of: CUdevice, flags: *mut c_uint, active: *mut c_int);
            cuDevicePrimaryCtxReset_v2: fn(of: CUdevice);
            cuDevicePrimaryCtxSetFlags_v2: fn(of: CUdevice, flags: c_uint);
            cuCtxGetDevice: fn(to: *mut CUdevice);
            cuCtxGetFlags: fn(to: *mut c_uint);
            cuCtxGetApiVersion: fn(context: CUcontext, to: *mut c_uint);
            cuCtxGetId: fn(context: CUcontext, to: *mut c_ulonglong);
            cuCtxGetStreamPriorityRange: fn(least: *mut c_int, most: *mut c_int);
            cuCtxEnablePeerAccess: fn(peer: CUcontext, flags: c_uint);
            cuCtxDisablePeerAccess: fn(peer: CUcontext);
            cuCtxCreate_v2: fn(to: *mut CUcontext, flags: c_uint, of: CUdevice);
            cuCtxDestroy_v2: fn(which: CUcontext);
            cuCtxGetCurrent: fn(to: *mut CUcontext);
            cuCtxSetCurrent: fn(to: CUcontext);
            cuCtxPushCurrent_v2: fn(to: CUcontext);
            cuCtxPopCurrent_v2: fn(to: *mut CUcontext);
            cuCtxSynchronize: fn();
            cuMemGetInfo_v2: fn(free: *mut usize, total: *mut usize);
            cuMemAlloc_v2: fn(address: *mut CUdeviceptr, bytes: usize);
            cuMemAllocPitch_v2: fn(address: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize, element: c_uint);
            cuMemFree_v2: fn(address: CUdeviceptr);
            cuDeviceGetDefaultMemPool: fn(to: *mut CUmemoryPool, of: CUdevice);
            cuDeviceGetMemPool: fn(to: *mut CUmemoryPool, of: CUdevice);
            cuDeviceSetMemPool: fn(of: CUdevice, to: CUmemoryPool);
            cuMemPoolCreate: fn(to: *mut CUmemoryPool, properties: *const CUmemPoolProps);
            cuMemPoolDestroy: fn(which: CUmemoryPool);
            cuMemPoolTrimTo: fn(which: CUmemoryPool, keep: usize);
            cuMemHostAlloc: fn(to: *mut *mut c_void, bytes: usize, flags: c_uint);
            cuMemAllocHost_v2: fn(to: *mut *mut c_void, bytes: usize);
            cuMemFreeHost: fn(address: *mut c_void);
            cuMemHostRegister_v2: fn(address: *mut c_void, bytes: usize, flags: c_uint);
            cuMemHostUnregister: fn(address: *mut c_void);
            cuMemHostGetDevicePointer_v2: fn(to: *mut CUdeviceptr, address: *mut c_void, flags: c_uint);
            cuMemHostGetFlags: fn(flags: *mut c_uint, address: *mut c_void);
            cuMemAllocManaged: fn(to: *mut CUdeviceptr, bytes: usize, flags: c_uint);
            cuMemGetAddressRange_v2: fn(start: *mut CUdeviceptr, size: *mut usize, address: CUdeviceptr);
            cuMemAddressReserve: fn(address: *mut CUdeviceptr, size: usize, alignment: usize, at: CUdeviceptr, flags: c_ulonglong);
            cuMemAddressFree: fn(address: CUdeviceptr, size: usize);
            cuMemCreate: fn(handle: *mut CUmemGenericAllocationHandle, size: usize, properties: *const CUmemAllocationProp, flags: c_ulonglong);
            cuMemRelease: fn(handle: CUmemGenericAllocationHandle);
            cuMemMap: fn(address: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong);
            cuMemUnmap: fn(address: CUdeviceptr, size: usize);
            cuMemSetAccess: fn(address: CUdeviceptr, size: usize, access: *const CUmemAccessDesc, count: usize);
            cuModuleLoadData: fn(to: *mut CUmodule, image: *const c_void);
            cuModuleUnload: fn(module: CUmodule);
            cuModuleLoadDataEx: fn(to: *mut CUmodule, image: *const c_void, count: c_uint, options: *mut CUjit_option, values: *mut *mut c_void);
            cuModuleGetFunction: fn(to: *mut CUfunction, module: CUmodule, name: *const c_char);
            cuArrayCreate_v2: fn(to: *mut CUarray, what: *const CUDA_ARRAY_DESCRIPTOR);
            cuArrayDestroy: fn(array: CUarray);
            cuEventCreate: fn(event: *mut CUevent, flags: c_uint);
            cuEventElapsedTime_v2: fn(milliseconds: *mut c_float, start: CUevent, end: CUevent);
            cuCtxRecordEvent: fn(context: CUcontext, event: CUevent);
            cuEventQuery: fn(event: CUevent);
            cuEventSynchronize: fn(event: CUevent);
            cuEventDestroy_v2: fn(event: CUevent);
            cuStreamCreate: fn(stream: *mut CUstream, flags: c_uint);
            cuStreamCreateWithPriority: fn(stream: *mut CUstream, flags: c_uint, priority: c_int);
            cuThreadExchangeStreamCaptureMode: fn(mode: *mut CUstreamCaptureMode);
        cuGraphCreate: fn(to: *mut CUgraph, flags: c_uint);
        cuGraphDestroy: fn(handle: CUgraph);
        cuGraphGetNodes: fn(handle: CUgraph, nodes: *mut CUgraphNode, count: *mut usize);
        cuGraphInstantiateWithFlags: fn(to: *mut CUgraphExec, handle: CUgraph, flags: c_ulonglong);
        cuGraphExecDestroy: fn(handle: CUgraphExec);
        cuGraphDebugDotPrint: fn(handle: CUgraph, path: *const c_char, flags: c_uint);
            cuMemPoolGetAccess: fn(flags: *mut CUmemAccess_flags, which: CUmemoryPool, location: *mut CUmemLocation);
            cuMemPoolSetAccess: fn(which: CUmemoryPool, access: *const CUmemAccessDesc, count: usize);
            cuGraphAddEmptyNode: fn(to: *mut CUgraphNode, handle: CUgraph, dependencies: *const CUgraphNode, count: usize);
            cuGraphNodeGetType: fn(which: CUgraphNode, to: *mut CUgraphNodeType);
            cuGraphNodeGetDependencies_v2: fn(which: CUgraphNode, dependencies: *mut CUgraphNode, edges: *mut c_void, count: *mut usize);
            cuIpcGetMemHandle: fn(to: *mut CUipcMemHandle, address: CUdeviceptr);
            cuIpcOpenMemHandle_v2: fn(to: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
            cuIpcCloseMemHandle: fn(address: CUdeviceptr);
            cuIpcGetEventHandle: fn(to: *mut CUipcEventHandle, event: CUevent);
            cuIpcOpenEventHandle: fn(to: *mut CUevent, handle: CUipcEventHandle);
            cuMemRetainAllocationHandle: fn(handle: *mut CUmemGenericAllocationHandle, address: *mut c_void);
            cuMemGetAllocationPropertiesFromHandle: fn(to: *mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle);
            cuMemExportToShareableHandle: fn(to: *mut c_void, handle: CUmemGenericAllocationHandle, kind: CUmemAllocationHandleType, flags: c_ulonglong);
            cuMemImportFromShareableHandle: fn(handle: *mut CUmemGenericAllocationHandle, from: *mut c_void, kind: CUmemAllocationHandleType);
            cuLaunchKernelEx: fn(configuration: *const CUlaunchConfig, function: CUfunction, arguments: *mut *mut c_void, extra: *mut *mut c_void);
        }
    };
}

/// The same for functions that take a stream. Each is there twice: to one that ends in `_ptsz` a null
/// stream is the calling thread's own.
macro_rules! stream_functions {
    ($then:ident) => {
        $then! {
            cuStreamBeginCapture_v2: fn(stream: CUstream, mode: CUstreamCaptureMode = 0..=2);
            cuMemAllocAsync: fn(address: *mut CUdeviceptr, bytes: usize, stream: CUstream);
            cuMemAllocFromPoolAsync: fn(address: *mut CUdeviceptr, bytes: usize, from: CUmemoryPool, stream: CUstream);
            cuMemFreeAsync: fn(address: CUdeviceptr, stream: CUstream);
            cuStreamEndCapture: fn(stream: CUstream, graph: *mut CUgraph);
            cuEventRecord: fn(event: CUevent, stream: CUstream);
            cuEventRecordWithFlags: fn(event: CUevent, stream: CUstream, flags: c_uint);
            cuStreamDestroy_v2: fn(stream: CUstream);
            cuStreamGetId: fn(stream: CUstream, id: *mut c_ulonglong);
            cuStreamGetPriority: fn(stream: CUstream, priority: *mut c_int);
            cuStreamGetFlags: fn(stream: CUstream, flags: *mut c_uint);
            cuStreamGetDevice: fn(stream: CUstream, to: *mut CUdevice);
            cuStreamIsCapturing: fn(stream: CUstream, status: *mut c_uint);
            cuStreamGetCtx: fn(stream: CUstream, to: *mut CUcontext);
            cuStreamSynchronize: fn(stream: CUstream);
            cuStreamQuery: fn(stream: CUstream);
            cuStreamWaitEvent: fn(stream: CUstream, event: CUevent, flags: c_uint);
            cuStreamAddCallback: fn(stream: CUstream, function: CUstreamCallback, argument: *mut c_void, flags: c_uint);
            cuMemsetD8Async: fn(address: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream);
            cuMemsetD16Async: fn(address: CUdeviceptr, value: c_ushort, count: usize, stream: CUstream);
            cuMemsetD32Async: fn(address: CUdeviceptr, value: c_uint, count: usize, stream: CUstream);
            cuMemsetD2D8Async: fn(address: CUdeviceptr, pitch: usize, value: c_uchar, count: usize, rows: usize, stream: CUstream);
            cuMemsetD2D16Async: fn(address: CUdeviceptr, pitch: usize, value: c_ushort, count: usize, rows: usize, stream: CUstream);
            cuMemsetD2D32Async: fn(address: CUdeviceptr, pitch: usize, value: c_uint, count: usize, rows: usize, stream: CUstream);
            cuMemcpyAsync: fn(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
            cuMemcpyDtoDAsync_v2: fn(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
            cuMemcpyDtoHAsync_v2: fn(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
            cuMemcpyHtoDAsync_v2: fn(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
            cuMemcpyPeerAsync: fn(to: CUdeviceptr, to_context: CUcontext, from: CUdeviceptr, from_context: CUcontext, bytes: usize, stream: CUstream);
            cuMemcpy2DAsync_v2: fn(what: *const CUDA_MEMCPY2D, stream: CUstream);
            cuMemcpy3DAsync_v2: fn(what: *const CUDA_MEMCPY3D, stream: CUstream);
        cuStreamGetCaptureInfo_v3: fn(stream: CUstream, status: *mut CUstreamCaptureStatus, id: *mut c_ulonglong, graph: *mut CUgraph, dependencies: *mut *const CUgraphNode, edges: *mut *const c_void, count: *mut usize);
        cuGraphLaunch: fn(handle: CUgraphExec, stream: CUstream);
        cuGraphUpload: fn(handle: CUgraphExec, stream: CUstream);
            cuStreamUpdateCaptureDependencies_v2: fn(stream: CUstream, dependencies: *mut CUgraphNode, edges: *const c_void, count: usize, flags: c_uint);
            cuLaunchHostFunc: fn(stream: CUstream, function: CUhostFn, argument: *mut c_void);
            cuLaunchKernel: fn(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, shared: c_uint, stream: CUstream, arguments: *mut *mut c_void, extra: *mut *mut c_void);
        }
    };
}

/// Functions that use the default stream without being told one, with what does the same on a given
/// stream, and whether they wait for it. Each is there twice: one that ends in `_ptds` uses the calling
/// thread's own.
macro_rules! default_stream_functions {
    ($then:ident) => {
        $then! {
            cuMemcpy: fn(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) = cuMemcpyAsync, true;
            cuMemcpyDtoD_v2: fn(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) = cuMemcpyDtoDAsync_v2, true;
            cuMemcpyDtoH_v2: fn(to: *mut c_void, from: CUdeviceptr, bytes: usize) = cuMemcpyDtoHAsync_v2, true;
            cuMemcpyHtoD_v2: fn(to: CUdeviceptr, from: *const c_void, bytes: usize) = cuMemcpyHtoDAsync_v2, true;
            cuMemcpy2D_v2: fn(what: *const CUDA_MEMCPY2D) = cuMemcpy2DAsync_v2, true;
            cuMemcpy2DUnaligned_v2: fn(what: *const CUDA_MEMCPY2D) = cuMemcpy2DAsync_v2, true;
            cuMemcpy3D_v2: fn(what: *const CUDA_MEMCPY3D) = cuMemcpy3DAsync_v2, true;
            cuMemsetD8_v2: fn(address: CUdeviceptr, value: c_uchar, count: usize) = cuMemsetD8Async, false;
            cuMemsetD16_v2: fn(address: CUdeviceptr, value: c_ushort, count: usize) = cuMemsetD16Async, false;
            cuMemsetD32_v2: fn(address: CUdeviceptr, value: c_uint, count: usize) = cuMemsetD32Async, false;
            cuMemsetD2D8_v2: fn(address: CUdeviceptr, pitch: usize, value: c_uchar, count: usize, rows: usize) = cuMemsetD2D8Async, false;
            cuMemsetD2D16_v2: fn(address: CUdeviceptr, pitch: usize, value: c_ushort, count: usize, rows: usize) = cuMemsetD2D16Async, false;
            cuMemsetD2D32_v2: fn(address: CUdeviceptr, pitch: usize, value: c_uint, count: usize, rows: usize) = cuMemsetD2D32Async, false;
        }
    };
}

/// The same for functions whose arguments hold numbers of an enum, which a C program may have from
/// a newer header: they are taken as numbers, and refused where the enum does not know them.
macro_rules! functions_with_numbers {
    ($then:ident) => {
        $then! {
            cuDeviceGetAttribute: fn(value: *mut c_int, attribute: CUdevice_attribute = 1..=148, of: CUdevice);
            cuDeviceGetP2PAttribute: fn(value: *mut c_int, attribute: CUdevice_P2PAttribute = 1..=5, of: CUdevice, peer: CUdevice);
            cuCtxGetLimit: fn(to: *mut usize, limit: CUlimit = 0..=10);
            cuCtxSetLimit: fn(limit: CUlimit = 0..=10, value: usize);
            cuMemPoolGetAttribute: fn(which: CUmemoryPool, attribute: CUmemPool_attribute = 1..=8, value: *mut c_void);
            cuMemPoolSetAttribute: fn(which: CUmemoryPool, attribute: CUmemPool_attribute = 1..=8, value: *mut c_void);
            cuPointerGetAttribute: fn(data: *mut c_void, which: CUpointer_attribute = 1..=21, address: CUdeviceptr);
            cuMemGetAllocationGranularity: fn(granularity: *mut usize, properties: *const CUmemAllocationProp, option: CUmemAllocationGranularity_flags = 0..=1);
        }
    };
}

macro_rules! export {
    ($($name:ident: fn($($argument:ident: $kind:ty),*);)*) => {$(
        #[allow(non_snake_case)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $kind),*) -> u32 {
            match ready() {
                // SAFETY: the caller promised what the driver asks for, which is what this asks for.
                Ok(()) => unsafe { concertina_sim::$name($($argument),*) },
                Err(status) => status,
            }
        }
    )*};
}

macro_rules! kind_from_c {
    ($kind:ty) => {
        $kind
    };
    ($kind:ty, $range:expr) => {
        c_uint
    };
}

macro_rules! export_with_numbers {
    ($($name:ident: fn($($argument:ident: $kind:ty $(= $range:expr)?),*);)*) => {$(
        #[allow(non_snake_case)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: kind_from_c!($kind $(, $range)?)),*) -> u32 {
            if let Err(status) = ready() {
                return status;
            }
            $($(
                if !($range).contains(&$argument) {
                    return CUresult::CUDA_ERROR_INVALID_VALUE as u32;
                }
                // SAFETY: the enum has exactly the numbers of this range.
                let $argument = unsafe { transmute::<c_uint, $kind>($argument) };
            )?)*
            // SAFETY: the caller promised what the driver asks for, which is what this asks for.
            unsafe { concertina_sim::$name($($argument),*) }
        }
    )*};
}

macro_rules! export_default_stream {
    ($($name:ident: fn($($argument:ident: $kind:ty),*) = $async:ident, $waits:literal;)*) => {
        export! { $($name: fn($($argument: $kind),*);)* }
    };
}

functions!(export);
stream_functions!(export_with_numbers);
default_stream_functions!(export_default_stream);
functions_with_numbers!(export_with_numbers);

/// A null stream becomes the calling thread's own; other arguments stay as they are.
fn own_default<T: Any>(mut argument: T) -> T {
    if let Some(stream) = (&mut argument as &mut dyn Any).downcast_mut::<CUstream>()
        && stream.is_null()
    {
        *stream = OWN;
    }
    argument
}

/// The handle that means the calling thread's own stream: `CU_STREAM_PER_THREAD`.
const OWN: CUstream = std::ptr::without_provenance_mut(2);

/// The functions by name that mean the calling thread's own stream by the default one, for look-ups.
pub(crate) fn own_address_of(name: &str) -> Option<usize> {
    macro_rules! stream {
        ($($plain:ident: fn($($argument:ident: $kind:ty $(= $range:expr)?),*);)*) => {$({
            #[unsafe(export_name = concat!(stringify!($plain), "_ptsz"))]
            unsafe extern "C" fn own($($argument: kind_from_c!($kind $(, $range)?)),*) -> u32 {
                // SAFETY: the caller's promise.
                unsafe { $plain($(own_default($argument)),*) }
            }
            if name == stringify!($plain) {
                return Some(own as *const () as usize);
            }
        })*};
    }
    macro_rules! default_stream {
        ($($plain:ident: fn($($argument:ident: $kind:ty),*) = $async:ident, $waits:literal;)*) => {$({
            #[unsafe(export_name = concat!(stringify!($plain), "_ptds"))]
            unsafe extern "C" fn own($($argument: $kind),*) -> u32 {
                // SAFETY: the caller's promise, and a handle that every thread has.
                unsafe {
                    match $async($($argument,)* OWN) {
                        0 if $waits => cuStreamSynchronize(OWN),
                        status => status,
                    }
                }
            }
            if name == stringify!($plain) {
                return Some(own as *const () as usize);
            }
        })*};
    }
    stream_functions!(stream);
    default_stream_functions!(default_stream);
    None
}

#[allow(non_snake_case)]
#[unsafe(no_mangle)]
unsafe extern "C" fn cuPointerGetAttributes(
    count: c_uint,
    which: *mut c_uint,
    data: *mut *mut c_void,
    address: CUdeviceptr,
) -> u32 {
    if let Err(status) = ready() {
        return status;
    }
    let known = |index| {
        // SAFETY: the caller promised `count` numbers.
        let number = unsafe { *which.add(index) };
        (1..=21).contains(&number)
    };
    if which.is_null() || !(0..count as usize).all(known) {
        return CUresult::CUDA_ERROR_INVALID_VALUE as u32;
    }
    // SAFETY: the caller's promise; every number is one of the enum's.
    unsafe { concertina_sim::cuPointerGetAttributes(count, which.cast(), data, address) }
}

macro_rules! addresses {
    ($($name:ident: fn($($argument:ident: $kind:ty $(= $range:expr)?),*) $(= $async:ident, $waits:literal)?;)*) => {
        &[$((stringify!($name), $name as *const () as usize)),*]
    };
}

/// The functions above by name, for look-ups.
pub(crate) fn address_of(name: &str) -> Option<usize> {
    let lists: [&[(&str, usize)]; 4] = [
        functions!(addresses),
        stream_functions!(addresses),
        default_stream_functions!(addresses),
        functions_with_numbers!(addresses),
    ];
    if name == "cuPointerGetAttributes" {
        return Some(cuPointerGetAttributes as *const () as usize);
    }
    let mut all = lists.into_iter().flatten();
    all.find(|(known, _)| *known == name)
        .map(|(_, address)| *address)
}
