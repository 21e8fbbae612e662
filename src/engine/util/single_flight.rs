//! Single flight for synchronizing with a device: one call serves all threads that want it at the same time.
//!
//! A call takes 0.3 µs on an idle device, but 14 µs for each of eight threads that make it at once (H100):
//! they queue for the driver's lock. A call under way does not serve a thread that arrives now, as it may
//! have begun before the thread's work was submitted; the next call does, for every thread that arrived
//! before it began.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence, fence};

/// The calls for one device. They are numbered from 1.
#[derive(Default)]
pub struct SingleFlight {
    /// Twice the number of calls that have ended, plus 1 while there is one.
    state: AtomicU64,
    /// The number of the last call that succeeded.
    succeeded: AtomicU64,
}

/// How often a follower polls, with 16 pauses of 10 to 45 ns in between: 10 to 50 µs in all. After that the
/// device is busy, and each thread makes its own call, which waits in the way that the program has chosen.
const POLLS: u32 = 64;

impl SingleFlight {
    /// Calls `wait`, which returns a status and 0 for success, or waits for another thread's successful call
    /// that began after this one. Returns the status of `wait`, or 0.
    #[inline]
    pub fn wait(&self, wait: impl Fn() -> u32) -> u32 {
        match self.lead() {
            Some(leader) => leader.wait(wait),
            None => self.follow(wait, || (0..16).for_each(|_| spin_loop())),
        }
    }

    /// Begins a call, unless there is one.
    #[inline]
    fn lead(&self) -> Option<Leader<'_>> {
        let state = self.state.fetch_or(UNDER_WAY, Ordering::SeqCst);
        full_barrier();
        match state & UNDER_WAY {
            0 => Some(Leader {
                flight: self,
                number: (state >> 1) + 1,
            }),
            // No `Leader` may be made here: dropping it would end the other's call.
            _ => None,
        }
    }

    /// Waits for another thread's call.
    #[cold]
    fn follow(&self, wait: impl Fn() -> u32, mut pause: impl FnMut()) -> u32 {
        // Pairs with the barrier in `lead`: a call that this thread does not see under way yet sees the work
        // that the thread has submitted.
        fence(Ordering::SeqCst);
        let state = self.state.load(Ordering::Relaxed);
        let wanted = (state >> 1) + 1 + (state & UNDER_WAY);
        for _ in 0..POLLS {
            if self.succeeded.load(Ordering::Acquire) >= wanted {
                return 0;
            }
            if self.state.load(Ordering::Relaxed) & UNDER_WAY == 0
                && let Some(leader) = self.lead()
            {
                return leader.wait(wait);
            }
            pause();
        }
        wait()
    }
}

/// The bit of `state` that is set while there is a call.
const UNDER_WAY: u64 = 1;

/// Makes all earlier writes visible before any later read, also to the driver, whose reads are outside the
/// memory model. On x86 the atomic exchange before it does that already, and a fence would cost 10 ns.
#[inline]
fn full_barrier() {
    if cfg!(target_arch = "x86_64") {
        compiler_fence(Ordering::SeqCst);
    } else {
        fence(Ordering::SeqCst);
    }
}

/// The thread whose call is under way, until dropped.
struct Leader<'a> {
    flight: &'a SingleFlight,
    /// The call's.
    number: u64,
}

impl Leader<'_> {
    #[inline]
    fn wait(self, wait: impl Fn() -> u32) -> u32 {
        let status = wait();
        self.end(status);
        status
    }

    /// A call that failed serves no other thread: each gets its own status from the driver.
    #[inline]
    fn end(self, status: u32) {
        if status == 0 {
            self.flight.succeeded.store(self.number, Ordering::Release);
        }
    }
}

impl Drop for Leader<'_> {
    #[inline]
    fn drop(&mut self) {
        // No other thread changes it while a call is under way.
        self.flight.state.store(self.number << 1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    /// A device: a call waits for the work that had been submitted when the call began.
    #[derive(Default)]
    struct Gpu {
        submitted: [AtomicU64; 8],
        waits: AtomicUsize,
    }

    #[test]
    fn a_wait_ends_after_all_work_submitted_before_it() {
        let (flight, gpu) = (SingleFlight::default(), Gpu::default());
        let finished: [AtomicU64; 8] = Default::default();
        thread::scope(|scope| {
            for thread in 0..8 {
                let (flight, gpu, finished) = (&flight, &gpu, &finished);
                scope.spawn(move || {
                    for work in 1..=5000 {
                        gpu.submitted[thread].store(work, Ordering::Relaxed);
                        let status = flight.wait(|| {
                            let seen = gpu
                                .submitted
                                .each_ref()
                                .map(|it| it.load(Ordering::Relaxed));
                            gpu.waits.fetch_add(1, Ordering::Relaxed);
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
        assert!(gpu.waits.load(Ordering::Relaxed) <= 8 * 5000);
    }

    /// Follows while another thread leads, which `others` advances at each poll. Returns the status, and how
    /// often this thread had to call itself.
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
    fn the_next_call_serves_threads_that_arrived_before_it() {
        let flight = SingleFlight::default();
        let mut leader = flight.lead();
        let next = || {
            if let Some(leader) = leader.take() {
                leader.end(0);
                if let Some(leader) = flight.lead() {
                    leader.end(0);
                }
            }
        };
        assert_eq!(follow(&flight, next), (0, 0));
    }

    #[test]
    fn a_call_under_way_serves_no_thread_that_arrives() {
        let flight = SingleFlight::default();
        let mut leader = flight.lead();
        let ends = || {
            if let Some(leader) = leader.take() {
                leader.end(0);
            }
        };
        assert_eq!(follow(&flight, ends), (1, 1));
    }

    #[test]
    fn a_failed_call_serves_no_other_thread() {
        let flight = SingleFlight::default();
        assert_eq!(flight.wait(|| 700), 700);
        let mut leader = flight.lead();
        let fails = || {
            if let Some(leader) = leader.take() {
                leader.end(0);
                if let Some(leader) = flight.lead() {
                    leader.end(700);
                }
            }
        };
        assert_eq!(follow(&flight, fails), (1, 1));
    }

    #[test]
    fn one_thread_leads_at_a_time() {
        let flight = SingleFlight::default();
        let leader = flight.lead();
        assert!(leader.is_some());
        assert!(flight.lead().is_none());
        assert!(flight.lead().is_none());
        drop(leader);
        assert!(flight.lead().is_some());
    }

    #[test]
    fn a_follower_gives_up_polling() {
        let flight = SingleFlight::default();
        let _turn = flight.lead();
        assert_eq!(follow(&flight, || ()), (1, 1));
    }
}
