//! One wait for a device that serves all threads that want one just then.
//!
//! A wait takes the driver 0.3 µs on an idle device, and 14 µs a thread where eight threads wait at once
//! (H100): they take turns at the driver's own lock. A wait under way is of no use to a thread that asks
//! for one, as it may have begun before the thread's work was submitted; the next one is, for every
//! thread that asked before it began.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence, fence};

/// The waits for one device, in turn.
#[derive(Default)]
pub struct SingleFlight {
    /// Twice the number of waits that are over, and 1 more while there is one.
    state: AtomicU64,
    /// The number of the last wait that ended well. They count up from 1.
    done: AtomicU64,
}

/// Looks that a thread takes for another's wait, with 16 pauses of 10 to 45 ns between: 10 to 50 µs.
/// A device that is busy for longer is waited for by each thread itself, in the driver and in the way
/// that the program has chosen: to look on would cost time where nothing is to be gained.
const LOOKS: u32 = 64;

impl SingleFlight {
    /// Waits with `wait`, which answers a status and 0 for success, or has another thread's wait do that
    /// began after this call. Returns what `wait` answered, or 0.
    #[inline]
    pub fn wait(&self, wait: impl Fn() -> u32) -> u32 {
        match self.lead() {
            Some(turn) => turn.wait(wait),
            None => self.follow(wait, || (0..16).for_each(|_| spin_loop())),
        }
    }

    #[inline]
    fn lead(&self) -> Option<Turn<'_>> {
        let state = self.state.fetch_or(TAKEN, Ordering::SeqCst);
        full_barrier();
        match state & TAKEN {
            0 => Some(Turn {
                flight: self,
                number: (state >> 1) + 1,
            }),
            // No turn is made here: to drop it would end the other's.
            _ => None,
        }
    }

    #[cold]
    fn follow(&self, wait: impl Fn() -> u32, mut pause: impl FnMut()) -> u32 {
        // Pairs with the barrier in `lead`: a wait that this does not see to have begun sees what this
        // thread has submitted.
        fence(Ordering::SeqCst);
        let state = self.state.load(Ordering::Relaxed);
        let wanted = (state >> 1) + 1 + (state & TAKEN);
        for _ in 0..LOOKS {
            if self.done.load(Ordering::Acquire) >= wanted {
                return 0;
            }
            if self.state.load(Ordering::Relaxed) & TAKEN == 0
                && let Some(turn) = self.lead()
            {
                return turn.wait(wait);
            }
            pause();
        }
        wait()
    }
}

/// The bit of a wait under way.
const TAKEN: u64 = 1;

/// What was written before is seen by all before anything after is read: by the driver, too, whose reads
/// are in no memory model. An atomic exchange is as much already on x86, where a fence would cost 10 ns.
#[inline]
fn full_barrier() {
    if cfg!(target_arch = "x86_64") {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The one that waits, until dropped.
struct Turn<'a> {
    flight: &'a SingleFlight,
    /// This wait's.
    number: u64,
}

impl Turn<'_> {
    #[inline]
    fn wait(self, wait: impl Fn() -> u32) -> u32 {
        let status = wait();
        self.end(status);
        status
    }

    /// A wait that failed is no other thread's: each gets its own answer from the driver.
    #[inline]
    fn end(self, status: u32) {
        if status == 0 {
            self.flight.done.store(self.number, Ordering::Release);
        }
    }
}

impl Drop for Turn<'_> {
    #[inline]
    fn drop(&mut self) {
        // Nobody else writes to it while it is taken.
        self.flight.state.store(self.number << 1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    /// A device that is idle, as far as it knows, of what had been submitted when a wait began.
    #[derive(Default)]
    struct Busy {
        submitted: [AtomicU64; 8],
        waits: AtomicUsize,
    }

    #[test]
    fn a_wait_ends_after_all_that_was_submitted_before_it() {
        let (flight, busy) = (SingleFlight::default(), Busy::default());
        let finished: [AtomicU64; 8] = Default::default();
        thread::scope(|scope| {
            for thread in 0..8 {
                let (flight, busy, finished) = (&flight, &busy, &finished);
                scope.spawn(move || {
                    for work in 1..=5000 {
                        busy.submitted[thread].store(work, Ordering::Relaxed);
                        let status = flight.wait(|| {
                            let seen = busy
                                .submitted
                                .each_ref()
                                .map(|it| it.load(Ordering::Relaxed));
                            busy.waits.fetch_add(1, Ordering::Relaxed);
                            if work % 16 == 0 {
                                thread::yield_now();
                            }
                            for (to, seen) in finished.iter().zip(seen) {
                                to.fetch_max(seen, Ordering::Relaxed);
                            }
                            0
                        });
                        assert_eq!(status, 0);
                        assert!(finished[thread].load(Ordering::Relaxed) >= work);
                    }
                });
            }
        });
        assert!(busy.waits.load(Ordering::Relaxed) <= 8 * 5000);
    }

    /// Asks for a wait while another thread has its turn, which `others` goes on with at each look.
    /// Returns the status, and how often this thread had to wait itself.
    fn follow(flight: &SingleFlight, others: impl FnMut()) -> (u32, usize) {
        let waits = AtomicUsize::new(0);
        let own = || {
            waits.fetch_add(1, Ordering::Relaxed);
            1
        };
        let status = flight.follow(own, others);
        (status, waits.into_inner())
    }

    #[test]
    fn the_next_wait_serves_all_who_asked_before_it() {
        let flight = SingleFlight::default();
        let mut turn = flight.lead();
        let next = || {
            if let Some(turn) = turn.take() {
                turn.end(0);
                if let Some(turn) = flight.lead() {
                    turn.end(0);
                }
            }
        };
        assert_eq!(follow(&flight, next), (0, 0));
    }

    #[test]
    fn a_wait_under_way_does_not_do() {
        let flight = SingleFlight::default();
        let mut turn = flight.lead();
        let ends = || {
            if let Some(turn) = turn.take() {
                turn.end(0);
            }
        };
        assert_eq!(follow(&flight, ends), (1, 1));
    }

    #[test]
    fn a_wait_that_fails_is_nobody_elses() {
        let flight = SingleFlight::default();
        assert_eq!(flight.wait(|| 700), 700);
        let mut turn = flight.lead();
        let fails = || {
            if let Some(turn) = turn.take() {
                turn.end(0);
                if let Some(turn) = flight.lead() {
                    turn.end(700);
                }
            }
        };
        assert_eq!(follow(&flight, fails), (1, 1));
    }

    #[test]
    fn one_waits_at_a_time() {
        let flight = SingleFlight::default();
        let turn = flight.lead();
        assert!(turn.is_some());
        assert!(flight.lead().is_none());
        assert!(flight.lead().is_none());
        drop(turn);
        assert!(flight.lead().is_some());
    }

    #[test]
    fn nobody_looks_on_for_ever() {
        let flight = SingleFlight::default();
        let _turn = flight.lead();
        assert_eq!(follow(&flight, || ()), (1, 1));
    }
}
