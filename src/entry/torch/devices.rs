//! Devices by PyTorch's device numbers.

use super::symbols::Library;
use concertina_engine::device::Device;
use concertina_engine::process::allocator::allocator_in_use;
use concertina_engine::process::startup::start_allocator;
use concertina_engine::util::fork;
use std::ffi::{c_int, c_void};
use std::mem::transmute;

/// The device, opened if it is not open. `None`, after one line on standard error, where there is no such
/// device, or the process is a fork of one that used the GPU.
#[inline(always)]
pub fn open(device: c_int) -> Option<&'static Device> {
    if fork::in_forked_child() {
        fork::explain_forked_child();
        return None;
    }
    let allocator = start_allocator()?;
    match allocator.device_in_use(device) {
        Some(device) => Some(device),
        None => allocator.device_or_print(device),
    }
}

/// The device if it is open. Opens nothing.
pub fn in_use(device: c_int) -> Option<&'static Device> {
    all_in_use().find(|it| it.ordinal() == device)
}

/// Every open device; none in a forked process.
pub fn all_in_use() -> impl Iterator<Item = &'static Device> {
    let allocator = match fork::in_forked_child() {
        true => None,
        false => allocator_in_use(),
    };
    allocator.into_iter().flat_map(|it| it.devices_in_use())
}

/// This thread's current CUDA device. `None` where PyTorch's CUDA runtime cannot be asked.
pub fn current() -> Option<c_int> {
    type Current = unsafe extern "C-unwind" fn(*mut c_int) -> c_int;
    let function = Library::loaded(c"libtorch_cuda.so")?.symbol(c"cudaGetDevice")?;
    let mut device = 0;
    // SAFETY: CUDA's header says what it takes; `device` outlives the call.
    let status = unsafe { transmute::<*mut c_void, Current>(function)(&mut device) };
    (status == 0).then_some(device)
}
