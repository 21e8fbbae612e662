//! Captures of CUDA graphs: allocations in them, and what other threads do meanwhile.

use crate::harness::{MEMORY_512_MB, cases};

cases! {
    capture_while_memory_is_idle_long_enough_to_be_purged: runs "capture_while_memory_is_idle", set "idle_release_ms:20", pool_serves 1;
    capture_allocations_and_frees: runs "capture", pool_serves 3, notices_broken ["capture"];
    capture_by_another_thread_global_beside_malloc_async: runs "capture_by_another_thread order 300 0";
    capture_by_another_thread_thread_local_beside_malloc_async: runs "capture_by_another_thread order 300 1";
    capture_by_another_thread_relaxed_beside_malloc_async: runs "capture_by_another_thread order 300 2";
    capture_by_another_thread_thread_local_beside_cuda_free: runs "capture_by_another_thread free 3000 1", notices_broken ["idle"];
    capture_by_another_thread_relaxed_beside_cuda_free: runs "capture_by_another_thread free 300 2";
    capture_by_another_thread_beside_free_relaxed: runs "capture_by_another_thread free 3000 1", set "free:relaxed";
    capture_on_a_full_device: runs "capture_on_a_full_device", on [MEMORY_512_MB];
    capture_by_another_thread_of_a_blocking_stream: runs "capture_by_another_thread blocking 300 2";
    capture_while_the_device_is_reset: runs "capture_while_the_device_is_reset", pool_serves 65;
    capture_on_per_thread_default_streams: runs "capture_on_per_thread_streams";
}
