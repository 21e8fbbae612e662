//! `cudaIpcGetMemHandle`, `cudaIpcOpenMemHandle` and `cudaIpcCloseMemHandle` for the pool's memory, between processes
//! that both have the library preloaded.
//!
//! CUDA's own handles do not reach mapped memory, and of a plain segment they share the whole. So the program gets 64
//! bytes of this library's, for `cudaMalloc`'s blocks and for PyTorch's alike. Other handles are passed on to CUDA: those of
//! events, and of memory that is CUDA's own (with `ipc:True`, all of `cudaMalloc`'s).

use super::abi::{Answer, INVALID_CONTEXT, INVALID_VALUE, IpcHandle, MAP_FAILED};
use super::allocation::{self, AllocatedBy};
use super::{imported_memory, mutation, primary_context, stream_capture};
use concertina_engine::ipc::{Handle, IpcError};
use concertina_engine::process::allocator::allocator_in_use;
use concertina_engine::process::ready_devices::ready_device;
use concertina_engine::util::message;
use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::atomic::AtomicBool;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the one flag that there is.
const LAZY_PEER_ACCESS: c_uint = 1;

/// `cuIpcGetMemHandle`.
pub fn get(handle: *mut c_void, address: u64) -> Answer {
    static SAID: AtomicBool = AtomicBool::new(false);
    if handle.is_null() || primary_context::current() == 0 {
        return None;
    }
    let Some(known) = allocation::find(address) else {
        // What was freed is not CUDA's to share, though it lies in a segment of CUDA's that is. Where that may
        // be a tensor's, which is part of it, it is.
        let mut devices = allocator_in_use()?.devices_in_use();
        let freed =
            devices.any(|it| ready_device(it.ordinal()).is_none() && it.is_in_segment(address));
        return freed.then_some(INVALID_VALUE);
    };
    let (device, found) = (known.device, known.found);
    let made = match known.allocated_by {
        _ if mutation::is_on("ipc") => return Some(INVALID_VALUE),
        // CUDA shares neither.
        AllocatedBy::OtherProcess | AllocatedBy::MallocAsync => return Some(INVALID_VALUE),
        AllocatedBy::Malloc => device
            .ipc_block(found.start)
            .and_then(|it| it.handle_of_block(found.requested)),
        AllocatedBy::Allocator => device
            .ipc_block_of_tensor(address)
            .and_then(|it| it.handle_of_tensor(found.requested)),
    };
    match made {
        Ok(made) => {
            // SAFETY: the program's room for a handle, which is not null.
            unsafe { ptr::write_unaligned(handle.cast(), made.bytes()) };
            Some(0)
        }
        Err(why) => {
            message::print_once(&SAID, || {
                let remedy = match known.allocated_by {
                    AllocatedBy::Allocator => {
                        "expandable_segments:False has tensors in allocations of CUDA's"
                    }
                    _ => "ipc:True leaves cudaMalloc's memory to CUDA",
                };
                format!("cudaIpcGetMemHandle: {why}; CONCERTINA_CONF={remedy}, which can share it")
            });
            Some(INVALID_VALUE)
        }
    }
}

/// `cuIpcOpenMemHandle`.
pub fn open(to: *mut u64, handle: IpcHandle, flags: c_uint) -> Answer {
    static SAID: AtomicBool = AtomicBool::new(false);
    let handle = Handle::of(&handle.0)?;
    if to.is_null() || flags != LAZY_PEER_ACCESS {
        return Some(INVALID_VALUE);
    }
    if handle.is_own() {
        return Some(INVALID_CONTEXT);
    }
    let device = primary_context::current_device()?;
    match imported_memory::open(device, &handle) {
        Ok(address) => {
            // SAFETY: the program's place for the address, which is not null.
            unsafe { *to = address };
            Some(0)
        }
        Err(IpcError::Forbidden(why)) => {
            message::print_once(&SAID, || {
                format!(
                    "cudaIpcOpenMemHandle: {why}; CONCERTINA_CONF=ipc:True in the process that shares \
                     the memory, or for tensors expandable_segments:False, leaves it to CUDA"
                )
            });
            Some(MAP_FAILED)
        }
        Err(IpcError::Gone | IpcError::Unknown) => Some(INVALID_VALUE),
    }
}

/// `cuIpcCloseMemHandle`: the memory is unmapped when it has been closed as often as opened.
pub fn close(address: u64) -> Answer {
    let (device, unused) = imported_memory::close(address)?;
    let status = match stream_capture::is_on() {
        true => 0,
        false => device.synchronize(),
    };
    drop(unused);
    Some(status)
}
