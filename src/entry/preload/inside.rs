//! Whether this thread is inside one of our functions already. The driver, and tools that watch it,
//! may call what we stand in for while they work for us: such a call is theirs, and the pool's lock
//! may be held.

use std::cell::Cell;

thread_local! {
    // No destructor: a thread that is ending frees memory, too.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Inside until dropped.
pub struct Inside(());

/// `None` where the thread is inside already.
#[inline]
pub fn enter() -> Option<Inside> {
    (!INSIDE.replace(true)).then_some(Inside(()))
}

/// Whether the thread is inside.
pub fn is_inside() -> bool {
    INSIDE.get()
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}
