//! The virtual functions of PyTorch's allocator object that take and answer plain values.
//!
//! `this` comes first, and a device is a signed byte.

use super::abi::{CUstream_st, concertina_pool_id};
use super::pluggable::{
    concertina_begin_allocate_to_pool, concertina_empty_cache, concertina_end_allocate_to_pool,
    concertina_memory_fraction, concertina_record_stream, concertina_release_pool,
};
use super::symbols::{Library, member};
use super::tensors::{self, CxxStream};
use super::{devices, memory_stats, mempool_allocator};
use crate::entry::panic_guard::guard;
use concertina_engine::process::allocator::is_uncached;
use concertina_engine::process::allocator::set_uncached;
use concertina_engine::settings::variable_text;
use std::ffi::{CStr, c_double, c_int, c_void};
use std::mem::transmute;
use std::ptr;
use std::sync::OnceLock;

pub const MEMCPY_ASYNC: &CStr = member!("11memcpyAsyncEPviPKvimP11CUstream_stb");

type This = *mut c_void;

/// `emptyCache`.
pub extern "C-unwind" fn empty_cache(_: This, pool: concertina_pool_id) {
    // What is free in a private pool may belong to a graph that will be replayed: it is returned with the
    // pool.
    if (pool.graph, pool.user) == (0, 0) {
        concertina_empty_cache();
    }
    // No guard: an allocator of the program's may throw.
    devices::all_in_use().for_each(|device| device.return_supplied());
}

/// `emptyCache` up to 2.7, which has no pool.
pub extern "C-unwind" fn empty_all(this: This) {
    empty_cache(this, concertina_pool_id { graph: 0, user: 0 });
}

/// `enable`: turns caching on or off. PyTorch's variable turns it off for good.
pub extern "C" fn enable(_: This, caching: bool) {
    const NEVER: &str = "PYTORCH_NO_CUDA_MEMORY_CACHING";
    guard((), || {
        set_uncached(!caching || variable_text(NEVER).is_some())
    });
}

pub extern "C" fn is_enabled(_: This) -> bool {
    !is_uncached()
}

/// `cacheInfo`: the largest block that cuDNN may use as its workspace.
pub extern "C" fn cache_info(_: This, device: i8, largest: *mut usize) {
    let bytes = guard(0, || {
        devices::open(device.into()).map_or(0, |it| it.largest_obtainable())
    });
    if !largest.is_null() {
        // SAFETY: the caller vouches for a size_t behind a pointer that is not null.
        unsafe { *largest = (*largest).max(bytes as usize) };
    }
}

pub extern "C" fn get_memory_fraction(_: This, device: i8) -> c_double {
    memory_stats::fraction(device.into())
}

pub extern "C" fn set_memory_fraction(_: This, fraction: c_double, device: i8) {
    concertina_memory_fraction(fraction, device.into());
}

pub extern "C" fn reset_accumulated_stats(_: This, device: i8) {
    memory_stats::reset_accumulated(device.into());
}

pub extern "C" fn reset_peak_stats(_: This, device: i8) {
    memory_stats::reset_peaks(device.into());
}

/// `recordStream`. `data` is a `c10::DataPtr`, whose first word is the address.
pub unsafe extern "C-unwind" fn record_stream(
    _: This,
    data: *const *mut c_void,
    stream: CxxStream,
) {
    if let Some(handle) = tensors::handle_of(stream) {
        // SAFETY: the caller vouches for the reference.
        unsafe { concertina_record_stream(*data, handle) };
    }
}

pub unsafe extern "C" fn begin_allocate_to_pool(
    _: This,
    device: i8,
    pool: concertina_pool_id,
    filter: *const c_void,
) {
    // SAFETY: the caller passes a `std::function` as C++ passes one by value: by its address.
    unsafe { concertina_begin_allocate_to_pool(device.into(), pool, filter) };
}

pub extern "C" fn end_allocate_to_pool(_: This, device: i8, pool: concertina_pool_id) {
    concertina_end_allocate_to_pool(device.into(), pool);
}

