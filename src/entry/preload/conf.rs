//! What the settings say to the hooks.

use crate::entry::attached;
use concertina_engine::process::allocator::allocator_in_use;
use concertina_engine::process::settings::{ignore_pytorch_variables, process_settings};
use concertina_engine::settings::Free;

/// Chooses which variables are read: `PYTORCH_CUDA_ALLOC_CONF` is for PyTorch's own allocator, unless this library
/// is PyTorch's allocator.
pub fn choose_variables() {
    if !attached::is_attached() {
        ignore_pytorch_variables();
    }
}

/// Whether the process has a limit. Programs may ask for the device's memory before they allocate.
pub fn is_limited() -> bool {
    choose_variables();
    let settings = process_settings();
    settings.limit.is_some() || settings.per_process_memory_fraction < 1.0
}

/// `ipc:True`: memory of `cudaMalloc` is CUDA's own, which any process can open.
#[inline]
pub fn leaves_malloc_to_cuda() -> bool {
    allocator_in_use().is_some_and(|allocator| allocator.settings().ipc)
}

/// `free:relaxed`: `cudaFree` does not wait for the device.
#[inline]
pub fn is_free_relaxed() -> bool {
    allocator_in_use().is_some_and(|allocator| allocator.settings().free == Free::Relaxed)
}
