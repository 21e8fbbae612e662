//! Whether this thread is inside one of our functions already. The driver, and tools that watch it,
//! may call what we stand in for while they work for us: such a call is theirs, and the pool's lock
//! may be held.

use super::breaks::is_broken;
use std::cell::Cell;

thread_local! {
    // No destructor: a thread that is ending frees memory, too.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Inside until dropped, on the thread that entered.
pub struct Inside(*const Cell<bool>);

/// `None` where the thread is inside already.
#[inline]
pub fn enter() -> Option<Inside> {
    INSIDE.with(|inside| match inside.replace(true) {
        // Nothing is made here that would be dropped.
        true if !is_broken("inside") => None,
        _ => Some(Inside(inside)),
    })
}

/// Whether the thread is inside.
pub fn is_inside() -> bool {
    INSIDE.get()
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the thread's own, which has no destructor and so stays while the thread runs; a pointer
        // goes to no other thread. To look for it again would cost a call.
        unsafe { &*self.0 }.set(false);
    }
}
