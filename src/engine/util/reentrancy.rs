//! Whether this thread is inside a call that the library makes to the driver. The driver, and tools that
//! trace it, may then call functions that the library interposes: such a call is passed on to the driver, as
//! the thread may hold a pool's lock.

use std::cell::Cell;

thread_local! {
    // No destructor: a thread that is ending may free memory.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The thread is inside until this is dropped. Not [`Send`].
pub struct Inside {
    flag: *const Cell<bool>,
    before: bool,
}

impl Inside {
    /// Whether the thread was inside before [`enter`].
    #[inline]
    pub fn was_inside(&self) -> bool {
        self.before
    }
}

/// Marks the thread as inside. Calls nest.
#[inline]
pub fn enter() -> Inside {
    INSIDE.with(|inside| Inside {
        flag: inside,
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
        // SAFETY: this thread's flag, which has no destructor and so lives as long as the thread. Looking it
        // up again would cost a call.
        unsafe { &*self.flag }.set(self.before);
    }
}
