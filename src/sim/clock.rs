//! Vector clocks: which work of each stream is known to come before a point.

/// For each stream slot, the sequence number of its last work that comes before this point; 0 if none does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u64>);

impl Clock {
    pub fn get(&self, slot: u32) -> u64 {
        self.0.get(slot as usize).copied().unwrap_or(0)
    }

    pub fn set(&mut self, slot: u32, sequence: u64) {
        let slot = slot as usize;
        if self.0.len() <= slot {
            self.0.resize(slot + 1, 0);
        }
        self.0[slot] = sequence;
    }

    /// Takes the maximum of both for each slot; whether that changed anything.
    pub fn join(&mut self, other: &Clock) -> bool {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        let mut changed = false;
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            if *mine < *theirs {
                *mine = *theirs;
                changed = true;
            }
        }
        changed
    }

    /// Becomes a copy of the other, without a new allocation if possible.
    pub fn copy(&mut self, other: &Clock) {
        self.0.clone_from(&other.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_takes_the_later_of_each() {
        let (mut one, mut other) = (Clock::default(), Clock::default());
        one.set(0, 5);
        other.set(0, 3);
        other.set(2, 7);
        assert!(one.join(&other));
        assert_eq!(
            (one.get(0), one.get(1), one.get(2), one.get(9)),
            (5, 0, 7, 0)
        );
        assert!(!one.join(&other));
    }
}
