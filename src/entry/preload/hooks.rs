//! The two lists of interposed driver functions: hooks that answer, and hooks that only retry when the driver is out of
//! memory.
//!
//! To add a function, add a row. A row has the symbol, in brackets what it is counted as, the name for
//! `cuGetProcAddress`, the CUDA version that brought this form, what a null stream means to it, its arguments, and
//! the call that answers it.

/// Calls `$then!` with the list, one entry a symbol of `libcuda.so.1`:
///
/// ```text
/// symbol: name for cuGetProcAddress, CUDA version that brought this form, default stream,
///     (arguments) => what is done here;
/// symbol[what it is counted as: bytes that it hands out]: …
/// ```
///
/// Names, versions and arguments are those of `cuda.h` and `cudaTypedefs.h` of CUDA 13. A function
/// that takes a stream is there twice, as the null stream means another one in each.
macro_rules! interposed {
    ($then:ident) => {
        $then! {
            cuMemAlloc_v2[Alloc: bytes]: "cuMemAlloc", 3020, Either,
                (address: *mut u64, bytes: usize) => malloc::allocate(address, bytes);
            cuMemAllocPitch_v2[AllocPitch: malloc::rows(pitch, height)]: "cuMemAllocPitch", 3020, Either,
                (address: *mut u64, pitch: *mut usize, width: usize, height: usize, element: c_uint)
                => malloc::allocate_pitch(address, pitch, width, height, element);
            cuMemFree_v2[Free: 0]: "cuMemFree", 3020, Either,
                (address: u64) => malloc::free(address);

            cuMemAllocAsync[AllocAsync: bytes]: "cuMemAllocAsync", 11020, Legacy,
                (address: *mut u64, bytes: usize, stream: u64)
                => malloc_async::allocate(address, bytes, stream);
            cuMemAllocAsync_ptsz[AllocAsync: bytes]: "cuMemAllocAsync", 11020, PerThread,
                (address: *mut u64, bytes: usize, stream: u64)
                => malloc_async::allocate(address, bytes, stream_hooks::per_thread(stream));
            cuMemAllocFromPoolAsync[AllocFromPoolAsync: bytes]: "cuMemAllocFromPoolAsync", 11020, Legacy,
                (address: *mut u64, bytes: usize, pool: *mut c_void, stream: u64)
                => malloc_async::allocate_from(address, bytes, pool, stream);
            cuMemAllocFromPoolAsync_ptsz[AllocFromPoolAsync: bytes]: "cuMemAllocFromPoolAsync", 11020, PerThread,
                (address: *mut u64, bytes: usize, pool: *mut c_void, stream: u64)
                => malloc_async::allocate_from(address, bytes, pool, stream_hooks::per_thread(stream));
            cuMemFreeAsync[FreeAsync: 0]: "cuMemFreeAsync", 11020, Legacy,
                (address: u64, stream: u64) => malloc_async::free(address, stream);
            cuMemFreeAsync_ptsz[FreeAsync: 0]: "cuMemFreeAsync", 11020, PerThread,
                (address: u64, stream: u64) => malloc_async::free(address, stream_hooks::per_thread(stream));
            cuMemPoolGetAttribute: "cuMemPoolGetAttribute", 11020, Either,
                (pool: *mut c_void, attribute: c_uint, value: *mut c_void)
                => mem_pools::attribute(pool, attribute, value,
                    driver_table::call!(cuMemPoolGetAttribute(pool, attribute, value)));
            cuMemPoolSetAttribute: "cuMemPoolSetAttribute", 11020, Either,
                (pool: *mut c_void, attribute: c_uint, value: *mut c_void)
                => mem_pools::set_attribute(pool, attribute,
                    driver_table::call!(cuMemPoolSetAttribute(pool, attribute, value)));
            cuDeviceSetMemPool: "cuDeviceSetMemPool", 11020, Either,
                (device: c_int, pool: *mut c_void)
                => mem_pools::set_pool(device, pool, driver_table::call!(cuDeviceSetMemPool(device, pool)));
            cuMemSetMemPool: "cuMemSetMemPool", 13000, Either,
                (location: *const c_int, kind: c_uint, pool: *mut c_void)
                => mem_pools::set_pool_at(location, pool,
                    driver_table::call!(cuMemSetMemPool(location, kind, pool)));

            cuStreamBeginCapture: "cuStreamBeginCapture", 10000, Legacy,
                (stream: u64) => stream_capture::begin(stream, || driver_table::call!(cuStreamBeginCapture(stream)));
            cuStreamBeginCapture_ptsz: "cuStreamBeginCapture", 10000, PerThread,
                (stream: u64)
                => stream_capture::begin(stream_hooks::per_thread(stream),
                    || driver_table::call!(cuStreamBeginCapture_ptsz(stream)));
            cuStreamBeginCapture_v2: "cuStreamBeginCapture", 10010, Legacy,
                (stream: u64, mode: c_uint)
                => stream_capture::begin(stream, || driver_table::call!(cuStreamBeginCapture_v2(stream, mode)));
            cuStreamBeginCapture_v2_ptsz: "cuStreamBeginCapture", 10010, PerThread,
                (stream: u64, mode: c_uint)
                => stream_capture::begin(stream_hooks::per_thread(stream),
                    || driver_table::call!(cuStreamBeginCapture_v2_ptsz(stream, mode)));
            cuStreamBeginCaptureToGraph: "cuStreamBeginCaptureToGraph", 12030, Legacy,
                (stream: u64, graph: *mut c_void, nodes: *const c_void, edges: *const c_void,
                    count: usize, mode: c_uint)
                => stream_capture::begin(stream, || driver_table::call!(
                    cuStreamBeginCaptureToGraph(stream, graph, nodes, edges, count, mode)));
            cuStreamBeginCaptureToGraph_ptsz: "cuStreamBeginCaptureToGraph", 12030, PerThread,
                (stream: u64, graph: *mut c_void, nodes: *const c_void, edges: *const c_void,
                    count: usize, mode: c_uint)
                => stream_capture::begin(stream_hooks::per_thread(stream), || driver_table::call!(
                    cuStreamBeginCaptureToGraph_ptsz(stream, graph, nodes, edges, count, mode)));
            cuStreamEndCapture: "cuStreamEndCapture", 10000, Legacy,
                (stream: u64, graph: *mut c_void)
                => stream_capture::end(stream, driver_table::call!(cuStreamEndCapture(stream, graph)));
            cuStreamEndCapture_ptsz: "cuStreamEndCapture", 10000, PerThread,
                (stream: u64, graph: *mut c_void)
                => stream_capture::end(stream_hooks::per_thread(stream),
                    driver_table::call!(cuStreamEndCapture_ptsz(stream, graph)));
            cuStreamDestroy_v2: "cuStreamDestroy", 4000, Either,
                (stream: u64) => stream_hooks::destroy(stream);
            cuStreamCreate: "cuStreamCreate", 2000, Either,
                (created: *mut u64, flags: c_uint)
                => stream_hooks::create(created, || driver_table::call!(cuStreamCreate(created, flags)));
            cuStreamCreateWithPriority: "cuStreamCreateWithPriority", 5050, Either,
                (created: *mut u64, flags: c_uint, priority: c_int)
                => stream_hooks::create(created,
                    || driver_table::call!(cuStreamCreateWithPriority(created, flags, priority)));

            cuMemGetInfo_v2: "cuMemGetInfo", 3020, Either,
                (free: *mut usize, total: *mut usize) => mem_info::memory_info(free, total);
            cuMemGetAddressRange_v2: "cuMemGetAddressRange", 3020, Either,
                (start: *mut u64, size: *mut usize, address: u64)
                => mem_info::address_range(start, size, address);

            cuPointerGetAttribute: "cuPointerGetAttribute", 4000, Either,
                (value: *mut c_void, attribute: c_uint, address: u64)
                => pointer_attributes::get_one(value, attribute, address);
            cuPointerGetAttributes: "cuPointerGetAttributes", 7000, Either,
                (count: c_uint, attributes: *const c_uint, values: *const *mut c_void, address: u64)
                => pointer_attributes::get_several(count, attributes, values, address);
            cuMemCreate: "cuMemCreate", 10020, Either,
                (handle: *mut u64, size: usize, properties: *const AllocationProp, flags: c_ulonglong)
                => vmm_hooks::create(handle, size, properties, flags);
            cuMemRelease: "cuMemRelease", 10020, Either,
                (handle: u64) => vmm_hooks::release(handle);
            cuMemAddressReserve: "cuMemAddressReserve", 10020, Either,
                (address: *mut u64, size: usize, alignment: usize, wanted: u64, flags: c_ulonglong)
                => vmm_hooks::reserve(address, size, alignment, wanted, flags);
            cuMemAddressFree: "cuMemAddressFree", 10020, Either,
                (address: u64, size: usize) => vmm_hooks::free_addresses(address, size);
            cuMemMap: "cuMemMap", 10020, Either,
                (address: u64, size: usize, offset: usize, handle: u64, flags: c_ulonglong)
                => vmm_hooks::map(address, size, offset, handle, flags);
            cuMemUnmap: "cuMemUnmap", 10020, Either,
                (address: u64, size: usize) => vmm_hooks::unmap(address, size);
            cuMemSetAccess: "cuMemSetAccess", 10020, Either,
                (address: u64, size: usize, access: *const AccessDesc, count: usize)
                => vmm_hooks::set_access(address, size, access, count);
            cuMemGetAccess: "cuMemGetAccess", 10020, Either,
                (flags: *mut c_ulonglong, location: *const c_void, address: u64)
                => vmm_hooks::ask_first(address);
            cuMemRetainAllocationHandle: "cuMemRetainAllocationHandle", 11000, Either,
                (handle: *mut u64, address: u64)
                => pointer_attributes::refuse_handle(address).or_else(|| vmm_hooks::retain(handle, address));
            cuMemExportToShareableHandle: "cuMemExportToShareableHandle", 10020, Either,
                (to: *mut c_void, handle: u64, kind: c_uint, flags: c_ulonglong)
                => vmm_hooks::expose(handle);
            cuMemGetHandleForAddressRange: "cuMemGetHandleForAddressRange", 11070, Either,
                (handle: *mut c_void, address: u64, size: usize, kind: c_uint, flags: c_ulonglong)
                => vmm_hooks::expose_at(address, size);
            cuMulticastBindMem: "cuMulticastBindMem", 12010, Either,
                (group: u64, offset: usize, handle: u64, at: usize, size: usize, flags: c_ulonglong)
                => vmm_hooks::expose(handle);
            cuMulticastBindMem_v2: "cuMulticastBindMem", 13010, Either,
                (group: u64, device: c_int, offset: usize, handle: u64, at: usize, size: usize,
                    flags: c_ulonglong)
                => vmm_hooks::expose(handle);
            cuMulticastBindAddr: "cuMulticastBindAddr", 12010, Either,
                (group: u64, offset: usize, address: u64, size: usize, flags: c_ulonglong)
                => vmm_hooks::expose_at(address, size);
            cuMulticastBindAddr_v2: "cuMulticastBindAddr", 13010, Either,
                (group: u64, device: c_int, offset: usize, address: u64, size: usize,
                    flags: c_ulonglong)
                => vmm_hooks::expose_at(address, size);
            cuMemMapArrayAsync: "cuMemMapArrayAsync", 11010, Legacy,
                (list: *mut c_void, count: c_uint, stream: u64) => vmm_hooks::expose_all();
            cuMemMapArrayAsync_ptsz: "cuMemMapArrayAsync", 11010, PerThread,
                (list: *mut c_void, count: c_uint, stream: u64) => vmm_hooks::expose_all();
            cuIpcGetMemHandle: "cuIpcGetMemHandle", 4010, Either,
                (handle: *mut c_void, address: u64) => ipc_hooks::get(handle, address);
            cuIpcOpenMemHandle: "cuIpcOpenMemHandle", 4010, Either,
                (address: *mut u64, handle: IpcHandle, flags: c_uint)
                => ipc_hooks::open(address, handle, flags);
            cuIpcOpenMemHandle_v2: "cuIpcOpenMemHandle", 11000, Either,
                (address: *mut u64, handle: IpcHandle, flags: c_uint)
                => ipc_hooks::open(address, handle, flags);
            cuIpcCloseMemHandle: "cuIpcCloseMemHandle", 4010, Either,
                (address: u64) => ipc_hooks::close(address);

            cuDevicePrimaryCtxRetain: "cuDevicePrimaryCtxRetain", 7000, Either,
                (context: *mut usize, device: c_int)
                => context_teardown::retained(device,
                    driver_table::call!(cuDevicePrimaryCtxRetain(context, device)));
            cuDevicePrimaryCtxRelease: "cuDevicePrimaryCtxRelease", 7000, Either,
                (device: c_int)
                => context_teardown::release(device, || driver_table::call!(cuDevicePrimaryCtxRelease(device)));
            cuDevicePrimaryCtxRelease_v2: "cuDevicePrimaryCtxRelease", 11000, Either,
                (device: c_int)
                => context_teardown::release(device, || driver_table::call!(cuDevicePrimaryCtxRelease_v2(device)));
            cuDevicePrimaryCtxReset: "cuDevicePrimaryCtxReset", 7000, Either,
                (device: c_int)
                => context_teardown::reset(device, || driver_table::call!(cuDevicePrimaryCtxReset(device)));
            cuDevicePrimaryCtxReset_v2: "cuDevicePrimaryCtxReset", 11000, Either,
                (device: c_int)
                => context_teardown::reset(device, || driver_table::call!(cuDevicePrimaryCtxReset_v2(device)));

            cuGetProcAddress: "cuGetProcAddress", 11030, Legacy,
                (name: *const c_char, function: *mut *mut c_void, version: c_int,
                    flags: c_ulonglong)
                => proc_address::find(name, function, version, flags,
                    driver_table::call!(cuGetProcAddress(name, function, version, flags)));
            cuGetProcAddress_v2: "cuGetProcAddress", 12000, Legacy,
                (name: *const c_char, function: *mut *mut c_void, version: c_int,
                    flags: c_ulonglong, status: *mut c_uint)
                => proc_address::find(name, function, version, flags,
                    driver_table::call!(cuGetProcAddress_v2(name, function, version, flags, status)));
            cuGetProcAddress_v2_ptsz: "cuGetProcAddress", 12000, PerThread,
                (name: *const c_char, function: *mut *mut c_void, version: c_int,
                    flags: c_ulonglong, status: *mut c_uint)
                => proc_address::find(name, function, version, proc_address::per_thread(flags),
                    driver_table::call!(cuGetProcAddress_v2_ptsz(name, function, version, flags, status)));
        }
    };
}
pub(super) use interposed;

