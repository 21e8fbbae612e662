//! Permanent streams: streams that are never destroyed, so that the driver's id of each can be cached by its
//! handle.
//!
//! Otherwise every allocation asks the driver for the id: two calls of some 25 ns each (H100), half of the
//! time of an allocation from a stream cache.

use std::sync::atomic::{AtomicU64, Ordering};

/// A lock-free hash map of fixed size from numbers to numbers, neither of which is 0. Entries do not change.
/// A key for which there is no slot is not inserted.
pub struct InsertOnlyMap<const SLOTS: usize> {
    /// Keys and values.
    slots: [[AtomicU64; 2]; SLOTS],
}

/// Slots that are probed for a key.
const PROBES: usize = 8;

impl<const SLOTS: usize> InsertOnlyMap<SLOTS> {
    /// An empty map.
    pub const fn new() -> Self {
        InsertOnlyMap {
            slots: [const { [AtomicU64::new(0), AtomicU64::new(0)] }; SLOTS],
        }
    }

    #[inline]
    fn slot(&self, key: u64, probe: usize) -> &[AtomicU64; 2] {
        let home = (crate::util::hash::fibonacci(key) >> 32) as usize;
        &self.slots[(home + probe) % SLOTS]
    }

    /// The key's value.
    #[inline]
    pub fn get(&self, key: u64) -> Option<u64> {
        let [known, value] = self.slot(key, 0);
        match known.load(Ordering::Acquire) {
            0 => None,
            it if it == key => Some(value.load(Ordering::Relaxed)).filter(|it| *it != 0),
            _ => self.probe_further(key),
        }
    }

    #[cold]
    #[inline(never)]
    fn probe_further(&self, key: u64) -> Option<u64> {
        let mut further = (1..PROBES).map(|probe| self.slot(key, probe));
        let [_, value] = further.find(|[known, _]| known.load(Ordering::Acquire) == key)?;
        Some(value.load(Ordering::Relaxed)).filter(|it| *it != 0)
    }

    /// Removes all values.
    pub fn clear(&self) {
        // The keys stay, so that no thread reads a value beside another key.
        for [_, value] in &self.slots {
            value.store(0, Ordering::Relaxed);
        }
    }

    /// Inserts a value, which is not 0. Threads that insert the same key insert the same value.
    pub fn insert(&self, key: u64, new: u64) {
        for [known, value] in (0..PROBES).map(|probe| self.slot(key, probe)) {
            let taken = known.compare_exchange(0, key, Ordering::AcqRel, Ordering::Acquire);
            if taken.is_ok() || taken == Err(key) {
                // Until the value is there, `get` finds none.
                value.store(new, Ordering::Relaxed);
                return;
            }
        }
    }
}

impl<const SLOTS: usize> Default for InsertOnlyMap<SLOTS> {
    fn default() -> Self {
        Self::new()
    }
}

/// The driver's ids of a device's permanent streams, by handle. PyTorch makes up to 128 of them.
pub(crate) type PermanentStreams = InsertOnlyMap<256>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn insert_only_map_finds_what_was_inserted() {
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
    fn insert_only_map_takes_keys_again_after_clear() {
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
    fn insert_only_map_keeps_its_entries_when_full() {
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
