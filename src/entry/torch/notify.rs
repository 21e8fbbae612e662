//! Tells those who observe PyTorch's blocks: the memory history, trackers of memory events, `torch.profiler` and
//! PyTorch's GPU trace.
//!
//! Observers are C++ or Python and may throw. An exception has to reach PyTorch, as it does under PyTorch's
//! own allocator, so that only this library's part is inside a panic guard.

use super::abi::CUstream_st;
use super::observers::{self, GPU_TRACE, PROFILER, TRACKERS};
use super::{devices, gpu_trace, memory_history, oom_observer, profiler};
use crate::entry::panic_guard::guard;
use concertina_engine::device::Device;
use concertina_engine::device::OutOfMemory;
use concertina_engine::device::history;
use std::ffi::{c_int, c_void};

/// Whether anybody observes blocks.
#[inline]
pub fn is_observed() -> bool {
    history::is_recorded()
        || observers::may_have_observer(PROFILER | GPU_TRACE | TRACKERS)
            && (observers::may_have_observer(GPU_TRACE | TRACKERS) || profiler::is_enabled())
}

/// PyTorch gets a block.
#[cold]
pub fn allocated(pointer: *mut c_void, size: usize, device: c_int, stream: *mut CUstream_st) {
    if let Some((device, bytes)) = device_and_bytes(pointer, size, device) {
        memory_history::allocated(device, pointer as u64, size, stream as u64);
        device.tell_trackers();
        profiler::report(device, pointer as u64, bytes);
        gpu_trace::allocated(pointer as u64);
    }
}

/// PyTorch is about to free a block.
#[cold]
pub fn freeing(pointer: *mut c_void, size: usize, device: c_int, stream: *mut CUstream_st) {
    if let Some((device, _)) = device_and_bytes(pointer, size, device) {
        gpu_trace::freeing(pointer as u64);
        memory_history::freeing(device, pointer as u64, size, stream as u64);
        device.tell_trackers();
    }
}

/// A block is about to be freed that PyTorch does not get, as an observer threw. Trackers are told with the next
/// event.
#[cold]
pub fn discarded(pointer: *mut c_void, device: c_int, stream: *mut CUstream_st) {
    if let Some(device) = devices::in_use(device)
        && let Some((size, _)) = device.block_at(pointer as u64)
        && observers::may_have_observer(TRACKERS)
    {
        device.record_freed(pointer as u64, size, stream as u64, None);
    }
}

/// PyTorch has freed a block.
#[cold]
pub fn freed(pointer: *mut c_void, size: usize, device: c_int) {
    if let Some((device, bytes)) = device_and_bytes(pointer, size, device) {
        profiler::report(device, pointer as u64, -bytes);
    }
}

/// A request of PyTorch's could not be met.
#[cold]
pub fn out_of_memory(shortage: &OutOfMemory, size: usize, stream: *mut CUstream_st) {
    if let Some(device) = devices::in_use(shortage.device) {
        memory_history::out_of_memory(device, size, stream as u64, shortage.pool);
        device.tell_trackers();
        profiler::report_out_of_memory(device, size);
        let (free, total) = shortage.memory.unwrap_or_default();
        oom_observer::notify(device, size, shortage.limit.unwrap_or(total), free);
    }
}

/// A block's device, if it is open, and the bytes that a block of this size takes there.
fn device_and_bytes(
    pointer: *mut c_void,
    size: usize,
    device: c_int,
) -> Option<(&'static Device, i64)> {
    guard(None, || {
        let device = devices::in_use(device).filter(|_| !pointer.is_null())?;
        Some((device, device.block_size(size) as i64))
    })
}
