//! The event budget: how much of the program's time goes into events for single frees.
//!
//! An event costs several times what a free does. A training job frees a few hundred blocks a step and does
//! not notice; a loop that does little else would.

/// The time over which events are added up before they are judged, in nanoseconds: short, so that such a loop
/// is noticed soon.
const WINDOW: u64 = 2_000_000;

/// The share of a window that events may take, in thousandths. A backward pass frees in bursts.
const SHARE: u64 = 100;

/// For how many windows events pause after one where they took more: at first, and at most, as it doubles
/// each time.
const PAUSE: u64 = 32;
const LONGEST_PAUSE: u64 = 1024;

/// Times in nanoseconds, all on one clock.
pub struct EventBudget {
    /// Since when `spent` counts.
    since: u64,
    spent: u64,
    /// Events pause until then, and for how many windows the next time.
    paused_until: u64,
    pause: u64,
}

impl EventBudget {
    pub fn new() -> Self {
        EventBudget {
            since: 0,
            spent: 0,
            paused_until: 0,
            pause: PAUSE,
        }
    }

    /// An event took this long, and was recorded at `now`.
    pub fn spend(&mut self, nanoseconds: u64, now: u64) {
        self.spent += nanoseconds;
        let elapsed = now.saturating_sub(self.since);
        if elapsed < WINDOW {
            return;
        }
        if self.spent.saturating_mul(1000) > elapsed.saturating_mul(SHARE) {
            self.paused_until = now + self.pause * WINDOW;
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        } else {
            self.pause = PAUSE;
        }
        (self.since, self.spent) = (now, 0);
    }

    /// Whether events may be recorded.
    pub fn allows(&mut self, now: u64) -> bool {
        if now < self.paused_until {
            return false;
        }
        if self.paused_until > 0 {
            (self.since, self.spent, self.paused_until) = (now, 0, 0);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_pause_for_longer_each_time_that_they_take_too_much() {
        let mut budget = EventBudget::new();
        budget.spend(WINDOW / 20, WINDOW);
        assert!(budget.allows(WINDOW));
        budget.spend(WINDOW / 5, 2 * WINDOW);
        assert!(!budget.allows((2 + PAUSE) * WINDOW - 1));
        let now = (2 + PAUSE) * WINDOW;
        assert!(budget.allows(now));
        budget.spend(WINDOW / 5, now + WINDOW);
        assert!(!budget.allows(now + 2 * PAUSE * WINDOW));
    }
}
