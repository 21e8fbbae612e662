//! Types and status codes of the driver's interface, as far as the hooks read them (`cuda.h`).

use concertina_engine::ipc::HANDLE_SIZE;
use std::ffi::{c_int, c_uint};

/// What a hook answers: the status that the program gets, or `None` to pass the call on to the driver.
pub type Answer = Option<u32>;

/// `CUDA_ERROR_INVALID_VALUE`.
pub const INVALID_VALUE: u32 = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub const OUT_OF_MEMORY: u32 = 2;
/// `CUDA_ERROR_INVALID_CONTEXT`.
pub const INVALID_CONTEXT: u32 = 201;
/// `CUDA_ERROR_MAP_FAILED`.
pub const MAP_FAILED: u32 = 205;
/// `CUDA_ERROR_NOT_FOUND`: what a program gets that calls a function which its driver lacks. Without this library
/// it would not have started.
pub const NOT_FOUND: u32 = 500;

/// `CU_STREAM_PER_THREAD`. Handles up to this are default streams, of the context that is current.
pub const PER_THREAD: u64 = 2;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
pub const PINNED: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub const DEVICE: c_int = 1;

/// `CUipcMemHandle`, passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct IpcHandle(pub [u8; HANDLE_SIZE]);

/// `CUmemAllocationProp` of `cuda.h`: type, handle types, the kind and number of the place, a pointer that is
/// null but for Windows, flags.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct AllocationProp {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: Location,
    pub unused: u64,
    pub flags: [u8; 8],
}

/// `CUmemLocation`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Location {
    pub kind: c_int,
    pub id: c_int,
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct AccessDesc {
    pub location: Location,
    pub flags: c_uint,
}
