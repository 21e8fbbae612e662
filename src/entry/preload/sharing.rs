//! `cudaIpcGetMemHandle` and its kin, for the pool's memory: between processes that both have the library
//! preloaded. CUDA's own handles do not reach mapped memory, and of a plain segment they share the whole;
//! so a program gets 64 bytes of ours. Handles that are none of ours are CUDA's, and so are those of
//! memory that is (`ipc:True` makes that all of `cudaMalloc`'s), and of events.

use super::breaks::is_broken;
use super::memory::INVALID_VALUE;
use super::{Answer, attributes, capture, context};
use concertina_engine::runtime::sharing::{self, HANDLE_SIZE, Handle, Opened, Unshared};
use concertina_engine::runtime::{Device, Found, message};
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
    memory: Arc<Opened>,
    found: Found,
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
pub fn around(address: u64) -> Option<(&'static Device, Found)> {
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
    if handle.is_null() || context::current() == 0 {
        return None;
    }
    let (device, found) = attributes::block(address)?;
    // What another process shares, and what is a stream's, CUDA shares neither.
    if around(address).is_some() || Device::is_stream_ordered(&found) || is_broken("ipc") {
        return Some(INVALID_VALUE);
    }
    let shared = device.share(found.start);
    let made = shared.and_then(|it| it.handle_of_block(found.requested));
    match made {
        Ok(made) => {
            // SAFETY: the program's room for a handle, which is not null.
            unsafe { ptr::write_unaligned(handle.cast(), made.bytes()) };
            Some(0)
        }
        Err(why) => {
            message::say_once(&SAID, || {
                format!(
                    "cudaIpcGetMemHandle: {why}; CONCERTINA_CONF=ipc:True leaves cudaMalloc's memory \
                     to CUDA, which can share it"
                )
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
    let device = context::device()?;
    match open_in(device, &handle) {
        Ok(address) => {
            // SAFETY: the program's place for the address, which is not null.
            unsafe { *to = address };
            Some(0)
        }
        Err(Unshared::Forbidden(why)) => {
            message::say_once(&SAID, || {
                format!(
                    "cudaIpcOpenMemHandle: {why}; CONCERTINA_CONF=ipc:True in the process that shares \
                     the memory leaves it to CUDA"
                )
            });
            Some(MAP_FAILED)
        }
        Err(Unshared::Gone | Unshared::Unknown) => Some(INVALID_VALUE),
    }
}

fn open_in(device: &'static Device, handle: &Handle) -> Result<u64, Unshared> {
    ANY.store(true, Relaxed);
    let mut all = all();
    let all = all.get_or_insert_default();
    // CUDA opens a handle once for each context, too.
    let known = |it: &&mut Open| it.handle == *handle && ptr::eq(it.device, device);
    if let Some(open) = all.values_mut().find(known) {
        open.count += 1;
        return Ok(open.found.start);
    }
    let memory = sharing::open(device, handle)?;
    let mut found = memory.part(handle).ok_or(Unshared::Gone)?;
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
    let status = match capture::is_on() {
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
