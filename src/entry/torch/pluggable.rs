//! The functions of a pluggable allocator (`torch.cuda.memory.CUDAPluggableAllocator`): the C interface that
//! PyTorch's two lines name, and the hooks that it may have besides.
//!
//! Allocation and free come first. PyTorch calls [`allocate`] and [`release`], which throw where memory has
//! run out and notify observers; the exported functions of the same purpose return null.

use super::abi::{CUstream_st, concertina_pool_id};
use super::exceptions::{self, Failure};
use super::stream_filter::StreamFilter;
use super::{devices, ipc_tensors, memory_history, memory_stats, notify};
use crate::entry::{attached, panic_guard::guard, preload};
use concertina_engine::device::Device;
use concertina_engine::device::OutOfMemory;
use concertina_engine::device::PoolRoute;
use concertina_engine::process::allocator::allocator_in_use;
use concertina_engine::process::ready_devices::add_ready_device;
use concertina_engine::process::ready_devices::ready_device;
use concertina_engine::process::startup;
use concertina_engine::process::startup::start_allocator;
use concertina_engine::util::fork;
use concertina_engine::util::message;
use std::ffi::{c_double, c_int, c_void};
use std::ptr;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Hands out `size` bytes of `device`'s memory, ready for work on `stream`.
///
/// `size` is in bytes and rounded up to 512; `device` is the CUDA device's number; `stream` is a
/// stream of that device, null for the default one. The address is aligned to 512 bytes. The memory
/// is not cleared. It stays the library's and goes back with `concertina_free`.
///
/// Returns null for a size of 0; null after one line on standard error when there is no memory, no
/// such device or no CUDA driver; null in a process forked from one that had used the library.
///
/// Any thread may call it. It waits for the GPU when memory has run out, and otherwise only to keep
/// the number of old mappings bounded.
#[unsafe(no_mangle)]
pub extern "C" fn concertina_malloc(
    size: usize,
    device: c_int,
    stream: *mut CUstream_st,
) -> *mut c_void {
    guard(ptr::null_mut(), || {
        try_allocate(size, device, stream).unwrap_or_else(|shortage| {
            if let Some(shortage) = shortage {
                report(&shortage);
            }
            ptr::null_mut()
        })
    })
}

/// The address of `size` bytes, null for a size of 0. The error is `None` where there is no device that this
/// process can use, after one line on standard error.
#[inline(always)]
fn try_allocate(
    size: usize,
    device: c_int,
    stream: *mut CUstream_st,
) -> Result<*mut c_void, Option<Box<OutOfMemory>>> {
    if size == 0 {
        return Ok(ptr::null_mut());
    }
    let device = match ready_device(device) {
        Some(device) => device,
        None => device_in_use(device).ok_or(None)?,
    };
    match device.allocate(size, stream as u64) {
        Ok(address) => Ok(address as *mut c_void),
        Err(shortage) => Err(Some(shortage)),
    }
}

/// Opens a device for its first allocation.
#[cold]
#[inline(never)]
fn device_in_use(device: c_int) -> Option<&'static Device> {
    startup::initialize_on_call();
    let device = devices::open(device)?;
    preload::note_before_sharing(device);
    add_ready_device(device);
    Some(device)
}

/// What PyTorch calls in place of [`concertina_malloc`]: throws where there is no memory, as null would be a
/// tensor without memory.
pub unsafe extern "C-unwind" fn allocate(
    size: usize,
    device: c_int,
    stream: *mut CUstream_st,
) -> *mut c_void {
    let mut found = guard(Err(None), || try_allocate(size, device, stream));
    if found.is_err() {
        found = retry_with_supplier(found, size, device, stream);
    }
    if found.is_err() && ipc_tensors::collect() {
        found = guard(Err(None), || try_allocate(size, device, stream));
        found = retry_with_supplier(found, size, device, stream);
    }
    match found {
        Ok(pointer) => {
            if notify::is_observed() {
                notify_allocated(pointer, size, device, stream);
            }
            pointer
        }
        // SAFETY: PyTorch, which called, lets exceptions through.
        Err(shortage) => unsafe { throw(shortage, size, stream) },
    }
}

/// After a [`try_allocate`] that failed in a private pool with an allocator of its own: that one is asked for
/// more memory, and may throw.
#[cold]
fn retry_with_supplier(
    found: Result<*mut c_void, Option<Box<OutOfMemory>>>,
    size: usize,
    device: c_int,
    stream: *mut CUstream_st,
) -> Result<*mut c_void, Option<Box<OutOfMemory>>> {
    let Err(Some(shortage)) = found else {
        return found;
    };
    match devices::in_use(device) {
        Some(device_in_use) => device_in_use.retry_supplied(shortage, || {
            guard(Err(None), || try_allocate(size, device, stream))
        }),
        None => Err(Some(shortage)),
    }
}

