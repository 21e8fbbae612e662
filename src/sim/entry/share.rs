//! Memory and events shared with other processes of this user.

use super::device::device;
use crate::call::{call, check_output, write_output};
use crate::event::Event;
use crate::failure::Function;
use crate::memory::AllocationKind;
use crate::page::File;
use crate::state::DriverResult;
use cudarc::driver::sys::{
    CUdeviceptr, CUevent, CUipcEventHandle, CUipcMemHandle, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation,
    CUmemLocationType, CUresult,
};
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// What a handle of 64 bytes holds.
#[derive(Clone, Copy)]
#[repr(C)]
struct Handle {
    /// Tells a handle of this kind from other bytes.
    mark: u64,
    /// The process it is from, and the number of its file there; none for events.
    process: u32,
    file: c_int,
    id: u64,
    size: u64,
    device: u64,
    rest: [u64; 3],
}

const MEMORY: u64 = u64::from_le_bytes(*b"sim mem\0");
const EVENT: u64 = u64::from_le_bytes(*b"sim evt\0");

fn process() -> u32 {
    std::process::id()
}

/// A handle for the allocation at an address, which another process can open. Only what
/// `cuMemAlloc_v2` allocated has one.
pub unsafe extern "C" fn cuIpcGetMemHandle(to: *mut CUipcMemHandle, address: CUdeviceptr) -> u32 {
    call(Function::cuIpcGetMemHandle, |session| {
        session.state.device()?;
        check_output(to)?;
        let memory = &mut session.state.memory;
        let extent = memory.extent(address).ok_or(INVALID)?;
        if extent.make != Some(AllocationKind::Device) {
            return Err(INVALID);
        }
        let chunk = memory.piece(address, 1).ok_or(INVALID)?.chunk;
        let handle = Handle {
            mark: MEMORY,
            process: process(),
            file: memory.share(chunk)?,
            id: extent.id,
            size: extent.size,
            device: extent.device as u64,
            rest: [0; 3],
        };
        // SAFETY: the module's contract; both have 64 bytes.
        unsafe { write_output(to.cast::<Handle>(), handle) }
    })
}

