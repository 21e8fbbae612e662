//! PyTorch's interface: the functions of a pluggable allocator, and what PyTorch's wrapper around one lacks.
//!
//! Each file uses only files of the lines above its own:
//!
//! ```text
//! abi  json  observers  oom_observer  symbols
//! cxx  devices  gpu_trace  profiler  stream_filter
//! exceptions  layouts  memory_stats  pool_state  tracebacks
//! device_stats  ipc_tensors  memory_history  trace_trackers
//! cxx_snapshot  notify
//! pluggable                           the functions that PyTorch's two lines name
//! vtable
//! tensors  mempool_allocator          how a tensor gets its memory
//! virtual_functions
//! slots
//! attach
//! script                              attach.py, and what it calls
//! ```

mod abi;
mod attach;
mod cxx;
mod cxx_snapshot;
mod device_stats;
mod devices;
mod exceptions;
mod gpu_trace;
mod ipc_tensors;
mod json;
mod layouts;
mod memory_history;
mod memory_stats;
mod mempool_allocator;
mod notify;
mod observers;
mod oom_observer;
mod pluggable;
mod pool_state;
mod profiler;
mod script;
mod slots;
mod stream_filter;
mod symbols;
mod tensors;
mod trace_trackers;
mod tracebacks;
mod virtual_functions;
mod vtable;

pub use attach::attach_unless_done;
pub use script::ATTACH;
