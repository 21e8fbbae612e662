//! Keeps panics from unwinding into C code.

use concertina_engine::util::message;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls `body` and returns its result, or `default` if it panics. The host program goes on: every entry
/// point is called through this.
///
/// Unwinding is safe: state that outlives the call is behind locks or atomics, which stay usable.
#[inline]
pub fn guard<T>(default: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        // Dropping the payload could panic again.
        std::mem::forget(panic);
        after_panic();
        default
    })
}

#[cold]
fn after_panic() {
    message::print("a mistake inside the library (see the lines above); please report it");
}
