//! The lock around a pool and around a stream cache: a spin lock with exponential backoff that ends in
//! sleeping.
//!
//! Most critical sections take some ten nanoseconds, so the lock's own cost matters: acquiring it is one
//! atomic exchange, releasing it a plain store. A futex lock needs two exchanges, as it has to know whether
//! to wake a waiter; here waiters poll, at longer and longer intervals, so that the owner's cache line is
//! left alone. Some critical sections call the driver or wait for the GPU; after the first microseconds
//! waiters sleep.

use parking_lot::lock_api::{self, GuardSend, RawMutexTimed};
use std::hint::spin_loop;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A value behind the lock.
pub type Lock<T> = lock_api::Mutex<RawLock, T>;

/// Holds the lock until dropped.
pub type Guard<'a, T> = lock_api::MutexGuard<'a, RawLock, T>;

/// Aligned so that nothing else shares its cache lines, nor those that are prefetched with them.
#[repr(align(128))]
pub struct CachePadded<T>(pub T);

impl<T> Deref for CachePadded<T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}

/// The lock without a value: true while it is held.
pub struct RawLock(AtomicBool);

impl RawLock {
    /// Waits for the lock; false if the deadline passed first.
    #[cold]
    #[inline(never)]
    fn lock_slow(&self, deadline: Option<Instant>) -> bool {
        let mut backoff = Backoff::Spin(16);
        loop {
            backoff = backoff.wait();
            if !self.0.load(Ordering::Relaxed) && lock_api::RawMutex::try_lock(self) {
                return true;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return false;
            }
        }
    }
}

/// How to wait next. A pause instruction takes from 10 ns (AMD) to 45 ns (Intel), so the first wait is as
/// long as several critical sections, and all spinning together takes from 5 to 25 µs.
#[derive(Clone, Copy)]
enum Backoff {
    /// This many pause instructions.
    Spin(u32),
    /// Yield to other threads now, and this many times after that.
    Yield(u32),
    /// This many microseconds.
    Sleep(u64),
}

impl Backoff {
    /// Waits, and returns how to wait next time.
    fn wait(self) -> Backoff {
        match self {
            Backoff::Spin(pauses) => {
                (0..pauses).for_each(|_| spin_loop());
                match pauses {
                    256.. => Backoff::Yield(8),
                    _ => Backoff::Spin(pauses * 2),
                }
            }
            Backoff::Yield(more) => {
                thread::yield_now();
                match more {
                    0 => Backoff::Sleep(20),
                    _ => Backoff::Yield(more - 1),
                }
            }
            Backoff::Sleep(micros) => {
                thread::sleep(Duration::from_micros(micros));
                Backoff::Sleep((micros * 2).min(250))
            }
        }
    }
}

// SAFETY: `try_lock` succeeds for one caller until `unlock`, as the exchange returns false to one thread
// only. Acquire and release order the critical sections.
unsafe impl lock_api::RawMutex for RawLock {
    #[allow(clippy::declare_interior_mutable_const)]
    const INIT: RawLock = RawLock(AtomicBool::new(false));

    type GuardMarker = GuardSend;

    #[inline]
    fn lock(&self) {
        if !self.try_lock() {
            self.lock_slow(None);
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        !self.0.swap(true, Ordering::Acquire)
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.0.store(false, Ordering::Release);
    }

    #[inline]
    fn is_locked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

// SAFETY: as above; `lock_slow` returns true only after `try_lock` has.
unsafe impl RawMutexTimed for RawLock {
    type Duration = Duration;
    type Instant = Instant;

    fn try_lock_for(&self, timeout: Duration) -> bool {
        self.try_lock_until(Instant::now() + timeout)
    }

    fn try_lock_until(&self, timeout: Instant) -> bool {
        lock_api::RawMutex::try_lock(self) || self.lock_slow(Some(timeout))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_thread_holds_the_lock() {
        let count = Lock::new(0u64);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..20_000).for_each(|_| *count.lock() += 1));
            }
        });
        assert_eq!(*count.lock(), 160_000);
    }

    #[test]
    fn a_timed_wait_ends_at_its_deadline_or_when_the_lock_is_released() {
        let lock = Lock::new(());
        let held = lock.lock();
        assert!(lock.try_lock().is_none());
        assert!(lock.try_lock_for(Duration::from_millis(3)).is_none());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| lock.try_lock_for(Duration::from_secs(60)).is_some());
            thread::sleep(Duration::from_millis(5));
            drop(held);
            assert_eq!(waiting.join().ok(), Some(true));
        });
    }
}
