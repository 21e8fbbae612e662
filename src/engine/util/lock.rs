//! The lock around a pool and around a stream cache.
//!
//! Most sections are some ten nanoseconds long, so what counts is the lock's own cost: taking it is
//! one atomic exchange, giving it back a plain store. A system lock exchanges twice, because it has
//! to find out whom to wake; here nobody is woken. Whoever finds the lock taken looks again, at
//! longer and longer intervals, so that the one who has it can work undisturbed: many threads on one
//! lock then take turns of many sections each. Some sections call the driver or wait for the GPU;
//! after the first microseconds those who wait sleep.

use parking_lot::lock_api::{self, GuardSend, RawMutexTimed};
use std::hint::spin_loop;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A value that one thread at a time may use.
pub type Lock<T> = lock_api::Mutex<RawLock, T>;

/// The value, until dropped.
pub type Guard<'a, T> = lock_api::MutexGuard<'a, RawLock, T>;

/// Something that shares its cache lines, and those fetched with them, with nothing else.
#[repr(align(128))]
pub struct CachePadded<T>(pub T);

impl<T> Deref for CachePadded<T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        &self.0
    }
}

/// Whether it is taken.
pub struct RawLock(AtomicBool);

impl RawLock {
    /// False if the deadline passed first.
    #[cold]
    #[inline(never)]
    fn lock_slow(&self, deadline: Option<Instant>) -> bool {
        let mut wait = Wait::Spin(16);
        loop {
            wait = wait.longer();
            if !self.0.load(Ordering::Relaxed) && lock_api::RawMutex::try_lock(self) {
                return true;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return false;
            }
        }
    }
}

/// How to wait next. A pause is from 10 ns (AMD) to 45 ns (Intel) long. So the first look is after as
/// long as several sections take, and all spinning together is from 5 to 25 µs.
#[derive(Clone, Copy)]
enum Wait {
    /// So many pauses.
    Spin(u32),
    /// Let others run; so many times more.
    Yield(u32),
    /// So many microseconds.
    Sleep(u64),
}

impl Wait {
    /// Waits, and says how to do it next time.
    fn longer(self) -> Wait {
        match self {
            Wait::Spin(pauses) => {
                (0..pauses).for_each(|_| spin_loop());
                match pauses {
                    256.. => Wait::Yield(8),
                    _ => Wait::Spin(pauses * 2),
                }
            }
            Wait::Yield(more) => {
                thread::yield_now();
                match more {
                    0 => Wait::Sleep(20),
                    _ => Wait::Yield(more - 1),
                }
            }
            Wait::Sleep(micros) => {
                thread::sleep(Duration::from_micros(micros));
                Wait::Sleep((micros * 2).min(250))
            }
        }
    }
}

// SAFETY: `try_lock` lets one caller in until `unlock`, because the exchange succeeds for one of
// those who find the flag clear. Acquire and release order what the holders do.
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

// SAFETY: as above; `lock_slow` answers true only after `try_lock` has.
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
    fn one_at_a_time() {
        let count = Lock::new(0u64);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..20_000).for_each(|_| *count.lock() += 1));
            }
        });
        assert_eq!(*count.lock(), 160_000);
    }

    #[test]
    fn patience_ends_and_a_late_release_is_seen() {
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
