//! Filters of private pools: the C++ functions by which PyTorch says which streams allocate from a pool.

use super::abi::CUstream_st;
use std::ffi::c_int;

/// A copy of a `std::function<bool(cudaStream_t)>` as libstdc++ lays it out (`std_function.h`):
/// two words of state, a manager that copies and destroys them, and the function to call.
#[repr(C)]
pub struct StreamFilter {
    state: [usize; 2],
    manager: Option<unsafe extern "C" fn(*mut [usize; 2], *const [usize; 2], c_int) -> bool>,
    invoker: Option<unsafe extern "C" fn(*const [usize; 2], *const *mut CUstream_st) -> bool>,
}

/// `_Manager_operation` of libstdc++.
const CLONE: c_int = 2;
const DESTROY: c_int = 3;

// SAFETY: PyTorch's filters look at streams' capture state and at the calling thread, and are
// called from whichever thread allocates; the device's lock lets one call in at a time.
unsafe impl Send for StreamFilter {}

impl StreamFilter {
    /// `None` where there is nothing to call.
    ///
    /// # Safety
    /// `function` is null or points to a live `std::function` of the type above.
    pub unsafe fn copy_of(function: *const StreamFilter) -> Option<StreamFilter> {
        // SAFETY: as promised by the caller.
        let function = unsafe { function.as_ref() }?;
        let (manager, invoker) = (function.manager?, function.invoker?);
        let mut state = [0; 2];
        // SAFETY: the manager fills `state` with a copy of the function's state.
        unsafe { manager(&mut state, &function.state, CLONE) };
        Some(StreamFilter {
            state,
            manager: Some(manager),
            invoker: Some(invoker),
        })
    }

    /// Whether the allocations of the stream (by handle) belong to the pool.
    pub fn claims(&self, stream: u64) -> bool {
        let stream = stream as *mut CUstream_st;
        // SAFETY: the state is a live copy that this invoker was made for.
        self.invoker
            .is_some_and(|invoker| unsafe { invoker(&self.state, &stream) })
    }
}

impl Drop for StreamFilter {
    fn drop(&mut self) {
        if let Some(manager) = self.manager {
            let state: *mut [usize; 2] = &mut self.state;
            // SAFETY: destroys the copy that `copy_of` made, once.
            unsafe { manager(state, state, DESTROY) };
        }
    }
}
