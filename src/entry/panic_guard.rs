//! The one boundary that panics do not cross.

use concertina_engine::util::message;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What `body` returns, or `default` if it panics: a program that C code runs in can do nothing
/// about a mistake of ours, and must not be torn down for it.
///
/// State shared across calls is behind locks or atomics, which keep it usable.
#[inline]
pub fn guard<T>(default: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        // To drop what was thrown could throw again.
        std::mem::forget(panic);
        after_panic();
        default
    })
}

#[cold]
fn after_panic() {
    message::print("a mistake inside the library (see the lines above); please report it");
}
