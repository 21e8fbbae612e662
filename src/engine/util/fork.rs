//! Whether this process is a child forked from one that had used the GPU. CUDA does not work in such a child,
//! and a lock may be held there by a thread that exists only in the parent: every layer asks before it takes
//! one.

use crate::util::message;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static IN_FORKED_CHILD: AtomicBool = AtomicBool::new(false);

/// Whether this process was forked from one that had used the library. Every entry point asks this before it
/// takes a lock, unless it has found a ready device, of which such a process has none. One relaxed load.
#[inline]
pub fn in_forked_child() -> bool {
    IN_FORKED_CHILD.load(Relaxed)
}

/// Marks this process as such a child. For the handler of `fork`; async-signal-safe.
pub fn mark_forked_child() {
    IN_FORKED_CHILD.store(true, Relaxed);
}

/// Prints, once, why a forked child gets no memory.
#[cold]
pub fn explain_forked_child() {
    static PRINTED: AtomicBool = AtomicBool::new(false);
    message::print_once(&PRINTED, || {
        "no memory: this process was forked from one that already used the GPU, which a child \
         cannot share; start it with spawn or forkserver"
    });
}
