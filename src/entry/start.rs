//! What runs when the library is loaded, and when the process ends.

use super::guard::guard;
use super::{launched, python, torch};
use concertina_engine::runtime::lifecycle;
use std::ffi::{c_char, c_int};

#[used]
#[unsafe(link_section = ".init_array")]
static START: unsafe extern "C" fn(c_int, *const *const c_char) = start;

/// The last of a process's ends to run: after every function registered with `atexit` and every
/// static destructor, where the last tensors may be freed.
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

/// The C library calls it with the arguments of `main`.
unsafe extern "C" fn start(count: c_int, arguments: *const *const c_char) {
    guard((), || {
        lifecycle::start(first_use);
        if lifecycle::wants_statistics() {
            // Some other library's end may crash before it is the turn of ours.
            // SAFETY: the function stays, as the library is never unloaded.
            unsafe { libc::atexit(end) };
        }
        python::schedule();
        // SAFETY: the arguments of `main` are so many strings, and stay.
        unsafe { launched::at_start(count, arguments) };
    });
}

fn first_use() {
    torch::attach_unless_done();
    python::schedule();
}

extern "C" fn end() {
    guard((), lifecycle::before_exit);
}
