//! `LD_PRELOAD=libconcertina.so ./program`: the pool under a program's own allocations.
//!
//! What stands between is the driver's functions alone. Every way to CUDA's memory ends there: the
//! runtime library, shared or linked into the program, finds the driver with `dlopen` and `dlsym` and
//! asks it for each function by `cuGetProcAddress`; a program that uses the driver itself has its
//! symbols. So `cudaMalloc` stays the runtime's own, with its own start, checks and error state, and
//! reaches the pool when it calls `cuMemAlloc`.
//!
//! `list` has these functions. From it come the exported symbols, what `dlsym` and
//! `cuGetProcAddress` answer, and the table of the driver's real functions. Each function here answers
//! a status, or nothing: then the call is passed on to the driver as it came, and so it is where the
//! pool cannot serve. The program gets the error that the driver gives.
//!
//! All of it does nothing where the library was not preloaded (PyTorch loads it by name, and its own
//! calls are none of ours), and with `CONCERTINA_DISABLE=1`; see `presence`.

mod breaks;
mod caller;
mod dlsym;
mod driver_table;
mod hooks;
mod ipc_hooks;
mod malloc;
mod malloc_async;
mod mem_info;
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

pub use malloc_async::note_before_others;
pub use preloaded::is_on;

use super::panic_guard::guard;
use concertina_engine::process::cuda_calls::{self, Function};
use concertina_engine::util::fork;
use hooks::{interposed, retried};
use ipc_hooks::IpcHandle;
use program_calls::Inside;
use retry_oom::Reach;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use vmm_cache::{Access, Properties};

/// What one of our functions answers: the status that the program gets, or `None` to pass the call
/// on to the driver.
type Answer = Option<u32>;

/// `CUDA_ERROR_NOT_FOUND`: what a program gets that calls a function which its driver lacks. Without
/// this library it would not have started.
const NOT_FOUND: u32 = 500;

/// Runs one of our functions, unless it is none of our business: not preloaded, a child that forked
/// from a process which had used the GPU, or a call that the driver makes on our own behalf. Where it
/// is none, or has no answer, the driver's `real` function is called.
#[inline]
fn attend(body: impl FnOnce() -> Answer, real: impl FnOnce() -> u32) -> u32 {
    match enter() {
        Some(inside) => finish(inside, body, real),
        None => real(),
    }
}

/// The same, counted: a function that hands out `bytes` where it succeeds.
#[inline]
fn attend_counted(
    function: Function,
    body: impl FnOnce() -> Answer,
    real: impl Fn() -> u32,
    bytes: impl FnOnce() -> usize,
) -> u32 {
    let Some(inside) = enter() else { return real() };
    let call = cuda_calls::start();
    // A pool or a stream may be another device's.
    let reach = match function {
        Function::Alloc | Function::AllocPitch => Reach::Here,
        _ => Reach::Anywhere,
    };
    // The body's own refusal stays: a limit is not to be gone round.
    let status = finish(inside, body, || retry_oom::with(reach, real));
    call.done(function, status, bytes, caller::name);
    status
}

#[inline]
fn enter() -> Option<Inside> {
    if !preloaded::is_on() || fork::in_forked_child() {
        return None;
    }
    program_calls::enter()
}

#[inline]
fn finish(inside: Inside, body: impl FnOnce() -> Answer, real: impl FnOnce() -> u32) -> u32 {
    let answer = guard(None, body);
    drop(inside);
    answer.unwrap_or_else(real)
}

macro_rules! hook {
    ($symbol:ident, $base:literal, $since:literal, $stream:ident) => {
        hooks::Hook {
            symbol: stringify!($symbol),
            base: $base,
            since: $since,
            stream: hooks::DefaultStream::$stream,
            function: hooks::Address($symbol as *const c_void),
        }
    };
}

macro_rules! export {
    ($($symbol:ident $([$function:ident: $bytes:expr])?: $base:literal, $since:literal,
        $stream:ident, ($($argument:ident: $kind:ty),*) => $body:expr;)*) => {
        $(
            /// The driver's function of this name.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $symbol($($argument: $kind),*) -> u32 {
                let body = || $body;
                let real = || driver_table::call!($symbol($($argument),*));
                $(return attend_counted(Function::$function, body, real, || $bytes);)?
                #[allow(unreachable_code, reason = "the line above is there for some of them")]
                attend(body, real)
            }
        )*

        /// Our function of each symbol.
        static ANSWERED: &[hooks::Hook] = &[$(hook!($symbol, $base, $since, $stream)),*];
    };
}
interposed!(export);

macro_rules! export_retried {
    ($($symbol:ident $([$values:ident; $count:ident])?: $base:literal, $since:literal, $stream:ident,
        $reach:ident, ($($argument:ident: $kind:ty),*);)*) => {
        $(
            /// The driver's function of this name.
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $symbol($($argument: $kind),*) -> u32 {
                let real = || driver_table::repeat!($symbol($($argument),*));
                $(return retry_oom::with_values(Reach::$reach, $values, $count, real);)?
                #[allow(unreachable_code, reason = "the line above is there for some of them")]
                retry_oom::with(Reach::$reach, real)
            }
        )*

        /// Our function of each symbol.
        static RETRIED: &[hooks::Hook] = &[$(hook!($symbol, $base, $since, $stream)),*];
    };
}
retried!(export_retried);
