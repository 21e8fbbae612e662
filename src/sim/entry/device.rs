//! The driver itself and its devices.

use crate::call::{call, check_output, write_output};
use crate::failure::Function;
use crate::run::Session;
use crate::state::DriverResult;
use cudarc::driver::sys::{CUdevice, CUdevice_P2PAttribute, CUdevice_attribute, CUresult, CUuuid};
use std::ffi::{CStr, c_char, c_int, c_uint};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const NO_SUCH_DEVICE: CUresult = CUresult::CUDA_ERROR_INVALID_DEVICE;

/// The index of a device that exists.
pub(super) fn device(session: &Session<'_>, device: CUdevice) -> DriverResult<usize> {
    let index = usize::try_from(device).map_err(|_| NO_SUCH_DEVICE)?;
    if index < session.state.config.devices {
        Ok(index)
    } else {
        Err(NO_SUCH_DEVICE)
    }
}

/// Initialises the driver; before it all but the driver's version and error names is refused.
pub unsafe extern "C" fn cuInit(flags: c_uint) -> u32 {
    call(Function::cuInit, |session| {
        if flags != 0 {
            return Err(INVALID);
        }
        session.state.initialised = true;
        Ok(())
    })
}

/// Says that this is a driver of CUDA 13.0.
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> u32 {
    call(Function::cuDriverGetVersion, |_| {
        // SAFETY: the module's contract.
        unsafe { write_output(version, 13000) }
    })
}

macro_rules! names {
    ($($name:ident)*) => {
        /// The name of a status.
        fn name_of(status: u32) -> Option<&'static CStr> {
            const NAMES: &[(u32, &str)] =
                &[$((CUresult::$name as u32, concat!(stringify!($name), "\0"))),*];
            let (_, name) = NAMES.iter().find(|(known, _)| *known == status)?;
            CStr::from_bytes_with_nul(name.as_bytes()).ok()
        }
    };
}

names! {
    CUDA_SUCCESS
    CUDA_ERROR_INVALID_VALUE
    CUDA_ERROR_OUT_OF_MEMORY
    CUDA_ERROR_NOT_INITIALIZED
    CUDA_ERROR_DEINITIALIZED
    CUDA_ERROR_PROFILER_DISABLED
    CUDA_ERROR_PROFILER_NOT_INITIALIZED
    CUDA_ERROR_PROFILER_ALREADY_STARTED
    CUDA_ERROR_PROFILER_ALREADY_STOPPED
    CUDA_ERROR_STUB_LIBRARY
    CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER
    CUDA_ERROR_DEVICE_UNAVAILABLE
    CUDA_ERROR_NO_DEVICE
    CUDA_ERROR_INVALID_DEVICE
    CUDA_ERROR_DEVICE_NOT_LICENSED
    CUDA_ERROR_INVALID_IMAGE
    CUDA_ERROR_INVALID_CONTEXT
    CUDA_ERROR_CONTEXT_ALREADY_CURRENT
    CUDA_ERROR_MAP_FAILED
    CUDA_ERROR_UNMAP_FAILED
    CUDA_ERROR_ARRAY_IS_MAPPED
    CUDA_ERROR_ALREADY_MAPPED
    CUDA_ERROR_NO_BINARY_FOR_GPU
    CUDA_ERROR_ALREADY_ACQUIRED
    CUDA_ERROR_NOT_MAPPED
    CUDA_ERROR_NOT_MAPPED_AS_ARRAY
    CUDA_ERROR_NOT_MAPPED_AS_POINTER
    CUDA_ERROR_ECC_UNCORRECTABLE
    CUDA_ERROR_UNSUPPORTED_LIMIT
    CUDA_ERROR_CONTEXT_ALREADY_IN_USE
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
    CUDA_ERROR_INVALID_PTX
    CUDA_ERROR_INVALID_GRAPHICS_CONTEXT
    CUDA_ERROR_NVLINK_UNCORRECTABLE
    CUDA_ERROR_JIT_COMPILER_NOT_FOUND
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION
    CUDA_ERROR_JIT_COMPILATION_DISABLED
    CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY
    CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC
    CUDA_ERROR_CONTAINED
    CUDA_ERROR_INVALID_SOURCE
    CUDA_ERROR_FILE_NOT_FOUND
    CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND
    CUDA_ERROR_SHARED_OBJECT_INIT_FAILED
    CUDA_ERROR_OPERATING_SYSTEM
    CUDA_ERROR_INVALID_HANDLE
    CUDA_ERROR_ILLEGAL_STATE
    CUDA_ERROR_LOSSY_QUERY
    CUDA_ERROR_NOT_FOUND
    CUDA_ERROR_NOT_READY
    CUDA_ERROR_ILLEGAL_ADDRESS
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    CUDA_ERROR_LAUNCH_TIMEOUT
    CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE
    CUDA_ERROR_CONTEXT_IS_DESTROYED
    CUDA_ERROR_ASSERT
    CUDA_ERROR_TOO_MANY_PEERS
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
    CUDA_ERROR_HARDWARE_STACK_ERROR
    CUDA_ERROR_ILLEGAL_INSTRUCTION
    CUDA_ERROR_MISALIGNED_ADDRESS
    CUDA_ERROR_INVALID_ADDRESS_SPACE
    CUDA_ERROR_INVALID_PC
    CUDA_ERROR_LAUNCH_FAILED
    CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
    CUDA_ERROR_TENSOR_MEMORY_LEAK
    CUDA_ERROR_NOT_PERMITTED
    CUDA_ERROR_NOT_SUPPORTED
    CUDA_ERROR_SYSTEM_NOT_READY
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
    CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
    CUDA_ERROR_MPS_CONNECTION_FAILED
    CUDA_ERROR_MPS_RPC_FAILURE
    CUDA_ERROR_MPS_SERVER_NOT_READY
    CUDA_ERROR_MPS_MAX_CLIENTS_REACHED
    CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED
    CUDA_ERROR_MPS_CLIENT_TERMINATED
    CUDA_ERROR_CDP_NOT_SUPPORTED
    CUDA_ERROR_CDP_VERSION_MISMATCH
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    CUDA_ERROR_STREAM_CAPTURE_MERGE
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    CUDA_ERROR_CAPTURED_EVENT
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
    CUDA_ERROR_TIMEOUT
    CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
    CUDA_ERROR_EXTERNAL_DEVICE
    CUDA_ERROR_INVALID_CLUSTER_SIZE
    CUDA_ERROR_FUNCTION_NOT_LOADED
    CUDA_ERROR_INVALID_RESOURCE_TYPE
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION
    CUDA_ERROR_KEY_ROTATION
    CUDA_ERROR_UNKNOWN
}