/// Notifies observers of a block, which is freed where one throws: PyTorch does not get it then.
#[cold]
fn notify_allocated(pointer: *mut c_void, size: usize, device: c_int, stream: *mut CUstream_st) {
    struct FreeOnUnwind(*mut c_void, c_int, *mut CUstream_st);

    impl Drop for FreeOnUnwind {
        fn drop(&mut self) {
            guard((), || {
                notify::discarded(self.0, self.1, self.2);
                free(self.0, self.1, self.2 as u64);
            });
        }
    }

    let block = FreeOnUnwind(pointer, device, stream);
    notify::allocated(pointer, size, device, stream);
    std::mem::forget(block);
}

/// What PyTorch calls in place of [`concertina_free`].
pub extern "C-unwind" fn release(
    pointer: *mut c_void,
    size: usize,
    device: c_int,
    stream: *mut CUstream_st,
) {
    if !notify::is_observed() {
        return concertina_free(pointer, size, device, stream);
    }
    notify::freeing(pointer, size, device, stream);
    concertina_free(pointer, size, device, stream);
    notify::freed(pointer, size, device);
}

/// Throws out of memory, or what else was wrong, into PyTorch. While PyTorch's own allocator is the current
/// one, and asks here for segments of a private pool, answers null: PyTorch retries, and throws by itself.
///
/// # Safety
/// Every frame up to PyTorch's must let a C++ exception through.
#[cold]
#[inline(never)]
unsafe fn throw(
    shortage: Option<Box<OutOfMemory>>,
    size: usize,
    stream: *mut CUstream_st,
) -> *mut c_void {
    if !attached::is_attached() {
        return ptr::null_mut();
    }
    if let Some(shortage) = &shortage {
        notify::out_of_memory(shortage, size, stream);
    }
    let failure = match shortage {
        Some(it) if it.error.is_none() => Failure::OutOfMemory(it.to_string()),
        Some(it) => Failure::Other(it.to_string()),
        None => Failure::Other("concertina has no memory: standard error says why".into()),
    };
    // SAFETY: as promised by the caller.
    let message = unsafe { exceptions::raise(failure) };
    message::print(&message);
    ptr::null_mut()
}

/// Takes back what `concertina_malloc` handed out.
///
/// `pointer` is an address that `concertina_malloc` returned, or null, which does nothing. `size`,
/// `device` and `stream` are what was passed then; they make the memory quicker to find, and the
/// stream may have been destroyed. The stream that the memory was allocated on may get it again at
/// once, another one when the work before is done, and nobody before the streams named by
/// `concertina_record_stream` are done with it.
///
/// An address that is not in use is left alone, with one line on standard error the first time.
///
/// Any thread may call it. It does not wait for the GPU, except for memory that a stream of another
/// device was recorded on: that waits for the other device.
#[unsafe(no_mangle)]
pub extern "C" fn concertina_free(
    pointer: *mut c_void,
    size: usize,
    device: c_int,
    stream: *mut CUstream_st,
) {
    let _ = size;
    guard((), || free(pointer, device, stream as u64));
}

/// Frees a block, most likely of this device and stream.
#[inline(always)]
pub fn free(pointer: *mut c_void, device: c_int, stream: u64) {
    if !pointer.is_null()
        && let Some(device) = ready_device(device)
        && device.free(pointer as u64, stream).is_ok()
    {
        return;
    }
    free_on_any_device(pointer);
}

/// Frees a block of any device and stream.
#[cold]
#[inline(never)]
fn free_on_any_device(pointer: *mut c_void) {
    if pointer.is_null() || fork::in_forked_child() || allocator_in_use().is_none() {
        return;
    }
    if !devices::all_in_use().any(|device| device.free(pointer as u64, 0).is_ok()) {
        report_unknown("concertina_free", pointer);
    }
}

/// Prepares the library for `device_count` devices. Not needed: the first allocation does it too.
///
/// Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn concertina_init(device_count: c_int) {
    let _ = device_count;
    guard((), || {
        startup::initialize_on_call();
        if !fork::in_forked_child() {
            start_allocator();
        }
    });
}

/// Gives all memory that is free, in whole chunks, back to the driver, on every device.
///
/// Waits for the GPU where free memory may still be in use. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C-unwind" fn concertina_empty_cache() {
    // PyTorch's recorder may throw.
    let context = memory_history::emptying();
    guard((), || {
        memory_stats::note_emptied();
        for device in devices::all_in_use() {
            device.empty_cache();
            memory_history::emptied(device, &context);
        }
    });
    // No guard: a tracker may throw.
    devices::all_in_use().for_each(Device::tell_trackers);
}

