//! The list of driver functions, how often each was called, and which calls are to fail.

use cudarc::driver::sys::CUresult;

macro_rules! functions {
    ($($name:ident)*) => {
        /// The driver functions by name.
        #[allow(non_camel_case_types, clippy::enum_variant_names, reason = "they are the driver's")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Function { $($name),* }

        /// The names of all functions of the simulated driver.
        pub const FUNCTIONS: &[&str] = &[$(stringify!($name)),*];
    };
}

functions! {
    cuInit cuDriverGetVersion cuGetErrorName cuGetErrorString
    cuDeviceGetCount cuDeviceGet cuDeviceGetAttribute cuDeviceGetName cuDeviceTotalMem_v2
    cuDeviceGetUuid_v2 cuDeviceGetPCIBusId cuDeviceGetByPCIBusId cuDeviceGetP2PAttribute
    cuDeviceCanAccessPeer cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2
    cuDevicePrimaryCtxGetState cuDevicePrimaryCtxReset_v2 cuDevicePrimaryCtxSetFlags_v2
    cuCtxGetDevice cuCtxGetFlags cuCtxGetApiVersion cuCtxGetId cuCtxGetStreamPriorityRange
    cuCtxGetLimit cuCtxSetLimit cuCtxEnablePeerAccess cuCtxDisablePeerAccess
    cuCtxCreate_v2 cuCtxDestroy_v2 cuCtxGetCurrent cuCtxSetCurrent cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuCtxSynchronize
    cuMemGetInfo_v2 cuMemAlloc_v2 cuMemAllocPitch_v2 cuMemFree_v2
    cuMemHostAlloc cuMemAllocHost_v2 cuMemFreeHost cuMemHostRegister_v2 cuMemHostUnregister
    cuMemHostGetDevicePointer_v2 cuMemHostGetFlags cuMemAllocManaged
    cuMemAllocAsync cuMemAllocFromPoolAsync cuMemFreeAsync
    cuDeviceGetDefaultMemPool cuDeviceGetMemPool cuDeviceSetMemPool cuMemPoolCreate cuMemPoolDestroy
    cuMemPoolTrimTo cuMemPoolGetAttribute cuMemPoolSetAttribute cuMemPoolGetAccess
    cuMemPoolSetAccess
    cuPointerGetAttribute cuPointerGetAttributes cuMemGetAddressRange_v2
    cuMemGetAllocationGranularity cuMemAddressReserve cuMemAddressFree cuMemCreate cuMemRelease
    cuMemMap cuMemUnmap cuMemSetAccess
    cuIpcGetMemHandle cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle cuIpcGetEventHandle
    cuIpcOpenEventHandle cuMemExportToShareableHandle cuMemImportFromShareableHandle
    cuMemRetainAllocationHandle cuMemGetAllocationPropertiesFromHandle
    cuEventCreate cuEventRecord cuEventRecordWithFlags cuEventElapsedTime_v2 cuCtxRecordEvent cuEventQuery cuEventSynchronize cuEventDestroy_v2
    cuStreamCreate cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamGetId cuStreamGetPriority
    cuStreamGetFlags cuStreamGetDevice cuStreamIsCapturing cuStreamGetCtx
    cuThreadExchangeStreamCaptureMode cuStreamSynchronize cuStreamQuery cuStreamWaitEvent
    cuStreamAddCallback cuStreamBeginCapture_v2 cuStreamEndCapture cuStreamGetCaptureInfo_v3
    cuGraphCreate cuGraphDestroy cuGraphGetNodes cuGraphInstantiateWithFlags cuGraphExecDestroy
    cuGraphLaunch cuGraphUpload cuGraphDebugDotPrint cuGraphAddEmptyNode cuGraphNodeGetType
    cuGraphNodeGetDependencies_v2 cuStreamUpdateCaptureDependencies_v2
    cuMemsetD8Async cuMemsetD8_v2 cuMemsetD16Async cuMemsetD16_v2 cuMemsetD32Async cuMemsetD32_v2
    cuMemsetD2D8Async cuMemsetD2D8_v2 cuMemsetD2D16Async cuMemsetD2D16_v2
    cuMemsetD2D32Async cuMemsetD2D32_v2
    cuMemcpyAsync cuMemcpy cuMemcpyDtoDAsync_v2 cuMemcpyDtoD_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoH_v2
    cuMemcpyHtoDAsync_v2 cuMemcpyHtoD_v2 cuMemcpyPeerAsync
    cuMemcpy2DAsync_v2 cuMemcpy2D_v2 cuMemcpy2DUnaligned_v2 cuMemcpy3DAsync_v2 cuMemcpy3D_v2
    cuLaunchHostFunc cuLaunchKernel cuLaunchKernelEx
    cuModuleLoadData cuModuleLoadDataEx cuModuleUnload cuModuleGetFunction cuArrayCreate_v2 cuArrayDestroy
}

impl Function {
    pub fn name(self) -> &'static str {
        FUNCTIONS[self as usize]
    }
}

/// The index of a function. Panics if there is none: names come from tests.
fn index(name: &str) -> usize {
    FUNCTIONS
        .iter()
        .position(|known| *known == name)
        .unwrap_or_else(|| panic!("the simulated driver has no function {name}"))
}

/// Counts of calls, and planned failures.
#[derive(Debug)]
pub(crate) struct Failures {
    calls: [u64; FUNCTIONS.len()],
    /// Function, the number of the call that fails (or every call), status.
    planned: Vec<(usize, Option<u64>, CUresult)>,
}

impl Default for Failures {
    fn default() -> Self {
        Failures {
            calls: [0; FUNCTIONS.len()],
            planned: Vec::new(),
        }
    }
}

impl Failures {
    /// Counts a call and returns the status that it is to fail with, if any. One comparison if no failure is
    /// planned.
    pub fn count(&mut self, function: Function) -> Option<CUresult> {
        let index = function as usize;
        self.calls[index] += 1;
        if self.planned.is_empty() {
            None
        } else {
            self.due(index)
        }
    }

    #[cold]
    fn due(&mut self, index: usize) -> Option<CUresult> {
        let use_of = self.calls[index];
        let due = |&(of, nth, _): &(usize, Option<u64>, CUresult)| {
            of == index && nth.is_none_or(|nth| nth == use_of)
        };
        let found = self.planned.iter().position(due)?;
        let (_, nth, status) = self.planned[found];
        if nth.is_some() {
            self.planned.remove(found);
        }
        Some(status)
    }

    pub fn plan(&mut self, name: &str, nth: Option<u64>, status: CUresult) {
        let index = index(name);
        assert!(nth != Some(0), "uses are counted from 1");
        self.planned
            .push((index, nth.map(|nth| self.calls[index] + nth), status));
    }

    pub fn clear(&mut self) {
        self.planned.clear();
    }

    pub fn calls(&self, name: &str) -> u64 {
        self.calls[index(name)]
    }
}
