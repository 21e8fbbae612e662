//! The exported hooks, made from the lists in `hooks`, and finding them by name.

use super::abi::{AccessDesc, AllocationProp, IpcHandle};
use super::hooks::{interposed, retried};
use super::retry_oom::{self, Scope};
use super::{
    context_teardown, dispatch, driver_table, ipc_hooks, malloc, malloc_async, mem_info, mem_pools,
    pointer_attributes, proc_address, stream_capture, stream_hooks, vmm_hooks,
};
use concertina_engine::process::cuda_calls::Function;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

/// What the null stream means to a function.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum DefaultStream {
    /// The function takes no stream, or a null one is none.
    Either,
    /// The legacy default stream.
    Legacy,
    /// The calling thread's own default stream.
    PerThread,
}

/// A function's address.
pub struct Address(pub *const c_void);
// SAFETY: an address of code, which nobody writes to.
unsafe impl Sync for Address {}

/// An exported hook.
pub struct Hook {
    /// The driver's symbol.
    pub symbol: &'static str,
    /// The name for `cuGetProcAddress`.
    pub base: &'static str,
    /// The CUDA version that brought this form of the function.
    pub since: i32,
    pub stream: DefaultStream,
    pub function: Address,
}

impl Hook {
    fn all() -> impl Iterator<Item = &'static Hook> {
        INTERPOSED.iter().chain(RETRIED)
    }

    /// The hook of a symbol.
    pub fn of(symbol: &[u8]) -> Option<&'static Hook> {
        Hook::all().find(|hook| hook.symbol.as_bytes() == symbol)
    }

    /// The hook for a name of `cuGetProcAddress`: the newest form that is not newer than `version`, of those whose
    /// symbol the driver has.
    pub fn for_version(
        base: &[u8],
        version: i32,
        per_thread: bool,
        has: impl Fn(&'static str) -> bool,
    ) -> Option<&'static Hook> {
        let wanted = if per_thread {
            DefaultStream::PerThread
        } else {
            DefaultStream::Legacy
        };
        Hook::all()
            .filter(|hook| {
                let stream = hook.stream == wanted || hook.stream == DefaultStream::Either;
                stream && hook.base.as_bytes() == base && hook.since <= version && has(hook.symbol)
            })
            .max_by_key(|hook| hook.since)
    }
}

macro_rules! hook {
    ($symbol:ident, $base:literal, $since:literal, $stream:ident) => {
        Hook {
            symbol: stringify!($symbol),
            base: $base,
            since: $since,
            stream: DefaultStream::$stream,
            function: Address($symbol as *const c_void),
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
                $(return dispatch::run_counted(Function::$function, body, real, || $bytes);)?
                #[allow(unreachable_code, reason = "the line above is there for some of them")]
                dispatch::run(body, real)
            }
        )*

        /// The hooks, by symbol.
        static INTERPOSED: &[Hook] = &[$(hook!($symbol, $base, $since, $stream)),*];
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
                $(return retry_oom::with_values(Scope::$reach, $values, $count, real);)?
                #[allow(unreachable_code, reason = "the line above is there for some of them")]
                retry_oom::with(Scope::$reach, real)
            }
        )*

        /// The hooks, by symbol.
        static RETRIED: &[Hook] = &[$(hook!($symbol, $base, $since, $stream)),*];
    };
}
retried!(export_retried);