/// The name of a status; null and `CUDA_ERROR_INVALID_VALUE` if it has none.
pub unsafe extern "C" fn cuGetErrorName(error: u32, name: *mut *const c_char) -> u32 {
    call(Function::cuGetErrorName, |_| {
        let found = name_of(error);
        // SAFETY: the module's contract.
        unsafe { write_output(name, found.map_or(std::ptr::null(), CStr::as_ptr))? };
        found.map(drop).ok_or(INVALID)
    })
}

/// What a status means: its name, for want of anything better.
pub unsafe extern "C" fn cuGetErrorString(error: u32, text: *mut *const c_char) -> u32 {
    call(Function::cuGetErrorString, |_| {
        let found = name_of(error);
        // SAFETY: the module's contract.
        unsafe { write_output(text, found.map_or(std::ptr::null(), CStr::as_ptr))? };
        found.map(drop).ok_or(INVALID)
    })
}

/// The number of devices.
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> u32 {
    call(Function::cuDeviceGetCount, |session| {
        // SAFETY: the module's contract.
        unsafe { write_output(count, session.state.config.devices as c_int) }
    })
}

/// The device of an ordinal, which is the ordinal.
pub unsafe extern "C" fn cuDeviceGet(to: *mut CUdevice, ordinal: c_int) -> u32 {
    call(Function::cuDeviceGet, |session| {
        device(session, ordinal)?;
        // SAFETY: the module's contract.
        unsafe { write_output(to, ordinal) }
    })
}

/// An attribute of a device: those of an H100 that programs look at, 0 for the rest.
pub unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: CUdevice_attribute,
    of: CUdevice,
) -> u32 {
    use CUdevice_attribute::*;
    call(Function::cuDeviceGetAttribute, |session| {
        device(session, of)?;
        let answer = match attribute {
            CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED => {
                c_int::from(session.state.config.virtual_memory)
            }
            CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
            | CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
            | CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
            | CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY
            | CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
            | CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
            | CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH
            | CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED
            | CU_DEVICE_ATTRIBUTE_ECC_ENABLED => 1,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => 132,
            CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
            | CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X
            | CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y => 1024,
            CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z => 64,
            CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X => 0x7fff_ffff,
            CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y | CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z => 65535,
            CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR => 2048,
            CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR => 32,
            CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK
            | CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR
            | CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY => 65536,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK => 49152,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => 232_448,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR => 233_472,
            CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK => 1024,
            CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => 50 << 20,
            CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH => 5120,
            CU_DEVICE_ATTRIBUTE_CLOCK_RATE => 1_980_000,
            CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE => 2_619_000,
            CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT => 3,
            CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT => 512,
            CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT => 32,
            CU_DEVICE_ATTRIBUTE_MAX_PITCH => 0x7fff_ffff,
            // The number that `cuDeviceGetPCIBusId` puts in its text.
            CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => of + 1,
            CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
            _ => 0,
        };
        // SAFETY: the module's contract.
        unsafe { write_output(value, answer) }
    })
}

