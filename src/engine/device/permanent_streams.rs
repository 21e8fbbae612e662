//! Streams that are never destroyed, whose handles so are as good as their numbers: the driver need not
//! be asked for those at every allocation.
//!
//! To ask is two calls of some 25 ns each (H100), of which an allocation from a stream's stream cache would
//! otherwise take half.

use std::sync::atomic::{AtomicU64, Ordering};

/// What once holds and then always does: numbers by keys that are not 0. A key that finds no place is as
/// good as one that is not known.
pub struct InsertOnlyMap<const PLACES: usize> {
    places: [[AtomicU64; 2]; PLACES],
}

/// Places that a key may have.
const TRIES: usize = 8;

impl<const PLACES: usize> InsertOnlyMap<PLACES> {
    /// Nothing is known.
    pub const fn new() -> Self {
        InsertOnlyMap {
            places: [const { [AtomicU64::new(0), AtomicU64::new(0)] }; PLACES],
        }
    }

    #[inline]
    fn place(&self, key: u64, turn: usize) -> &[AtomicU64; 2] {
        let home = (crate::util::hash::fibonacci(key) >> 32) as usize;
        &self.places[(home + turn) % PLACES]
    }

    /// What was kept for the key.
    #[inline]
    pub fn get(&self, key: u64) -> Option<u64> {
        let [known, value] = self.place(key, 0);
        match known.load(Ordering::Acquire) {
            0 => None,
            it if it == key => Some(value.load(Ordering::Relaxed)).filter(|it| *it != 0),
            _ => self.get_further(key),
        }
    }

    #[cold]
    #[inline(never)]
    fn get_further(&self, key: u64) -> Option<u64> {
        let mut further = (1..TRIES).map(|turn| self.place(key, turn));
        let [_, value] = further.find(|[known, _]| known.load(Ordering::Acquire) == key)?;
        Some(value.load(Ordering::Relaxed)).filter(|it| *it != 0)
    }

    /// Nothing that was kept holds any more.
    pub fn clear(&self) {
        // The keys stay, so that nobody finds one's number beside another.
        for [_, value] in &self.places {
            value.store(0, Ordering::Relaxed);
        }
    }

    /// Keeps what holds for the key from now on, which is not 0. Whoever else does keeps the same.
    pub fn insert(&self, key: u64, holds: u64) {
        for [known, value] in (0..TRIES).map(|turn| self.place(key, turn)) {
            let taken = known.compare_exchange(0, key, Ordering::AcqRel, Ordering::Acquire);
            if taken.is_ok() || taken == Err(key) {
                // Until it is there the key counts as not known.
                value.store(holds, Ordering::Relaxed);
                return;
            }
        }
    }
}

impl<const PLACES: usize> Default for InsertOnlyMap<PLACES> {
    fn default() -> Self {
        Self::new()
    }
}

/// The driver's numbers for such streams of one device, by handle. PyTorch makes up to 128 of them.
pub(crate) type PermanentStreams = InsertOnlyMap<256>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_found() {
        let permanent = InsertOnlyMap::<64>::new();
        assert_eq!(permanent.get(7), None);
        for key in 1..=20 {
            permanent.insert(key, key + 1000);
        }
        for key in 1..=20 {
            assert_eq!(permanent.get(key), Some(key + 1000));
        }
        assert_eq!(permanent.get(21), None);
    }

    #[test]
    fn what_was_forgotten_can_be_kept_again() {
        let permanent = InsertOnlyMap::<64>::new();
        for key in 1..=20 {
            permanent.insert(key, key + 1000);
        }
        permanent.clear();
        assert!((1..=20).all(|key| permanent.get(key).is_none()));
        for key in 1..=20 {
            permanent.insert(key, key + 2000);
            assert_eq!(permanent.get(key), Some(key + 2000));
        }
    }

    #[test]
    fn where_all_is_full_nothing_is_lost() {
        let permanent = InsertOnlyMap::<16>::new();
        for key in 1..=100 {
            permanent.insert(key, key);
        }
        let found: Vec<u64> = (1..=100).filter_map(|key| permanent.get(key)).collect();
        assert_eq!(found.len(), 16);
        for key in found {
            permanent.insert(key, key);
            assert_eq!(permanent.get(key), Some(key));
        }
    }
}