pub extern "C" fn release_pool(_: This, device: i8, pool: concertina_pool_id) {
    concertina_release_pool(device.into(), pool);
}

pub extern "C" fn get_pool_use_count(_: This, device: i8, pool: concertina_pool_id) -> c_int {
    guard(0, || {
        devices::open(device.into()).map_or(0, |it| it.pool_users((pool.graph, pool.user)) as c_int)
    })
}

type MemcpyAsync = unsafe extern "C-unwind" fn(
    This,
    *mut c_void,
    c_int,
    *const c_void,
    c_int,
    usize,
    *mut CUstream_st,
    bool,
) -> c_int;

/// `memcpyAsync`: between devices without peer access, mapped memory is copied by the call that names both.
pub unsafe extern "C-unwind" fn memcpy_async(
    this: This,
    to: *mut c_void,
    to_device: c_int,
    from: *const c_void,
    from_device: c_int,
    bytes: usize,
    stream: *mut CUstream_st,
    reachable: bool,
) -> c_int {
    type Peer = unsafe extern "C-unwind" fn(
        *mut c_void,
        c_int,
        *const c_void,
        c_int,
        usize,
        *mut CUstream_st,
    ) -> c_int;
    static FUNCTIONS: OnceLock<Option<(MemcpyAsync, Peer)>> = OnceLock::new();
    let functions = FUNCTIONS.get_or_init(|| {
        let torch = Library::loaded(c"libtorch_cuda.so")?;
        let (plain, peer) = (
            torch.symbol(MEMCPY_ASYNC)?,
            torch.symbol(c"cudaMemcpyPeerAsync")?,
        );
        // SAFETY: the mangled name says what the first takes, CUDA's header what the second does;
        // both answer a `cudaError_t`.
        Some(unsafe {
            (
                transmute::<*mut c_void, MemcpyAsync>(plain),
                transmute::<*mut c_void, Peer>(peer),
            )
        })
    });
    /// `cudaErrorNotSupported`.
    const NOT_SUPPORTED: c_int = 801;
    // SAFETY: the arguments are the caller's, handed on.
    unsafe {
        match functions {
            Some((_, peer)) if to_device != from_device && !reachable => {
                peer(to, to_device, from, from_device, bytes, stream)
            }
            Some((plain, _)) => plain(
                this,
                to,
                to_device,
                from,
                from_device,
                bytes,
                stream,
                reachable,
            ),
            None => NOT_SUPPORTED,
        }
    }
}

/// `createOrIncrefPool`: `allocator`, if there is one, supplies the pool's memory.
pub unsafe extern "C" fn create_or_incref_pool(
    _: This,
    device: i8,
    pool: concertina_pool_id,
    allocator: *const c_void,
) {
    guard((), || {
        if let Some(device) = devices::open(device.into()) {
            // SAFETY: as PyTorch passed it.
            device.retain_pool((pool.graph, pool.user), unsafe {
                mempool_allocator::of(allocator)
            });
        }
    });
}

pub extern "C" fn set_use_on_oom(_: This, device: i8, pool: concertina_pool_id, lent: bool) {
    guard((), || {
        if let Some(device) = devices::open(device.into()) {
            device.set_use_on_oom((pool.graph, pool.user), lent);
        }
    });
}

/// [`set_use_on_oom`] where it has no flag: pools always lend.
pub extern "C" fn lend_pool(this: This, device: i8, pool: concertina_pool_id) {
    set_use_on_oom(this, device, pool, true);
}

/// [`create_or_incref_pool`] where pools have no allocator of their own.
pub extern "C" fn retain_pool(this: This, device: i8, pool: concertina_pool_id) {
    // SAFETY: there is no allocator.
    unsafe { create_or_incref_pool(this, device, pool, ptr::null()) };
}

pub extern "C" fn set_no_split(_: This, device: i8, pool: concertina_pool_id) {
    guard((), || {
        if let Some(device) = devices::open(device.into()) {
            device.set_no_split((pool.graph, pool.user));
        }
    });
}
