//! A semaphore that a signal handler can post. A pipe or eventfd would not do: the program could close its
//! descriptor, and open a file under the same number.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;

/// A POSIX semaphore. [`Semaphore::start`] comes before any other call.
pub struct Semaphore(UnsafeCell<MaybeUninit<libc::sem_t>>);
// SAFETY: a semaphore is made to be used by several threads.
unsafe impl Sync for Semaphore {}

impl Semaphore {
    /// Not initialised yet.
    pub const fn new() -> Self {
        Semaphore(UnsafeCell::new(MaybeUninit::uninit()))
    }

    /// Initialises it to 0; false if that fails. To be called once, before another thread uses it.
    pub fn start(&self) -> bool {
        // SAFETY: no other thread uses it yet, and a static or leaked one is never moved.
        unsafe { libc::sem_init(self.0.get().cast(), 0, 0) == 0 }
    }

    /// Wakes one waiting thread. Async-signal-safe; false if the counter is at its maximum.
    pub fn post(&self) -> bool {
        // SAFETY: it was initialised.
        unsafe { libc::sem_post(self.0.get().cast()) == 0 }
    }

    /// Waits for a post.
    pub fn wait(&self) {
        // SAFETY: it was initialised. The call fails only if a signal interrupts it.
        while unsafe { libc::sem_wait(self.0.get().cast()) } != 0 {}
    }
}
