//! Waiting for a device or a stream, whatever is being captured.

use crate::device::captures::NoCapture;
use crate::device::context::{RelaxedMode, current};
use crate::driver::Functions;
use crate::driver::sys::*;
use crate::util::reentrancy;
use parking_lot::Mutex;
use std::ptr;

/// The driver's status for no memory.
pub const OUT_OF_MEMORY: u32 = CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;

/// Bytes of an allocation that is made only to be freed.
const LEAST: usize = 512;

/// Events of one context, to be used again.
#[derive(Default)]
pub struct Events(pub Vec<usize>);

impl Events {
    pub fn take(&mut self, functions: &Functions) -> Option<usize> {
        if let Some(event) = self.0.pop() {
            return Some(event);
        }
        let mut event: CUevent = ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: `event` outlives the call.
        let status = unsafe { (functions.cuEventCreate)(&mut event, flags) };
        (status == 0).then_some(event as usize)
    }

    /// Lets go of them, in their context; they went with it where it has `ended`.
    pub fn drop_all(&mut self, functions: &Functions, ended: bool) {
        for event in self.0.drain(..).filter(|_| !ended) {
            // SAFETY: events of ours that nothing waits for, in a context that lives.
            unsafe { (functions.cuEventDestroy_v2)(event as CUevent) };
        }
    }
}

/// Waits for all work of a context while no stream is captured: the event is recorded while none can begin,
/// and a capture that begins during the wait goes on. The driver's status; `None` where streams capture, or
/// may.
pub fn synchronize(functions: &Functions, context: usize, events: &Mutex<Events>) -> Option<u32> {
    let no_capture = NoCapture::hold()?;
    let _current = current(functions, context);
    let Some(event) = events.lock().take(functions) else {
        // The context has failed: it says how. SAFETY: no arguments.
        return Some(unsafe { (functions.cuCtxSynchronize)() });
    };
    // SAFETY: an event of this context, which was retained.
    let mut status =
        unsafe { (functions.cuCtxRecordEvent)(context as CUcontext, event as CUevent) };
    drop(no_capture);
    if status == 0 {
        let _relaxed = RelaxedMode::enter(functions);
        // SAFETY: an event of ours that was recorded.
        status = unsafe { (functions.cuEventSynchronize)(event as CUevent) };
    }
    events.lock().0.push(event);
    Some(status)
}

/// Waits for all work of a context, whatever is being captured, and breaks no capture: `cuMemFree` waits for
/// the device, and a thread may call it in relaxed mode while streams capture. With `as_program` in the
/// thread's own mode, in which it fails where the program's own call would. The driver's status.
pub fn synchronize_in_capture(functions: &Functions, context: usize, as_program: bool) -> u32 {
    let _current = current(functions, context);
    let _relaxed = (!as_program).then(|| RelaxedMode::enter(functions));
    let (mut address, mut host) = (0, ptr::null_mut());
    // SAFETY: both outlive the calls, and are freed only where the driver gave them.
    unsafe {
        match (functions.cuMemAlloc_v2)(&mut address, LEAST) {
            0 => (functions.cuMemFree_v2)(address),
            // To free page-locked memory waits as well.
            OUT_OF_MEMORY => match (functions.cuMemAllocHost_v2)(&mut host, LEAST) {
                0 => (functions.cuMemFreeHost)(host),
                status => status,
            },
            status => status,
        }
    }
}

/// Waits for a stream that exists, in the thread's own context where it is a default stream.
pub fn synchronize_stream(functions: &Functions, handle: u64) {
    let _inside = reentrancy::enter();
    // SAFETY: the program is using the stream just now. Where it has failed there is nothing to wait for.
    unsafe { (functions.cuStreamSynchronize)(handle as CUstream) };
}
