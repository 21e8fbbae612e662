//! Whether this thread is at work for the library. The driver, and tools that watch it, may call what the
//! library stands in for while they work for it: such a call is theirs, and a pool's lock may be held.

use std::cell::Cell;

thread_local! {
    // No destructor: a thread that is ending frees memory, too.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Inside until dropped, on the thread that entered.
pub struct Inside {
    place: *const Cell<bool>,
    before: bool,
}

impl Inside {
    /// Whether the thread was inside already.
    #[inline]
    pub fn was_inside(&self) -> bool {
        self.before
    }
}

/// From here on the thread is inside.
#[inline]
pub fn enter() -> Inside {
    INSIDE.with(|inside| Inside {
        place: inside,
        before: inside.replace(true),
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
        unsafe { &*self.place }.set(self.before);
    }
}
