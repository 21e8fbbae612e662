//! `cudaIpcGetMemHandle` and its kin, for the pool's memory: between processes that both have the library
//! preloaded. CUDA's own handles do not reach mapped memory, and of a plain segment they share the whole;
//! so a program gets 64 bytes of ours, for its own blocks and for PyTorch's alike. Handles that are none of ours are CUDA's, and so are those of
//! memory that is (`ipc:True` makes that all of `cudaMalloc`'s), and of events.

use super::breaks::is_broken;
use super::malloc::INVALID_VALUE;
use super::pointer_attributes::{self, Maker};
use super::{Answer, primary_context, stream_capture};
use concertina_engine::core::BlockInfo;
use concertina_engine::device::Device;
use concertina_engine::ipc::{self, HANDLE_SIZE, Handle, Imported, IpcError};
use concertina_engine::process::allocator::allocator_in_use;
use concertina_engine::process::ready_devices::ready_device;
use concertina_engine::util::message;
use std::collections::HashMap;
use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// `CUDA_ERROR_INVALID_CONTEXT`: what CUDA answers to a process that opens its own memory.
const INVALID_CONTEXT: u32 = 201;
/// `CUDA_ERROR_MAP_FAILED`.
const MAP_FAILED: u32 = 205;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the one flag that there is.
const LAZY_PEER_ACCESS: c_uint = 1;

/// `CUipcMemHandle`, passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct IpcHandle([u8; HANDLE_SIZE]);

/// What a program has opened.
struct Open {
    handle: Handle,
    device: &'static Device,
    memory: Arc<Imported>,
    found: BlockInfo,
    /// How often it was opened and not closed.
    count: usize,
}

/// By the address that the program has.
static OPEN: Mutex<Option<HashMap<u64, Open>>> = Mutex::new(None);
/// There was ever one.
static ANY: AtomicBool = AtomicBool::new(false);

fn all() -> MutexGuard<'static, Option<HashMap<u64, Open>>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is open around an address. One relaxed load where nothing ever was.
pub fn around(address: u64) -> Option<(&'static Device, BlockInfo)> {
    if !ANY.load(Relaxed) {
        return None;
    }
    let all = all();
    let mut open = all.iter().flat_map(HashMap::values);
    let is_in = |it: &&Open| (it.found.start..it.found.start + it.found.size).contains(&address);
    open.find(is_in).map(|it| (it.device, it.found))
}

/// `cuIpcGetMemHandle`.
pub fn get(handle: *mut c_void, address: u64) -> Answer {
    static SAID: AtomicBool = AtomicBool::new(false);
    if handle.is_null() || primary_context::current() == 0 {
        return None;
    }
    let Some(known) = pointer_attributes::known(address) else {
        // What was freed is not CUDA's to share, though it lies in a segment of CUDA's that is. Where that may
        // be a tensor's, which is part of it, it is.
        let mut devices = allocator_in_use()?.devices_in_use();
        let freed =
            devices.any(|it| ready_device(it.ordinal()).is_none() && it.is_in_segment(address));
        return freed.then_some(INVALID_VALUE);
    };
    let (device, found) = (known.device, known.found);
    let made = match known.maker {
        _ if is_broken("ipc") => return Some(INVALID_VALUE),
        // CUDA shares neither.
        Maker::Other | Maker::InOrder => return Some(INVALID_VALUE),
        Maker::Program => device
            .share(found.start)
            .and_then(|it| it.handle_of_block(found.requested)),
        Maker::Allocator => device
            .share_tensor(address)
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
                let remedy = match known.maker {
                    Maker::Allocator => {
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
    let device = primary_context::device()?;
    match open_in(device, &handle) {
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

fn open_in(device: &'static Device, handle: &Handle) -> Result<u64, IpcError> {
    ANY.store(true, Relaxed);
    let mut all = all();
    let all = all.get_or_insert_default();
    // CUDA opens a handle once for each context, too.
    let known = |it: &&mut Open| it.handle == *handle && ptr::eq(it.device, device);
    if let Some(open) = all.values_mut().find(known) {
        open.count += 1;
        return Ok(open.found.start);
    }
    let memory = ipc::import(device, handle)?;
    let mut found = memory.subrange(handle).ok_or(IpcError::Gone)?;
    if is_broken("ipc offset") {
        found.start = memory.address();
    }
    let open = Open {
        handle: *handle,
        device,
        memory,
        found,
        count: 1,
    };
    all.insert(found.start, open);
    Ok(found.start)
}

/// `cuIpcCloseMemHandle`: with the last opening the memory goes.
pub fn close(address: u64) -> Answer {
    if !ANY.load(Relaxed) {
        return None;
    }
    let mut all = all();
    let open = all.as_mut()?.get_mut(&address)?;
    let device = open.device;
    open.count -= 1;
    let gone = if open.count == 0 || is_broken("ipc count") {
        all.as_mut()?.remove(&address)
    } else {
        None
    };
    drop(all);
    let status = match stream_capture::is_on() {
        true => 0,
        false => device.synchronize(),
    };
    drop(gone);
    Some(status)
}

/// The device's context ends, and with it what was opened there.
pub fn close_all(device: &Device) {
    if ANY.load(Relaxed) {
        let mut gone = Vec::new();
        if let Some(all) = all().as_mut() {
            gone.extend(all.extract_if(|_, it| ptr::eq(it.device, device)));
        }
        gone.into_iter().for_each(|(_, it)| drop(it.memory));
    }
}
