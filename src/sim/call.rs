//! What all driver functions have in common: the machine they mean, the count of their uses, the
//! failures asked for, and that no panic leaves them.

use crate::failure::Function;
use crate::machine::Machine;
use crate::run::{Session, in_host_function};
use crate::state::Answer;
use cudarc::driver::sys::CUresult;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Functions that work before `cuInit`.
fn needs_init(function: Function) -> bool {
    use Function::{cuDriverGetVersion, cuGetErrorName, cuGetErrorString, cuInit};
    !matches!(
        function,
        cuInit | cuDriverGetVersion | cuGetErrorName | cuGetErrorString
    )
}

/// Runs the body of a driver function on the current thread's machine; the answer as a number.
pub(crate) fn call(function: Function, body: impl FnOnce(&mut Session<'_>) -> Answer) -> u32 {
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
        session.wander();
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
/// As the driver asks of its callers: null, or a place that may be written.
pub(crate) unsafe fn give<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// Refuses a null output before anything is done for it.
pub(crate) fn wanted<T>(to: *mut T) -> Answer {
    if to.is_null() {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    } else {
        Ok(())
    }
}
