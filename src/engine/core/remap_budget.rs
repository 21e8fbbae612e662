//! How much of the program's time goes into moving chunks.
//!
//! A pool that blocks of all sizes come to and leave at random is cut up so finely that its last percents
//! of memory cost moves without end: where 2000 blocks of up to 16 MiB are replaced, from 5 to 15 chunks are
//! moved in a thousand pairs, for 25 µs each (H100) beside 0.1 µs a pair, and 5 % more memory ends that.
//! Whether that is better is a question of time, which only the GPU's side can tell.

/// How long the moves are looked at before it is said whether they take too much. Two steps of a training
/// job, or so; less could be one large request.
const WINDOW: u64 = 50_000_000;

/// Times in nanoseconds, all on one clock.
pub struct RemapBudget {
    /// Since when `spent` counts.
    since: u64,
    spent: u64,
    too_much: bool,
}

impl RemapBudget {
    pub fn new() -> Self {
        RemapBudget {
            since: 0,
            spent: 0,
            too_much: false,
        }
    }

    /// Chunks were moved for so long.
    pub fn spend(&mut self, nanoseconds: u64) {
        self.spent += nanoseconds;
    }

    /// Whether moving has lately taken more than `patience`, in thousandths of the time; with none it
    /// always has.
    pub fn is_exceeded(&mut self, now: u64, patience: u64) -> bool {
        let elapsed = now.saturating_sub(self.since);
        if elapsed >= WINDOW {
            self.too_much = self.spent.saturating_mul(1000) > elapsed.saturating_mul(patience);
            (self.since, self.spent) = (now, 0);
        }
        self.too_much || patience == 0
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
