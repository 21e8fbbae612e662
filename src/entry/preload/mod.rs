//! `LD_PRELOAD=libconcertina.so ./program`: the pool under a program's own allocations.
//!
//! Only functions of the CUDA driver are interposed. Every way to CUDA's memory ends there: the runtime library,
//! shared or linked into the program, finds the driver with `dlopen` and `dlsym` and asks it for each function by
//! `cuGetProcAddress`; a program that uses the driver itself has its symbols. So `cudaMalloc` stays the runtime's
//! own, with its own start, checks and error state, and reaches the pool when it calls `cuMemAlloc`.
//!
//! `hooks` lists these functions. From the list come the exported symbols and what `dlsym` and
//! `cuGetProcAddress` answer (`exports`), and the table of the driver's real functions (`driver_table`). Each hook
//! answers a status, or `None`: then the call is passed on to the driver as it came, and so it is where the pool
//! cannot serve. The program gets the error that the driver gives.
//!
//! Hooks do nothing where the library was not preloaded (PyTorch loads it by name), and with
//! `CONCERTINA_DISABLE=1`; see `preloaded`.
//!
//! Layers, each of which uses only those below it:
//!
//! ```text
//! exports dlsym proc_address                    what a program finds
//! dispatch                                      whose call it is, counting, retries
//! malloc malloc_async vmm_hooks ipc_hooks …     one file of hooks for each part of the driver's interface
//! context_teardown                              the end of a context
//! retry_oom unpooled                            when memory runs out; memory beside the pool
//! allocation stream_capture vmm_cache …         what is known of addresses, streams and mappings
//! primary_context conf                          whose pool, which settings
//! driver_table hooks abi preloaded mutation     the driver's functions and types
//! ```

mod abi;
mod allocation;
mod caller;
mod conf;
mod context_teardown;
mod dispatch;
mod dlsym;
mod driver_table;
mod exports;
mod hooks;
mod imported_memory;
mod ipc_hooks;
mod malloc;
mod malloc_async;
mod malloc_async_blocks;
mod mem_info;
mod mem_pools;
mod mutation;
mod pointer_attributes;
mod preloaded;
mod primary_context;
mod proc_address;
pub(super) mod program_calls;
mod retry_oom;
mod stream_capture;
mod stream_hooks;
mod unpooled;
mod vmm_cache;
mod vmm_hooks;

pub use malloc_async_blocks::note_before_sharing;
pub use preloaded::is_on;