/// Limits what the library may hold on `device` to `fraction` of the device's memory.
///
/// `fraction` is from 0.0 to 1.0; 1.0 lifts the limit. What is held beyond the limit stays, so call
/// `concertina_empty_cache` too. Another value is refused with one line on standard error.
///
/// Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn concertina_memory_fraction(fraction: c_double, device: c_int) {
    guard((), || {
        if !(0.0..=1.0).contains(&fraction) {
            message::print(&format!(
                "a memory fraction of {fraction} is ignored: it is a number from 0.0 to 1.0"
            ));
            return;
        }
        startup::initialize_on_call();
        if let Some(device) = devices::open(device) {
            device.set_memory_fraction(fraction);
        }
    });
}

/// Finds the allocation that `pointer` is part of to CUDA: an address that `concertina_malloc`
/// returned. That is what `cudaIpcGetMemHandle` shares as a whole, and so what the distance that goes
/// with a handle counts from: in mapped memory the block itself, in a private pool all memory without
/// a gap around it, and where the driver allocates plain memory, its allocation.
///
/// Writes the allocation's size in bytes to `size`, which may be null, and returns its address.
/// Returns null, and writes 0, if `pointer` is not the start of a block in use.
///
/// Any thread may call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn concertina_base_alloc(
    pointer: *mut c_void,
    size: *mut usize,
) -> *mut c_void {
    guard(ptr::null_mut(), || {
        let found = devices::all_in_use().find_map(|device| device.base_of(pointer as u64));
        let (start, bytes) = found.unwrap_or((0, 0));
        if !size.is_null() {
            // SAFETY: the caller vouches for a size_t behind a pointer that is not null.
            unsafe { *size = bytes as usize };
        }
        start as *mut c_void
    })
}

/// Notes that `stream` uses the memory at `pointer`, besides the stream that it was allocated on.
///
/// Once freed, the memory is not used again before `stream`'s work up to then is done, even if the
/// stream has been destroyed by then. `pointer` is
/// an address that `concertina_malloc` returned, or null, which does nothing; an address that is not
/// in use is left alone, with one line on standard error the first time.
///
/// Any thread may call it. It never waits for the GPU.
#[unsafe(no_mangle)]
pub extern "C" fn concertina_record_stream(pointer: *mut c_void, stream: *mut CUstream_st) {
    guard((), || {
        if pointer.is_null() {
            return;
        }
        let known = devices::all_in_use()
            .any(|device| device.record_use(pointer as u64, stream as u64).is_ok());
        if !known && !fork::in_forked_child() {
            report_unknown("concertina_record_stream", pointer);
        }
    });
}

/// From now on, allocations on `device` that `filter` claims come from the private pool `pool`,
/// which shares no memory with others; it is made if there is none of that name, and counts one
/// user more.
///
/// `filter` points to a C++ `std::function<bool(cudaStream_t)>` (of libstdc++, 32 bytes), which is
/// copied; an empty one claims nothing. The copy is dropped by `concertina_end_allocate_to_pool`.
/// The filter is called with the stream of each allocation and may not allocate.
///
/// Any thread may call it. Until the end is called the library does not wait for the GPU, because a
/// stream may be in capture.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn concertina_begin_allocate_to_pool(
    device: c_int,
    pool: concertina_pool_id,
    filter: *const c_void,
) {
    guard((), || {
        startup::initialize_on_call();
        let Some(device) = devices::open(device) else {
            return;
        };
        // SAFETY: the caller vouches for a `std::function` behind a pointer that is not null.
        let Some(filter) = (unsafe { StreamFilter::copy_of(filter.cast()) }) else {
            return;
        };
        let filter = Box::new(move |stream| filter.claims(stream));
        device.begin_pool(PoolRoute {
            pool: (pool.graph, pool.user),
            filter,
        });
    });
}

/// Ends what `concertina_begin_allocate_to_pool` began: no more allocations go to the pool by it.
///
/// Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn concertina_end_allocate_to_pool(device: c_int, pool: concertina_pool_id) {
    guard((), || {
        if let Some(device) = devices::open(device) {
            device.end_pool((pool.graph, pool.user));
        }
    });
}

/// Takes one user from the private pool `pool`. With the last one its free memory goes back to the
/// driver, and the rest when it is freed.
///
/// Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn concertina_release_pool(device: c_int, pool: concertina_pool_id) {
    guard((), || {
        if let Some(device) = devices::open(device) {
            device.release_pool((pool.graph, pool.user));
        }
    });
}

/// Prints why there is no memory, at most once a second: a program that searches for a size that fits asks
/// often.
#[cold]
fn report(shortage: &OutOfMemory) {
    static LAST: Mutex<Option<Instant>> = Mutex::new(None);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if last.is_none_or(|last| last.elapsed() >= Duration::from_secs(1)) {
        *last = Some(Instant::now());
        message::print(&shortage.to_string());
    }
}

/// An address that is not in use was passed.
#[cold]
fn report_unknown(function: &str, pointer: *mut c_void) {
    static SAID: AtomicBool = AtomicBool::new(false);
    message::print_once(&SAID, || {
        format!(
            "{function}: {pointer:?} is not in use; it is left alone, as others like it will be"
        )
    });
}
