//! Running a hook: the program's calls go to it, all others to the driver.

use super::abi::Answer;
use super::caller;
use super::program_calls::{Inside, enter_hook};
use super::retry_oom::{self, Scope};
use crate::entry::panic_guard::guard;
use concertina_engine::process::cuda_calls::{self, Function};

/// Runs a hook, or calls the driver's function where the call is not the program's or the hook passes it on.
#[inline]
pub fn run(hook: impl FnOnce() -> Answer, real: impl FnOnce() -> u32) -> u32 {
    match enter_hook() {
        Some(inside) => finish(inside, hook, real),
        None => real(),
    }
}

/// [`run`] for a function that allocates `bytes` where it succeeds: the call is counted, and retried where the
/// driver is out of memory.
#[inline]
pub fn run_counted(
    function: Function,
    hook: impl FnOnce() -> Answer,
    real: impl Fn() -> u32,
    bytes: impl FnOnce() -> usize,
) -> u32 {
    let Some(inside) = enter_hook() else {
        return real();
    };
    let call = cuda_calls::start();
    // A pool or a stream may be another device's.
    let scope = match function {
        Function::Alloc | Function::AllocPitch => Scope::CurrentDevice,
        _ => Scope::AllDevices,
    };
    // A hook's own refusal is final: it keeps a limit.
    let status = finish(inside, hook, || retry_oom::with(scope, real));
    call.count(function, status, bytes, caller::name);
    status
}

#[inline]
fn finish(inside: Inside, hook: impl FnOnce() -> Answer, real: impl FnOnce() -> u32) -> u32 {
    let answer = guard(None, hook);
    drop(inside);
    answer.unwrap_or_else(real)
}
