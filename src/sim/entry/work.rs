//! Host functions and kernels, and enqueueing work of any kind.

use crate::call::call;
use crate::failure::Function;
use crate::memory::AllocationKind;
use crate::run::Session;
use crate::state::DriverResult;
use crate::work::Work;
use cudarc::driver::sys::{CUfunction, CUhostFn, CUlaunchConfig, CUresult, CUstream};
use std::ffi::{c_uint, c_void};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Enqueues to the stream of a handle, if its device is sound.
pub(super) fn enqueue(
    session: &mut Session<'_>,
    name: &str,
    stream: CUstream,
    work: Work,
) -> DriverResult {
    let slot = session.state.stream(name, stream)?;
    session
        .state
        .check_not_faulted(session.state.streams.get(slot).device)?;
    if let (None, None) | (Some((_, 1..)), _) | (_, Some((_, 1..))) = work.accesses() {
        session.enqueue(slot, work, None);
    }
    Ok(())
}

/// Calls a function of the host when its turn on the stream comes, on whichever thread makes the
/// stream advance.
pub unsafe extern "C" fn cuLaunchHostFunc(
    stream: CUstream,
    function: CUhostFn,
    argument: *mut c_void,
) -> u32 {
    call(Function::cuLaunchHostFunc, |session| {
        let function = function.ok_or(INVALID)?;
        let work = Work::Call {
            function,
            argument: argument as usize,
        };
        enqueue(session, "cuLaunchHostFunc", stream, work)
    })
}

/// The current device has what kernels need, from the first one on.
fn prepare(session: &mut Session<'_>, function: CUfunction) -> DriverResult {
    if function.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    let (device, bytes) = (session.state.device()?, session.state.config.kernels);
    if bytes > 0 && !session.state.devices[device].has_kernels {
        let memory = &mut session.state.memory;
        memory.allocate(device, bytes, AllocationKind::Device)?;
        session.state.devices[device].has_kernels = true;
    }
    Ok(())
}

/// Puts a kernel onto a stream. Nothing runs: it only has its place in the order. Any handle but
/// null is taken for a kernel.
pub unsafe extern "C" fn cuLaunchKernel(
    function: CUfunction,
    _grid_x: c_uint,
    _grid_y: c_uint,
    _grid_z: c_uint,
    _block_x: c_uint,
    _block_y: c_uint,
    _block_z: c_uint,
    _shared: c_uint,
    stream: CUstream,
    _arguments: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> u32 {
    call(Function::cuLaunchKernel, |session| {
        prepare(session, function)?;
        enqueue(session, "cuLaunchKernel", stream, Work::Mark)
    })
}

/// Puts a kernel onto the configuration's stream, as [`cuLaunchKernel`] does.
pub unsafe extern "C" fn cuLaunchKernelEx(
    configuration: *const CUlaunchConfig,
    function: CUfunction,
    _arguments: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> u32 {
    call(Function::cuLaunchKernelEx, |session| {
        // SAFETY: the module's contract.
        let configuration = unsafe { configuration.as_ref() }.ok_or(INVALID)?;
        prepare(session, function)?;
        enqueue(
            session,
            "cuLaunchKernelEx",
            configuration.hStream,
            Work::Mark,
        )
    })
}
