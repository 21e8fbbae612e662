//! What runs when the library is loaded, and when the process ends.

use super::guard::guard;
use super::{python, torch};
use concertina_engine::runtime::lifecycle;

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// The last of a process's ends to run: after every function registered with `atexit` and every
/// static destructor, where the last tensors may be freed.
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

extern "C" fn start() {
    guard((), || {
        lifecycle::start(first_use);
        if lifecycle::wants_statistics() {
            // Some other library's end may crash before it is the turn of ours.
            // SAFETY: the function stays, as the library is never unloaded.
            unsafe { libc::atexit(end) };
        }
        python::schedule();
    });
}

fn first_use() {
    torch::attach_unless_done();
    python::schedule();
}

extern "C" fn end() {
    guard((), lifecycle::before_exit);
}
