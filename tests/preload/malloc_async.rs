//! cudaMallocAsync and cudaFreeAsync: stream order, per-thread default streams, CUDA's memory pools.

use crate::harness::{HELD, cases};

cases! {
    malloc_async_in_stream_order: runs "malloc_async", on [HELD], pool_serves 15, notices_broken ["order", "apart", "numbers"];
    malloc_async_on_per_thread_default_streams: runs "per_thread_default_stream", on [HELD], pool_serves 8, notices_broken ["per thread"];
    malloc_async_from_memory_pools: runs "mem_pools", pool_serves 5, notices_broken ["pools", "pool attributes"];
}
