//! What PyTorch calls: the functions of a pluggable allocator and its hooks
//! (`torch::cuda::CUDAPluggableAllocator` in PyTorch's `CUDAPluggableAllocator.h`).

mod attach;
mod cxx;
mod cxx_snapshot;
mod exceptions;
mod gpu_trace;
mod ipc_tensors;
mod layouts;
mod memory_history;
mod memory_stats;
mod mempool_allocator;
mod pool_state;
mod profiler;
mod stream_filter;
mod symbols;
mod tensors;
mod vtable;

pub use attach::{ATTACH, attach_unless_done, is_attached};

use super::{panic_guard::guard, preload};
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
use exceptions::Failure;
use std::ffi::{c_double, c_int, c_ulonglong, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use stream_filter::StreamFilter;

/// What a stream's handle points to: `cudaStream_t` and `CUstream` are pointers to it, and null is
/// the default stream.
#[allow(non_camel_case_types)]
pub struct CUstream_st;

/// The name of a private pool: PyTorch's `MempoolId_t`, a pair of numbers passed by value.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy)]
#[repr(C)]
pub struct concertina_pool_id {
    /// The pool's number where it was made for a CUDA graph, else 0.
    pub graph: c_ulonglong,
    /// The pool's number where a program made it, else 0.
    pub user: c_ulonglong,
}

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
        obtain(size, device, stream).unwrap_or_else(|shortage| {
            if let Some(shortage) = shortage {
                report(&shortage);
            }
            ptr::null_mut()
        })
    })
}

/// The address of `size` bytes, null for none. The error is `None` where there is no device that this
/// process can use, of which a line was said.
#[inline(always)]
fn obtain(
    size: usize,
    device: c_int,
    stream: *mut CUstream_st,
) -> Result<*mut c_void, Option<Box<OutOfMemory>>> {
    if size == 0 {
        return Ok(ptr::null_mut());
    }
    let device = match ready_device(device) {
        Some(device) => device,
        None => take_up(device).ok_or(None)?,
    };
    match device.allocate(size, stream as u64) {
        Ok(address) => Ok(address as *mut c_void),
        Err(shortage) => Err(Some(shortage)),
    }
}

/// A device that is to be at hand from now on.
#[cold]
#[inline(never)]
fn take_up(device: c_int) -> Option<&'static Device> {
    startup::initialize_on_call();
    let device = usable(device)?;
    preload::note_before_others(device);
    add_ready_device(device);
    Some(device)
}

/// What PyTorch calls in place of [`concertina_malloc`]: the same, but that it throws where there is
/// no memory. Null would be a tensor without memory.
unsafe extern "C-unwind" fn allocate(
    size: usize,
    device: c_int,
    stream: *mut CUstream_st,
) -> *mut c_void {
    let mut found = guard(Err(None), || obtain(size, device, stream));
    if found.is_err() {
        found = supply(found, size, device, stream);
    }
    if found.is_err() && ipc_tensors::collect() {
        found = guard(Err(None), || obtain(size, device, stream));
        found = supply(found, size, device, stream);
    }
    match found {
        Ok(pointer) => {
            if is_watched() {
                tell_allocated(pointer, size, device, stream);
            }
            pointer
        }
        // SAFETY: PyTorch, which called, lets exceptions through.
        Err(shortage) => unsafe { refuse(shortage, size, stream) },
    }
}

/// As [`obtain`], once it has answered: memory that was missing in a private pool with an allocator of its
/// own is asked of that, which may throw.
#[cold]
fn supply(
    found: Result<*mut c_void, Option<Box<OutOfMemory>>>,
    size: usize,
    device: c_int,
    stream: *mut CUstream_st,
) -> Result<*mut c_void, Option<Box<OutOfMemory>>> {
    let Err(Some(shortage)) = found else {
        return found;
    };
    match memory_stats::used(device) {
        Some(here) => here.retry_supplied(shortage, || {
            guard(Err(None), || obtain(size, device, stream))
        }),
        None => Err(Some(shortage)),
    }
}

/// What PyTorch calls in place of [`concertina_free`].
extern "C-unwind" fn release(
    pointer: *mut c_void,
    size: usize,
    device: c_int,
    stream: *mut CUstream_st,
) {
    if !is_watched() {
        return concertina_free(pointer, size, device, stream);
    }
    tell_freeing(pointer, size, device, stream);
    concertina_free(pointer, size, device, stream);
    tell_freed(pointer, size, device);
}

/// Whether anybody wants to know what comes and goes.
#[inline]
fn is_watched() -> bool {
    concertina_engine::device::history::is_recorded() || is_listening()
}

/// Who else but the history may want to know, bit by bit: profilers, which `attach.py` sees start, and until
/// it is there may be at work unseen, and PyTorch's GPU trace.
static LISTENERS: AtomicU8 = AtomicU8::new(PROFILED);
const PROFILED: u8 = 1;
const TRACED: u8 = 2;

fn set_listening(who: u8, listens: bool) {
    match listens {
        true => LISTENERS.fetch_or(who, Relaxed),
        false => LISTENERS.fetch_and(!who, Relaxed),
    };
}

#[inline]
fn may_listen(who: u8) -> bool {
    LISTENERS.load(Relaxed) & who != 0
}

#[inline]
fn is_listening() -> bool {
    may_listen(PROFILED | TRACED) && (may_listen(TRACED) || profiler::is_listening())
}

// Whoever wants to know is C++ and may throw, which goes on to PyTorch as under its own allocator: there is
// no guard around these, but in them around what is ours.

