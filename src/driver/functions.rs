//! The list of driver functions that concertina calls. The table, its loader and the simulated driver's table
//! are made from it, so a function is added here and nowhere else.

/// Calls `$then!` with the list: `name: fn(arguments);`. Every function returns a `CUresult` as its
/// number (`u32`): a newer driver may answer with a code that the enum does not know.
#[macro_export]
macro_rules! driver_functions {
    ($then:ident) => {
        $then! {
            cuInit: fn(flags: c_uint);
            cuDriverGetVersion: fn(version: *mut c_int);
            cuGetErrorName: fn(error: u32, name: *mut *const c_char);
            cuDeviceGetCount: fn(count: *mut c_int);
            cuDeviceGet: fn(device: *mut CUdevice, ordinal: c_int);
            cuDeviceGetAttribute: fn(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
            cuDeviceGetName: fn(name: *mut c_char, length: c_int, device: CUdevice);
            cuDeviceTotalMem_v2: fn(bytes: *mut usize, device: CUdevice);
            cuDeviceGetUuid_v2: fn(uuid: *mut CUuuid, device: CUdevice);
            cuDeviceCanAccessPeer: fn(can: *mut c_int, device: CUdevice, peer: CUdevice);
            cuDevicePrimaryCtxRetain: fn(context: *mut CUcontext, device: CUdevice);
            cuCtxGetCurrent: fn(context: *mut CUcontext);
            cuCtxPushCurrent_v2: fn(context: CUcontext);
            cuCtxPopCurrent_v2: fn(context: *mut CUcontext);
            cuCtxSynchronize: fn();
            cuMemGetInfo_v2: fn(free: *mut usize, total: *mut usize);
            cuMemAlloc_v2: fn(address: *mut CUdeviceptr, bytes: usize);
            cuMemFree_v2: fn(address: CUdeviceptr);
            cuMemAllocHost_v2: fn(address: *mut *mut c_void, bytes: usize);
            cuMemFreeHost: fn(address: *mut c_void);
            cuMemGetAllocationGranularity: fn(granularity: *mut usize, properties: *const CUmemAllocationProp, option: CUmemAllocationGranularity_flags);
            cuMemAddressReserve: fn(address: *mut CUdeviceptr, size: usize, alignment: usize, wanted: CUdeviceptr, flags: c_ulonglong);
            cuMemAddressFree: fn(address: CUdeviceptr, size: usize);
            cuMemCreate: fn(handle: *mut CUmemGenericAllocationHandle, size: usize, properties: *const CUmemAllocationProp, flags: c_ulonglong);
            cuMemRelease: fn(handle: CUmemGenericAllocationHandle);
            cuMemMap: fn(address: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong);
            cuMemUnmap: fn(address: CUdeviceptr, size: usize);
            cuMemSetAccess: fn(address: CUdeviceptr, size: usize, access: *const CUmemAccessDesc, count: usize);
            cuMemExportToShareableHandle: fn(to: *mut c_void, handle: CUmemGenericAllocationHandle, kind: CUmemAllocationHandleType, flags: c_ulonglong);
            cuMemImportFromShareableHandle: fn(handle: *mut CUmemGenericAllocationHandle, from: *mut c_void, kind: CUmemAllocationHandleType);
            cuIpcGetMemHandle: fn(handle: *mut CUipcMemHandle, address: CUdeviceptr);
            cuIpcOpenMemHandle_v2: fn(address: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint);
            cuIpcCloseMemHandle: fn(address: CUdeviceptr);
            cuEventCreate: fn(event: *mut CUevent, flags: c_uint);
            cuEventRecord: fn(event: CUevent, stream: CUstream);
            cuCtxRecordEvent: fn(context: CUcontext, event: CUevent);
            cuEventQuery: fn(event: CUevent);
            cuEventSynchronize: fn(event: CUevent);
            cuEventDestroy_v2: fn(event: CUevent);
            cuStreamCreate: fn(stream: *mut CUstream, flags: c_uint);
            cuStreamDestroy_v2: fn(stream: CUstream);
            cuStreamGetId: fn(stream: CUstream, id: *mut c_ulonglong);
            cuStreamIsCapturing: fn(stream: CUstream, status: *mut c_uint);
            cuStreamGetCaptureInfo_v3: fn(stream: CUstream, status: *mut CUstreamCaptureStatus, id: *mut c_ulonglong, graph: *mut CUgraph, dependencies: *mut *const CUgraphNode, edges: *mut *const c_void, count: *mut usize);
            cuGraphNodeGetDependencies_v2: fn(node: CUgraphNode, dependencies: *mut CUgraphNode, edges: *mut c_void, count: *mut usize);
            cuStreamGetCtx: fn(stream: CUstream, context: *mut CUcontext);
            cuThreadExchangeStreamCaptureMode: fn(mode: *mut CUstreamCaptureMode);
            cuStreamSynchronize: fn(stream: CUstream);
            cuStreamQuery: fn(stream: CUstream);
            cuStreamWaitEvent: fn(stream: CUstream, event: CUevent, flags: c_uint);
            cuMemsetD32Async: fn(address: CUdeviceptr, value: c_uint, count: usize, stream: CUstream);
            cuMemcpyDtoDAsync_v2: fn(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
            cuMemcpyDtoHAsync_v2: fn(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
            cuMemcpyHtoDAsync_v2: fn(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
            cuLaunchHostFunc: fn(stream: CUstream, function: CUhostFn, argument: *mut c_void);
        }
    };
}
