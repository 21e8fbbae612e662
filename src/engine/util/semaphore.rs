//! A semaphore that a signal handler may post. Not a descriptor, which could be closed behind our back
//! and its number be given to a file of the program's.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;

/// To be made with [`Semaphore::start`] before anything else.
pub struct Semaphore(UnsafeCell<MaybeUninit<libc::sem_t>>);
// SAFETY: a semaphore is made to be used by several threads.
unsafe impl Sync for Semaphore {}

impl Semaphore {
    pub const fn new() -> Self {
        Semaphore(UnsafeCell::new(MaybeUninit::uninit()))
    }

    /// Makes it, at 0. To be called once, before anybody else knows of it.
    pub fn start(&self) -> bool {
        // SAFETY: nobody else uses it yet, and a static or leaked one stays where it is.
        unsafe { libc::sem_init(self.0.get().cast(), 0, 0) == 0 }
    }

    /// Lets one waiting thread go on. Async-signal-safe; false where there were too many posts.
    pub fn post(&self) -> bool {
        // SAFETY: it was made before.
        unsafe { libc::sem_post(self.0.get().cast()) == 0 }
    }

    /// Waits for a post.
    pub fn wait(&self) {
        // SAFETY: it was made before. What may fail here is that a signal interrupts.
        while unsafe { libc::sem_wait(self.0.get().cast()) } != 0 {}
    }
}