/// The name of a device, cut to the room there is.
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, of: CUdevice) -> u32 {
    const NAME: &CStr = c"Simulated GPU";
    call(Function::cuDeviceGetName, |session| {
        device(session, of)?;
        check_output(name)?;
        let room = usize::try_from(length)
            .ok()
            .and_then(|length| length.checked_sub(1));
        let text = NAME.to_bytes();
        let text = &text[..text.len().min(room.ok_or(INVALID)?)];
        // SAFETY: the module's contract: `length` bytes may be written, and these and the final
        // zero are no more.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast::<u8>(), text.len());
            name.add(text.len()).write(0);
        }
        Ok(())
    })
}

/// A device's physical memory.
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, of: CUdevice) -> u32 {
    call(Function::cuDeviceTotalMem_v2, |session| {
        device(session, of)?;
        // SAFETY: the module's contract.
        unsafe { write_output(bytes, session.state.config.memory as usize) }
    })
}

/// Whether one device can reach another's memory; never its own.
pub unsafe extern "C" fn cuDeviceCanAccessPeer(
    can: *mut c_int,
    of: CUdevice,
    peer: CUdevice,
) -> u32 {
    call(Function::cuDeviceCanAccessPeer, |session| {
        let other = device(session, of)? != device(session, peer)?;
        // SAFETY: the module's contract.
        unsafe { write_output(can, c_int::from(other && session.state.config.peers)) }
    })
}

/// A number of 16 bytes that no other device has.
pub unsafe extern "C" fn cuDeviceGetUuid_v2(to: *mut CUuuid, of: CUdevice) -> u32 {
    call(Function::cuDeviceGetUuid_v2, |session| {
        let index = device(session, of)?;
        check_output(to)?;
        let mut bytes = *b"concertina-sim-0";
        bytes[15] += index as u8;
        // SAFETY: the module's contract.
        unsafe { write_output(to.cast::<[u8; 16]>(), bytes) }
    })
}

/// Where a device sits, as `domain:bus:device.function`, cut to the room there is.
pub unsafe extern "C" fn cuDeviceGetPCIBusId(to: *mut c_char, length: c_int, of: CUdevice) -> u32 {
    call(Function::cuDeviceGetPCIBusId, |session| {
        let index = device(session, of)?;
        check_output(to)?;
        let room = usize::try_from(length)
            .ok()
            .and_then(|length| length.checked_sub(1));
        let text = bus_id(index);
        let text = &text.as_bytes()[..text.len().min(room.ok_or(INVALID)?)];
        // SAFETY: the module's contract: `length` bytes may be written, and these and the final
        // zero are no more.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast::<u8>(), text.len());
            to.add(text.len()).write(0);
        }
        Ok(())
    })
}

fn bus_id(index: usize) -> String {
    format!("0000:{:02X}:00.0", index + 1)
}

/// The device that sits there.
pub unsafe extern "C" fn cuDeviceGetByPCIBusId(to: *mut CUdevice, text: *const c_char) -> u32 {
    call(Function::cuDeviceGetByPCIBusId, |session| {
        if text.is_null() {
            return Err(INVALID);
        }
        // SAFETY: the module's contract: text that ends in a zero.
        let text = unsafe { CStr::from_ptr(text) };
        let found = (0..session.state.config.devices)
            .find(|index| text.to_bytes() == bus_id(*index).as_bytes());
        // SAFETY: the module's contract.
        unsafe { write_output(to, found.ok_or(NO_SUCH_DEVICE)? as CUdevice) }
    })
}

/// What two devices can do with each other's memory.
pub unsafe extern "C" fn cuDeviceGetP2PAttribute(
    value: *mut c_int,
    attribute: CUdevice_P2PAttribute,
    of: CUdevice,
    peer: CUdevice,
) -> u32 {
    use CUdevice_P2PAttribute::*;
    call(Function::cuDeviceGetP2PAttribute, |session| {
        if device(session, of)? == device(session, peer)? {
            return Err(NO_SUCH_DEVICE);
        }
        let peers = c_int::from(session.state.config.peers);
        let answer = match attribute {
            CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED
            | CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED => peers,
            _ => 0,
        };
        // SAFETY: the module's contract.
        unsafe { write_output(value, answer) }
    })
}
