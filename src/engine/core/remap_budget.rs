//! The remap budget: how much of the program's time goes into remapping chunks.
//!
//! Where blocks of all sizes come and go at random, free memory gets so fragmented that keeping within the
//! slack costs remaps without end: with 2000 blocks of up to 16 MiB, 5 to 15 chunks in a thousand pairs, at
//! 25 µs each (H100) beside 0.1 µs a pair. 5 % more memory ends that. Whether it is worth that is a question
//! of time, which only the GPU's side can tell.

/// The time over which remaps are added up before they are judged, in nanoseconds: about two steps of a
/// training job. Less could be one large request.
const WINDOW: u64 = 50_000_000;

/// Times in nanoseconds, all on one clock.
pub struct RemapBudget {
    /// Since when `spent` counts.
    since: u64,
    spent: u64,
    exceeded: bool,
}

impl RemapBudget {
    pub fn new() -> Self {
        RemapBudget {
            since: 0,
            spent: 0,
            exceeded: false,
        }
    }

    /// Remapping took this long.
    pub fn spend(&mut self, nanoseconds: u64) {
        self.spent += nanoseconds;
    }

    /// Whether remapping took more than `share` of the last window, in thousandths; with 0 it always did.
    pub fn is_exceeded(&mut self, now: u64, share: u64) -> bool {
        let elapsed = now.saturating_sub(self.since);
        if elapsed >= WINDOW {
            self.exceeded = self.spent.saturating_mul(1000) > elapsed.saturating_mul(share);
            (self.since, self.spent) = (now, 0);
        }
        self.exceeded || share == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_is_the_share_of_the_last_window() {
        let mut remap_budget = RemapBudget::new();
        remap_budget.spend(WINDOW / 10);
        assert!(!remap_budget.is_exceeded(WINDOW - 1, 100));
        assert!(!remap_budget.is_exceeded(WINDOW, 100));
        remap_budget.spend(WINDOW / 10 + 1);
        assert!(!remap_budget.is_exceeded(2 * WINDOW - 1, 100));
        assert!(remap_budget.is_exceeded(2 * WINDOW, 100));
        assert!(remap_budget.is_exceeded(3 * WINDOW - 1, 100));
        assert!(!remap_budget.is_exceeded(3 * WINDOW, 100));
    }
}
