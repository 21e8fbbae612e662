//! What all driver functions share: they find the thread's machine, count the call, fail on demand, and let
//! no panic out.

use crate::failure::Function;
use crate::machine::Machine;
use crate::run::{Session, in_host_function};
use crate::state::DriverResult;
use cudarc::driver::sys::CUresult;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Whether a function fails before `cuInit`.
fn needs_init(function: Function) -> bool {
    use Function::{cuDriverGetVersion, cuGetErrorName, cuGetErrorString, cuInit};
    !matches!(
        function,
        cuInit | cuDriverGetVersion | cuGetErrorName | cuGetErrorString
    )
}

/// Runs the body of a driver function on the current thread's machine and returns its status as a number.
pub(crate) fn call(function: Function, body: impl FnOnce(&mut Session<'_>) -> DriverResult) -> u32 {
    let machine = Machine::current();
    let guarded = || {
        let mut session = machine.session();
        if let Some(status) = session.state.failures.count(function) {
            return Err(status);
        }
        if needs_init(function) {
            if !session.state.initialised {
                return Err(CUresult::CUDA_ERROR_NOT_INITIALIZED);
            }
            if in_host_function() {
                session
                    .state
                    .violation(format!("{} called by a host function", function.name()));
                return Err(CUresult::CUDA_ERROR_NOT_PERMITTED);
            }
        }
        session.advance_randomly();
        body(&mut session)
    };
    let answer = catch_unwind(AssertUnwindSafe(guarded)).unwrap_or_else(|_| {
        // A bug of this crate; the panic's message is on standard error.
        let text = format!("the simulated driver panicked in {}", function.name());
        machine.session().state.violation(text);
        Err(CUresult::CUDA_ERROR_UNKNOWN)
    });
    answer.map_or_else(|status| status as u32, |()| CUresult::CUDA_SUCCESS as u32)
}

/// Writes an output of a driver function.
///
/// # Safety
/// As the driver requires: `to` is null or may be written.
pub(crate) unsafe fn write_output<T>(to: *mut T, value: T) -> DriverResult {
    if to.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// Refuses a null output, before the call has an effect.
pub(crate) fn check_output<T>(to: *mut T) -> DriverResult {
    if to.is_null() {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    } else {
        Ok(())
    }
}
