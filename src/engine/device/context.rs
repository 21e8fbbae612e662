//! A device's primary context and its properties, and making calls in them.

use crate::driver::Functions;
use crate::driver::sys::*;
use crate::util::reentrancy::{self, Inside};
use std::ffi::CStr;
use std::ptr;

/// What one device is.
#[derive(Clone, Debug)]
pub struct Properties {
    pub name: String,
    pub device: CUdevice,
    pub context: usize,
    pub total: u64,
    /// 0 where memory cannot be mapped.
    pub granularity: u64,
    /// This device and those that can reach its memory: all get access to what is mapped.
    pub reachable_by: Vec<CUdevice>,
    /// Whether chunks can be made so that another process can have a file descriptor of them.
    pub exportable: bool,
    /// Whether they can be made so that network cards reach them, as they do `cudaMalloc`'s memory.
    pub rdma: bool,
    /// Tells the device from every other, in every process.
    pub uuid: [u8; 16],
}

/// A device's name and its memory in bytes, without taking it up.
pub fn name_and_bytes(functions: &Functions, ordinal: i32) -> (String, usize) {
    let (mut device, mut name, mut total) = (0, [0; 128], 0);
    // SAFETY: every pointer is to a local that outlives its call; the name is bounded by the length given,
    // and ends in a NUL.
    let name = unsafe {
        if (functions.cuDeviceGet)(&mut device, ordinal) == 0 {
            (functions.cuDeviceGetName)(name.as_mut_ptr(), name.len() as i32 - 1, device);
            (functions.cuDeviceTotalMem_v2)(&mut total, device);
        }
        CStr::from_ptr(name.as_ptr())
    };
    (name.to_string_lossy().into_owned(), total)
}

impl Properties {
    /// Asks the driver. The primary context is retained for good: it is the one that the CUDA runtime, and so
    /// PyTorch, works in.
    pub fn of(functions: &Functions, ordinal: i32, devices: i32) -> Result<Self, String> {
        let failed = |what: &str, status| {
            format!(
                "device {ordinal}: {what} failed: {}",
                functions.error_name(status)
            )
        };
        let mut device = 0;
        // SAFETY: in this function every pointer is to a local that outlives its call.
        let status = unsafe { (functions.cuDeviceGet)(&mut device, ordinal) };
        if status != 0 {
            return Err(failed("cuDeviceGet", status));
        }
        let mut name = [0; 128];
        let mut total = 0;
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: as above; the name is bounded by the length given.
        unsafe {
            (functions.cuDeviceGetName)(name.as_mut_ptr(), name.len() as i32 - 1, device);
            (functions.cuDeviceTotalMem_v2)(&mut total, device);
            let status = (functions.cuDevicePrimaryCtxRetain)(&mut context, device);
            if status != 0 {
                return Err(failed("cuDevicePrimaryCtxRetain", status));
            }
        }
        let can = |what| {
            let mut value = 0;
            // SAFETY: as above.
            let status = unsafe { (functions.cuDeviceGetAttribute)(&mut value, what, device) };
            status == 0 && value != 0
        };
        let exportable = can(
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        );
        let rdma =
            can(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
        let mut granularity = 0;
        if can(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
            let option = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
            let properties = allocation_properties(device, exportable, rdma);
            // SAFETY: as above.
            let status = unsafe {
                (functions.cuMemGetAllocationGranularity)(&mut granularity, &properties, option)
            };
            if status != 0 || !granularity.is_power_of_two() {
                granularity = 0;
            }
        }
        let mut reachable_by = vec![device];
        for peer in (0..devices).filter(|peer| *peer != ordinal) {
            let (mut other, mut can) = (0, 0);
            // SAFETY: as above.
            let known = unsafe {
                (functions.cuDeviceGet)(&mut other, peer) == 0
                    && (functions.cuDeviceCanAccessPeer)(&mut can, other, device) == 0
            };
            if known && can != 0 {
                reachable_by.push(other);
            }
        }
        let mut uuid = [0; 16];
        // SAFETY: as above; a `CUuuid` is 16 bytes. Where the driver has none the name is all zeros.
        unsafe { (functions.cuDeviceGetUuid_v2)(uuid.as_mut_ptr().cast(), device) };
        let name = name
            .iter()
            .take_while(|c| **c != 0)
            .map(|c| *c as u8 as char)
            .collect();
        Ok(Properties {
            name,
            device,
            context: context as usize,
            total: total as u64,
            granularity: granularity as u64,
            reachable_by,
            exportable,
            rdma,
            uuid,
        })
    }
}

/// What a file descriptor of a chunk is called.
pub const FILE: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

pub fn allocation_properties(
    device: CUdevice,
    exportable: bool,
    rdma: bool,
) -> CUmemAllocationProp {
    // SAFETY: the structure is plain data for which zeros are valid; CUDA asks for zeros in what is not set.
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location(device);
    if exportable {
        properties.requestedHandleTypes = FILE;
    }
    properties.allocFlags.gpuDirectRDMACapable = rdma.into();
    properties
}

/// Access of these devices, to read and to write.
pub fn access_of(devices: &[CUdevice]) -> Vec<CUmemAccessDesc> {
    devices
        .iter()
        .map(|device| CUmemAccessDesc {
            location: location(*device),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        })
        .collect()
}

fn location(device: CUdevice) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device,
    }
}

/// Makes the device's primary context current until dropped, if it is not already. Meanwhile the thread is
/// inside: the driver works for us.
pub struct Current<'a> {
    functions: &'a Functions,
    pushed: bool,
    _inside: Inside,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped: CUcontext = ptr::null_mut();
            // SAFETY: pops what `current` pushed on this thread.
            unsafe { (self.functions.cuCtxPopCurrent_v2)(&mut popped) };
        }
    }
}

/// Makes the context current for this thread, until what it answers is dropped.
pub fn current<'a>(functions: &'a Functions, context: usize) -> Current<'a> {
    let _inside = reentrancy::enter();
    let mut now: CUcontext = ptr::null_mut();
    // SAFETY: `now` outlives the call.
    let known = unsafe { (functions.cuCtxGetCurrent)(&mut now) } == 0;
    let is_current = known && now as usize == context;
    // SAFETY: the primary context was retained and stays.
    let push = || unsafe { (functions.cuCtxPushCurrent_v2)(context as CUcontext) } == 0;
    let pushed = !is_current && push();
    Current {
        functions,
        pushed,
        _inside,
    }
}

/// What calls this thread may make while streams capture: all that end no capture, until dropped.
pub struct RelaxedMode<'a> {
    functions: &'a Functions,
    before: CUstreamCaptureMode,
}

impl<'a> RelaxedMode<'a> {
    pub fn enter(functions: &'a Functions) -> Self {
        let mut before = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: `before` outlives the call, which writes the thread's mode to it.
        unsafe { (functions.cuThreadExchangeStreamCaptureMode)(&mut before) };
        RelaxedMode { functions, before }
    }
}

impl Drop for RelaxedMode<'_> {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { (self.functions.cuThreadExchangeStreamCaptureMode)(&mut self.before) };
    }
}
