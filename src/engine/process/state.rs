//! The state of the process: whether it has used the GPU through the library, and whether it is the one that
//! writes the statistics.
//!
//! ```text
//!             first use                 fork
//!   Unused ─────────────▶ Used ─────────────────▶ Child (in the new process)
//!      ╰──── fork ───▶ Unused, with an owner of its own
//! ```
//!
//! *Unused*: loaded, never asked for memory. No thread runs, no signal is handled, and a forked child may use
//! the GPU as its parent may. *Used*: the owner, which is the process that asked for memory, writes the
//! statistics. *Child*: forked from a used process ([`crate::util::fork`]); it takes no lock, gets no memory
//! and writes nothing.
//!
//! A process made without `fork`'s handlers (`vfork`, `clone`) still believes that it is *Used*, so a writer
//! compares the process's id with the owner's first.

use crate::util::fork;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::Relaxed};

/// The library has been used, by this process or by the one that it was forked from.
static USED: AtomicBool = AtomicBool::new(false);
/// The id of the process that may write statistics; 0 before [`set_owner`].
static OWNER: AtomicI32 = AtomicI32::new(0);
/// This process was forked from one that had the library loaded.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Makes this process the owner of the statistics. Async-signal-safe.
pub fn set_owner() {
    OWNER.store(id(), Relaxed);
}

/// Whether this process is the owner. Async-signal-safe.
pub fn is_owner() -> bool {
    OWNER.load(Relaxed) == id()
}

/// From now on the process is *Used*. Returns true on the first call, but not in a *Child*.
pub fn set_used() -> bool {
    !USED.swap(true, Relaxed)
}

/// Whether the process is *Used*, and its own owner.
pub fn is_used_by_owner() -> bool {
    USED.load(Relaxed) && !fork::in_forked_child() && is_owner()
}

/// Whether the process is *Unused*, its own owner, and was not forked from one with the library.
pub fn is_unused_by_owner() -> bool {
    !USED.load(Relaxed) && is_owner() && !is_forked()
}

/// Whether this process was forked from one that had the library loaded, used or not.
pub fn is_forked() -> bool {
    FORKED.load(Relaxed)
}

/// The transition at a fork, in the new process. Async-signal-safe.
pub fn after_fork() {
    FORKED.store(true, Relaxed);
    match USED.load(Relaxed) {
        false => set_owner(),
        true => fork::mark_forked_child(),
    }
}

/// This process's id. Async-signal-safe.
pub fn id() -> i32 {
    // SAFETY: getpid has no preconditions.
    unsafe { libc::getpid() }
}
