//! CUDA tensors shared between processes (`torch.multiprocessing`).
//!
//! PyTorch sends a handle as text, and the offset of the tensor in the memory behind it; it waits for the
//! tensor's work by a CUDA event, and keeps what was sent alive by a count in host memory. All of that stays
//! PyTorch's. An allocator's part is to make the text for memory of this process, and to open the memory of
//! another's text.
//!
//! Mapped memory has a [`Handle`] of this library. A plain segment (`expandable_segments:False`) has CUDA's
//! own, in the form of PyTorch's allocator, so that processes under either allocator can share it with each
//! other.

use super::cxx::{CxxString, SharedPointer};
use super::devices;
use super::exceptions::{Failure, raise};
use super::layouts::ShareableHandle;
use super::symbols::Library;
use crate::entry::panic_guard::guard;
use concertina_engine::ipc::{self, Handle, Imported, IpcError, SegmentHandle};
use concertina_engine::process::allocator::allocator_in_use;
use concertina_engine::process::startup;
use concertina_engine::util::fork;
use concertina_engine::util::message;
use std::ffi::c_void;
use std::mem::transmute;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What precedes CUDA's own handle in PyTorch's text: the version of the text and the kind of the handle
/// (`SHAREABLE_HANDLE_VERSION` and `SHAREABLE_CUDA_MALLOC` in its `CUDACachingAllocator.cpp`). For this kind,
/// both versions are the same; every release opens the first.
const PLAIN: [[u8; 2]; 2] = [[2, b'c'], [3, b'c']];

/// Whether something was shared, so that blocks may be kept for other processes.
static SHARED: AtomicBool = AtomicBool::new(false);

/// `shareIpcHandle`. Its result is a class with a destructor, so the caller passes the memory for it first.
pub unsafe extern "C-unwind" fn share_ipc_handle(
    result: *mut ShareableHandle,
    _: *mut c_void,
    pointer: *mut c_void,
) -> *mut ShareableHandle {
    let shared = guard(Err(IpcError::Unknown), || share(pointer as u64));
    let made = shared.and_then(|(text, offset)| {
        let text = CxxString::of(&text).ok_or_else(no_cxx)?;
        Ok(ShareableHandle {
            offset: offset as isize,
            text,
        })
    });
    match made {
        // SAFETY: the caller's memory for the result.
        Ok(made) => unsafe { result.write(made) },
        Err(why) => {
            let what = format!("this CUDA tensor cannot be shared with another process: {why}");
            // SAFETY: PyTorch, which called, lets exceptions through. If none could be thrown, it gets a text
            // that nothing opens.
            unsafe {
                fail(what);
                if let Some(text) = CxxString::of(b"") {
                    result.write(ShareableHandle { offset: 0, text });
                }
            }
        }
    }
    result
}

/// `getIpcDevPtr`. As above; `text` is the caller's.
pub unsafe extern "C-unwind" fn get_ipc_dev_ptr(
    result: *mut SharedPointer,
    _: *mut c_void,
    text: *const CxxString,
) -> *mut SharedPointer {
    // SAFETY: the caller's string, which lives until this returns.
    let text = unsafe { (*text).bytes() };
    let imported = guard(Err(IpcError::Gone), || open(text));
    let made = match imported {
        Ok(imported) => SharedPointer::to(imported),
        Err(why) => {
            let what = format!("a CUDA tensor of another process cannot be opened: {why}");
            // SAFETY: PyTorch, which called, lets exceptions through.
            unsafe { fail(what) };
            SharedPointer::NULL
        }
    };
    // SAFETY: the caller's memory for the result.
    unsafe { result.write(made) };
    result
}

/// The text of the handle for the block at an address, and the block's offset in the memory behind it.
fn share(address: u64) -> Result<(Vec<u8>, u64), IpcError> {
    if fork::in_forked_child() {
        return Err(IpcError::Unknown);
    }
    SHARED.store(true, Relaxed);
    let mut devices = allocator_in_use()
        .into_iter()
        .flat_map(|it| it.devices_in_use());
    let found = devices.find_map(|device| match device.ipc_block(address) {
        Err(IpcError::Unknown) => None,
        found => Some((device, found)),
    });
    let (device, found) = found.ok_or(IpcError::Unknown)?;
    let shared = found.map_err(advise)?;
    let offset = shared.offset + (address - shared.start);
    let text = match shared.segment {
        None => {
            let handle = shared.handle_of_span().map_err(advise)?;
            handle.bytes().to_vec()
        }
        Some(segment) => [&PLAIN[0][..], &device.segment_handle(segment)?].concat(),
    };
    Ok((text, offset))
}

/// Opens the memory of a text, in the context of PyTorch's current device.
fn open(text: &[u8]) -> Result<Arc<Imported>, IpcError> {
    startup::initialize_on_call();
    let device =
        devices::open(devices::current().ok_or_else(no_device)?).ok_or(IpcError::Unknown)?;
    if let Some(handle) = Handle::of(text) {
        return ipc::import(device, &handle).map_err(advise);
    }
    let mut versions = PLAIN.iter();
    let plain = versions.find_map(|version| text.strip_prefix(&version[..]));
    let plain: Option<SegmentHandle> = plain.and_then(|handle| handle.try_into().ok());
    match plain {
        Some(handle) => ipc::import_segment(device, &handle),
        None => Err(IpcError::Forbidden(
            "its process has another allocator, whose memory is not plain: set \
             PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False there"
                .into(),
        )),
    }
}

/// Adds what to do where mapped memory cannot be shared.
fn advise(why: IpcError) -> IpcError {
    IpcError::Forbidden(format!(
        "{why}; CONCERTINA_CONF=expandable_segments:False in the process that sends it shares memory by \
         CUDA's own handles"
    ))
}

fn no_device() -> IpcError {
    IpcError::Forbidden("the current device cannot be told".into())
}

fn no_cxx() -> IpcError {
    IpcError::Forbidden("libstdc++ is not to be found".into())
}

/// Throws; prints what could not be thrown.
///
/// # Safety
/// Every frame up to PyTorch's must let a C++ exception through.
unsafe fn fail(what: String) {
    // SAFETY: as promised by the caller.
    let message = unsafe { raise(Failure::Other(what)) };
    message::print(&message);
}

/// Frees blocks that other processes no longer use, as PyTorch's own allocator does when memory has run out.
/// Answers whether there were any. No lock may be held.
pub fn collect() -> bool {
    type Collect = unsafe extern "C-unwind" fn() -> bool;
    if !SHARED.load(Relaxed) {
        return false;
    }
    let function = Library::loaded(c"libtorch_cuda.so")
        .and_then(|torch| torch.symbol(c"_ZN5torch14CudaIPCCollectEv"));
    // SAFETY: the mangled name says that it takes nothing; it says whether it freed something.
    function.is_some_and(|it| unsafe { transmute::<*mut c_void, Collect>(it)() })
}