#[cold]
fn tell_allocated(pointer: *mut c_void, size: usize, device: c_int, stream: *mut CUstream_st) {
    /// A block that nobody gets, since somebody has thrown.
    struct Unwanted(*mut c_void, c_int, *mut CUstream_st);

    impl Drop for Unwanted {
        fn drop(&mut self) {
            guard((), || give_back(self.0, self.1, self.2 as u64));
        }
    }

    if let Some((here, bytes)) = of_whom(pointer, size, device) {
        let unwanted = Unwanted(pointer, device, stream);
        memory_history::allocated(here, pointer as u64, size, stream as u64);
        profiler::report(here, pointer as u64, bytes);
        gpu_trace::allocated(pointer as u64);
        std::mem::forget(unwanted);
    }
}

#[cold]
fn tell_freeing(pointer: *mut c_void, size: usize, device: c_int, stream: *mut CUstream_st) {
    if let Some((here, _)) = of_whom(pointer, size, device) {
        gpu_trace::freeing(pointer as u64);
        memory_history::freeing(here, pointer as u64, size, stream as u64);
    }
}

#[cold]
fn tell_freed(pointer: *mut c_void, size: usize, device: c_int) {
    if let Some((here, bytes)) = of_whom(pointer, size, device) {
        profiler::report(here, pointer as u64, -bytes);
    }
}

/// A block's device, if it was used, and the bytes that the block takes there.
fn of_whom(pointer: *mut c_void, size: usize, device: c_int) -> Option<(&'static Device, i64)> {
    guard(None, || {
        let here = memory_stats::used(device).filter(|_| !pointer.is_null())?;
        Some((here, here.block_size(size) as i64))
    })
}

#[cold]
fn tell_out_of_memory(shortage: &OutOfMemory, size: usize, stream: *mut CUstream_st) {
    if let Some(device) = memory_stats::used(shortage.device) {
        memory_history::out_of_memory(device, size, stream as u64);
        profiler::report_out_of_memory(device, size);
        let (free, total) = shortage.memory.unwrap_or_default();
        attach::observe(device, size, shortage.limit.unwrap_or(total), free);
    }
}

/// Throws into PyTorch; or, while PyTorch's own allocator is the present one and asks here for the
/// segments of a private pool, answers null: it looks further, and then throws by itself.
///
/// # Safety
/// Every frame up to PyTorch's must let a C++ exception through.
#[cold]
#[inline(never)]
unsafe fn refuse(
    shortage: Option<Box<OutOfMemory>>,
    size: usize,
    stream: *mut CUstream_st,
) -> *mut c_void {
    if !attach::is_attached() {
        return ptr::null_mut();
    }
    if let Some(shortage) = &shortage {
        tell_out_of_memory(shortage, size, stream);
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
    guard((), || give_back(pointer, device, stream as u64));
}

/// Takes back what was handed out, most likely by this device for this stream.
#[inline(always)]
fn give_back(pointer: *mut c_void, device: c_int, stream: u64) {
    if !pointer.is_null()
        && let Some(here) = ready_device(device)
        && here.free(pointer as u64, stream).is_ok()
    {
        return;
    }
    give_back_anywhere(pointer);
}

/// The same, of any device and stream.
#[cold]
#[inline(never)]
fn give_back_anywhere(pointer: *mut c_void) {
    if pointer.is_null() || fork::in_forked_child() {
        return;
    }
    let Some(allocator) = allocator_in_use() else {
        return;
    };
    let known = allocator
        .devices_in_use()
        .any(|device| device.free(pointer as u64, 0).is_ok());
    if !known {
        unknown("concertina_free", pointer);
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
    let place = memory_history::emptying();
    guard((), || {
        memory_stats::note_emptied();
        each_device(|device| {
            device.empty_cache();
            memory_history::emptied(device, &place);
        });
    });
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
        if let Some(device) = usable(device) {
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
        let mut found = None;
        each_device(|device| found = found.or_else(|| device.base_of(pointer as u64)));
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
        let mut known = false;
        each_device(|device| {
            known = known || device.record_use(pointer as u64, stream as u64).is_ok();
        });
        if !known && !fork::in_forked_child() {
            unknown("concertina_record_stream", pointer);
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
        let Some(device) = usable(device) else { return };
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
        if let Some(device) = usable(device) {
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
        if let Some(device) = usable(device) {
            device.release_pool((pool.graph, pool.user));
        }
    });
}

/// Says what was missing, at most once a second: a program that looks for what fits asks often.
#[cold]
fn report(shortage: &OutOfMemory) {
    static LAST: Mutex<Option<Instant>> = Mutex::new(None);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if last.is_none_or(|last| last.elapsed() >= Duration::from_secs(1)) {
        *last = Some(Instant::now());
        message::print(&shortage.to_string());
    }
}

/// The device, unless there is none or this process may not use it.
#[inline(always)]
fn usable(device: c_int) -> Option<&'static Device> {
    if fork::in_forked_child() {
        fork::explain_forked_child();
        return None;
    }
    let allocator = start_allocator()?;
    match allocator.device_in_use(device) {
        Some(device) => Some(device),
        None => allocator.device_or_print(device),
    }
}

fn each_device(mut act: impl FnMut(&'static Device)) {
    if !fork::in_forked_child() {
        allocator_in_use()
            .into_iter()
            .flat_map(|it| it.devices_in_use())
            .for_each(&mut act);
    }
}

#[cold]
fn unknown(function: &str, pointer: *mut c_void) {
    static SAID: AtomicBool = AtomicBool::new(false);
    message::print_once(&SAID, || {
        format!(
            "{function}: {pointer:?} is not in use; it is left alone, as others like it will be"
        )
    });
}