/// Calls `$then!` with the functions by which the driver allocates for itself: arrays, contexts, modules, what kernels
/// need when they are first launched. If it is out of memory, the pool's cached memory is returned to it and the call
/// is made again; see `retry_oom`.
///
/// ```text
/// symbol[values that the driver writes over; how many]: name for cuGetProcAddress, CUDA version that brought
///     this form, default stream, whose memory it needs, (arguments);
/// ```
///
/// With modules loaded lazily, whatever first asks for something in one may load it. `cuGraphInstantiate` is not
/// there: which function that name means differs from version to version.
macro_rules! retried {
    ($then:ident) => {
        $then! {
            cuArrayCreate_v2: "cuArrayCreate", 3020, Either, CurrentDevice,
                (array: *mut *mut c_void, what: *const c_void);
            cuArray3DCreate_v2: "cuArray3DCreate", 3020, Either, CurrentDevice,
                (array: *mut *mut c_void, what: *const c_void);
            cuMipmappedArrayCreate: "cuMipmappedArrayCreate", 5000, Either, CurrentDevice,
                (array: *mut *mut c_void, what: *const c_void, levels: c_uint);
            cuMemAllocManaged: "cuMemAllocManaged", 6000, Either, CurrentDevice,
                (address: *mut u64, bytes: usize, flags: c_uint);
            cuCtxCreate_v2: "cuCtxCreate", 3020, Either, AllDevices,
                (context: *mut *mut c_void, flags: c_uint, device: c_int);
            cuCtxCreate_v3: "cuCtxCreate", 11040, Either, AllDevices,
                (context: *mut *mut c_void, affinity: *mut c_void, count: c_int, flags: c_uint,
                    device: c_int);
            cuCtxCreate_v4: "cuCtxCreate", 12050, Either, AllDevices,
                (context: *mut *mut c_void, what: *mut c_void, flags: c_uint, device: c_int);
            cuCtxSetLimit: "cuCtxSetLimit", 3010, Either, CurrentDevice, (limit: c_uint, value: usize);

            cuModuleLoad: "cuModuleLoad", 2000, Either, CurrentDevice, (module: *mut *mut c_void, file: *const c_char);
            cuModuleLoadData: "cuModuleLoadData", 2000, Either, CurrentDevice,
                (module: *mut *mut c_void, image: *const c_void);
            cuModuleLoadDataEx[values; count]: "cuModuleLoadDataEx", 2010, Either, CurrentDevice,
                (module: *mut *mut c_void, image: *const c_void, count: c_uint, options: *mut c_void,
                    values: *mut usize);
            cuModuleLoadFatBinary: "cuModuleLoadFatBinary", 2000, Either, CurrentDevice,
                (module: *mut *mut c_void, image: *const c_void);
            cuModuleGetFunction: "cuModuleGetFunction", 2000, Either, CurrentDevice,
                (function: *mut *mut c_void, module: *mut c_void, name: *const c_char);
            cuModuleGetGlobal_v2: "cuModuleGetGlobal", 3020, Either, CurrentDevice,
                (address: *mut u64, bytes: *mut usize, module: *mut c_void, name: *const c_char);
            cuLibraryLoadData[values; count]: "cuLibraryLoadData", 12000, Either, CurrentDevice,
                (library: *mut *mut c_void, code: *const c_void, options: *mut c_void, values: *mut usize,
                    count: c_uint, library_options: *mut c_void, library_values: *mut *mut c_void,
                    library_count: c_uint);
            cuLibraryLoadFromFile[values; count]: "cuLibraryLoadFromFile", 12000, Either, CurrentDevice,
                (library: *mut *mut c_void, file: *const c_char, options: *mut c_void, values: *mut usize,
                    count: c_uint, library_options: *mut c_void, library_values: *mut *mut c_void,
                    library_count: c_uint);
            cuLibraryGetModule: "cuLibraryGetModule", 12000, Either, CurrentDevice,
                (module: *mut *mut c_void, library: *mut c_void);
            cuLibraryGetGlobal: "cuLibraryGetGlobal", 12000, Either, CurrentDevice,
                (address: *mut u64, bytes: *mut usize, library: *mut c_void, name: *const c_char);
            cuLibraryGetManaged: "cuLibraryGetManaged", 12000, Either, CurrentDevice,
                (address: *mut u64, bytes: *mut usize, library: *mut c_void, name: *const c_char);
            cuKernelGetFunction: "cuKernelGetFunction", 12000, Either, CurrentDevice,
                (function: *mut *mut c_void, kernel: *mut c_void);
            cuKernelGetAttribute: "cuKernelGetAttribute", 12000, Either, AllDevices,
                (value: *mut c_int, attribute: c_uint, kernel: *mut c_void, device: c_int);
            cuKernelSetAttribute: "cuKernelSetAttribute", 12000, Either, AllDevices,
                (attribute: c_uint, value: c_int, kernel: *mut c_void, device: c_int);
            cuFuncLoad: "cuFuncLoad", 12040, Either, CurrentDevice, (function: *mut c_void);
            cuFuncGetAttribute: "cuFuncGetAttribute", 2020, Either, CurrentDevice,
                (value: *mut c_int, attribute: c_uint, function: *mut c_void);
            cuFuncSetAttribute: "cuFuncSetAttribute", 9000, Either, CurrentDevice,
                (function: *mut c_void, attribute: c_uint, value: c_int);

            cuLaunchKernel: "cuLaunchKernel", 4000, Legacy, CurrentDevice,
                (function: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
                    block_y: c_uint, block_z: c_uint, shared: c_uint, stream: u64,
                    arguments: *mut *mut c_void, extra: *mut *mut c_void);
            cuLaunchKernel_ptsz: "cuLaunchKernel", 7000, PerThread, CurrentDevice,
                (function: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
                    block_y: c_uint, block_z: c_uint, shared: c_uint, stream: u64,
                    arguments: *mut *mut c_void, extra: *mut *mut c_void);
            cuLaunchKernelEx: "cuLaunchKernelEx", 11060, Legacy, CurrentDevice,
                (how: *const c_void, function: *mut c_void, arguments: *mut *mut c_void,
                    extra: *mut *mut c_void);
            cuLaunchKernelEx_ptsz: "cuLaunchKernelEx", 11060, PerThread, CurrentDevice,
                (how: *const c_void, function: *mut c_void, arguments: *mut *mut c_void,
                    extra: *mut *mut c_void);
            cuLaunchCooperativeKernel: "cuLaunchCooperativeKernel", 9000, Legacy, CurrentDevice,
                (function: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
                    block_y: c_uint, block_z: c_uint, shared: c_uint, stream: u64,
                    arguments: *mut *mut c_void);
            cuLaunchCooperativeKernel_ptsz: "cuLaunchCooperativeKernel", 9000, PerThread, CurrentDevice,
                (function: *mut c_void, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint,
                    block_y: c_uint, block_z: c_uint, shared: c_uint, stream: u64,
                    arguments: *mut *mut c_void);
            cuGraphInstantiateWithFlags: "cuGraphInstantiateWithFlags", 11040, Either, AllDevices,
                (made: *mut *mut c_void, graph: *mut c_void, flags: c_ulonglong);
            cuGraphInstantiateWithParams: "cuGraphInstantiateWithParams", 12000, Legacy, AllDevices,
                (made: *mut *mut c_void, graph: *mut c_void, how: *mut c_void);
            cuGraphInstantiateWithParams_ptsz: "cuGraphInstantiateWithParams", 12000, PerThread, AllDevices,
                (made: *mut *mut c_void, graph: *mut c_void, how: *mut c_void);
            cuGraphUpload: "cuGraphUpload", 11010, Legacy, AllDevices, (graph: *mut c_void, stream: u64);
            cuGraphUpload_ptsz: "cuGraphUpload", 11010, PerThread, AllDevices,
                (graph: *mut c_void, stream: u64);
            cuGraphLaunch: "cuGraphLaunch", 10000, Legacy, AllDevices, (graph: *mut c_void, stream: u64);
            cuGraphLaunch_ptsz: "cuGraphLaunch", 10000, PerThread, AllDevices,
                (graph: *mut c_void, stream: u64);
        }
    };
}
pub(super) use retried;
