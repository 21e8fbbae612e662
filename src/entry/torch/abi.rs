//! Types of PyTorch's C interface to an allocator.

use std::ffi::c_ulonglong;

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