/// Opens the allocation of another process that a handle stands for, at an address of this one's.
pub unsafe extern "C" fn cuIpcOpenMemHandle_v2(
    to: *mut CUdeviceptr,
    handle: CUipcMemHandle,
    flags: c_uint,
) -> u32 {
    call(Function::cuIpcOpenMemHandle_v2, |session| {
        session.state.device()?;
        check_output(to)?;
        // SAFETY: 64 bytes, of which any make a handle of numbers.
        let handle = unsafe { std::mem::transmute::<CUipcMemHandle, Handle>(handle) };
        if handle.mark != MEMORY || flags != 1 {
            return Err(INVALID);
        }
        if handle.process == process() {
            // A process cannot open its own.
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        let device = device(session, handle.device as i32)?;
        let origin = (handle.process, handle.id);
        let file = || File::of(handle.process, handle.file);
        let what = (device, handle.size);
        let found = session.state.memory.open_foreign(origin, what, file)?;
        // SAFETY: the module's contract.
        unsafe { write_output(to, found) }
    })
}

/// Closes an allocation of another process, after all work of the device.
pub unsafe extern "C" fn cuIpcCloseMemHandle(address: CUdeviceptr) -> u32 {
    call(Function::cuIpcCloseMemHandle, |session| {
        let device = session.state.device()?;
        session.synchronise_device(device)?;
        session.state.memory.close_foreign(address)
    })
}

/// A handle for an event made for it. What such an event stands for is done as soon as it is
/// recorded: another process need not wait.
pub unsafe extern "C" fn cuIpcGetEventHandle(to: *mut CUipcEventHandle, event: CUevent) -> u32 {
    call(Function::cuIpcGetEventHandle, |session| {
        session.state.device()?;
        check_output(to)?;
        let index = session.state.event("cuIpcGetEventHandle", event)?;
        let event = session.state.events.get(index).ok_or(INVALID)?;
        if !event.interprocess {
            return Err(INVALID);
        }
        let handle = Handle {
            mark: EVENT,
            process: process(),
            file: -1,
            id: session.state.events.handle(index),
            size: 0,
            device: event.device as u64,
            rest: [0; 3],
        };
        // SAFETY: the module's contract; both have 64 bytes.
        unsafe { write_output(to.cast::<Handle>(), handle) }
    })
}

/// An event that stands for one of another process. A process cannot open its own, as on a GPU.
pub unsafe extern "C" fn cuIpcOpenEventHandle(to: *mut CUevent, handle: CUipcEventHandle) -> u32 {
    call(Function::cuIpcOpenEventHandle, |session| {
        check_output(to)?;
        // SAFETY: 64 bytes, of which any make a handle of numbers.
        let handle = unsafe { std::mem::transmute::<CUipcEventHandle, Handle>(handle) };
        if handle.mark != EVENT {
            return Err(INVALID);
        }
        if handle.process == process() {
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        let device = device(session, handle.device as i32)?;
        let index = session.state.events.insert(Event {
            device,
            interprocess: true,
            ..Event::default()
        });
        // SAFETY: the module's contract.
        unsafe { write_output(to, session.state.events.handle(index) as CUevent) }
    })
}

/// A file descriptor for a chunk that was created to have one. It is the caller's to close.
pub unsafe extern "C" fn cuMemExportToShareableHandle(
    to: *mut c_void,
    handle: CUmemGenericAllocationHandle,
    kind: CUmemAllocationHandleType,
    flags: c_ulonglong,
) -> u32 {
    call(Function::cuMemExportToShareableHandle, |session| {
        session.state.has_virtual_memory()?;
        check_output(to)?;
        let chunk = session
            .state
            .chunk("cuMemExportToShareableHandle", handle)?;
        let memory = &mut session.state.memory;
        let exportable = memory.chunk_mut(chunk).is_some_and(|it| it.exportable);
        if kind != FILE || flags != 0 || !exportable {
            return Err(INVALID);
        }
        let file = memory.share(chunk)?;
        // SAFETY: duplicates a descriptor that is open.
        let file = unsafe { libc::fcntl(file, libc::F_DUPFD_CLOEXEC, 0) };
        if file < 0 {
            return Err(CUresult::CUDA_ERROR_OPERATING_SYSTEM);
        }
        // SAFETY: the module's contract: room for a descriptor.
        unsafe { write_output(to.cast::<c_int>(), file) }
    })
}

const FILE: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A chunk of the current device from a descriptor, which stays the caller's.
pub unsafe extern "C" fn cuMemImportFromShareableHandle(
    handle: *mut CUmemGenericAllocationHandle,
    from: *mut c_void,
    kind: CUmemAllocationHandleType,
) -> u32 {
    call(Function::cuMemImportFromShareableHandle, |session| {
        session.state.has_virtual_memory()?;
        check_output(handle)?;
        let device = session.state.device()?;
        if kind != FILE {
            return Err(INVALID);
        }
        let file = File::of(process(), from as usize as c_int).ok_or(INVALID)?;
        let found = session.state.memory.import(device, file)?;
        // SAFETY: the module's contract.
        unsafe { write_output(handle, found) }
    })
}

/// One more hold on the chunk that is mapped at an address.
pub unsafe extern "C" fn cuMemRetainAllocationHandle(
    handle: *mut CUmemGenericAllocationHandle,
    address: *mut c_void,
) -> u32 {
    call(Function::cuMemRetainAllocationHandle, |session| {
        session.state.has_virtual_memory()?;
        check_output(handle)?;
        let memory = &mut session.state.memory;
        let extent = memory.extent(address as u64).ok_or(INVALID)?;
        if extent.make.is_some() {
            return Err(INVALID);
        }
        let chunk = memory.piece(address as u64, 1).ok_or(INVALID)?.chunk;
        let found = memory.retain(chunk)?;
        // SAFETY: the module's contract.
        unsafe { write_output(handle, found) }
    })
}

/// What a chunk was created with.
pub unsafe extern "C" fn cuMemGetAllocationPropertiesFromHandle(
    to: *mut CUmemAllocationProp,
    handle: CUmemGenericAllocationHandle,
) -> u32 {
    call(
        Function::cuMemGetAllocationPropertiesFromHandle,
        |session| -> DriverResult {
            session.state.has_virtual_memory()?;
            let chunk = session
                .state
                .chunk("cuMemGetAllocationPropertiesFromHandle", handle)?;
            let chunk = session.state.memory.chunk_mut(chunk).ok_or(INVALID)?;
            // SAFETY: all numbers, of which zero is one, and null pointers.
            let mut found: CUmemAllocationProp = unsafe { std::mem::zeroed() };
            found.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            found.location = CUmemLocation {
                type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: chunk.device as c_int,
            };
            if chunk.exportable {
                found.requestedHandleTypes = FILE;
            }
            // SAFETY: the module's contract.
            unsafe { write_output(to, found) }
        },
    )
}
