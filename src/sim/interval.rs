//! A map from ranges of numbers to values: a range of a gigabyte costs as much as one of a kilobyte.

use std::collections::BTreeMap;

/// Disjoint half-open ranges, each with a value.
#[derive(Debug)]
pub(crate) struct Intervals<V> {
    runs: BTreeMap<u64, (u64, V)>,
}

impl<V> Default for Intervals<V> {
    fn default() -> Self {
        Intervals {
            runs: BTreeMap::new(),
        }
    }
}

impl<V: Clone> Intervals<V> {
    /// The runs that overlap `[from, to)`, whole, in order.
    pub fn overlapping(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, u64, &V)> {
        let first = self
            .runs
            .range(..=from)
            .next_back()
            .filter(|(_, (end, _))| *end > from);
        let start = first.map_or(from, |(start, _)| *start);
        // An empty range has no runs; `range` would panic on a start beyond its end.
        self.runs
            .range(start..to.max(start))
            .map(|(start, (end, value))| (*start, *end, value))
    }

    /// The first number of `[from, to)` that no run covers.
    pub fn first_gap(&self, from: u64, to: u64) -> Option<u64> {
        let mut reached = from;
        for (start, end, _) in self.overlapping(from, to) {
            if start > reached {
                return Some(reached);
            }
            reached = end;
        }
        (reached < to).then_some(reached)
    }

    /// Sets the whole range to one value, replacing what was there.
    pub fn set(&mut self, from: u64, to: u64, value: V) {
        if let Some(run) = self.runs.get_mut(&from)
            && run.0 == to
        {
            run.1 = value;
            return;
        }
        self.remove(from, to);
        if from < to {
            self.runs.insert(from, (to, value));
        }
    }

    /// Removes all values within the range.
    pub fn remove(&mut self, from: u64, to: u64) {
        self.split(from);
        self.split(to);
        while let Some((&start, _)) = self.runs.range(from..to.max(from)).next() {
            self.runs.remove(&start);
        }
    }

    /// Changes the values within the range, splitting runs at its ends; gaps get `fresh` first.
    pub fn update(&mut self, from: u64, to: u64, fresh: V, mut change: impl FnMut(u64, &mut V)) {
        self.split(from);
        self.split(to);
        let mut reached = from;
        while reached < to {
            match self.runs.range_mut(reached..to).next() {
                Some((&start, (end, value))) if start == reached => {
                    change(start, value);
                    reached = *end;
                }
                next => {
                    let end = next.map_or(to, |(&start, _)| start);
                    self.runs.insert(reached, (end, fresh.clone()));
                }
            }
        }
    }

    /// Makes `at` a boundary.
    fn split(&mut self, at: u64) {
        if let Some((_, (end, value))) = self.runs.range_mut(..at).next_back()
            && *end > at
        {
            let tail = (*end, value.clone());
            *end = at;
            self.runs.insert(at, tail);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(of: &Intervals<char>) -> Vec<(u64, u64, char)> {
        of.overlapping(0, u64::MAX)
            .map(|(a, b, c)| (a, b, *c))
            .collect()
    }

    #[test]
    fn a_set_replaces_and_splits() {
        let mut map = Intervals::default();
        map.set(0, 100, 'a');
        map.set(20, 30, 'b');
        assert_eq!(runs(&map), [(0, 20, 'a'), (20, 30, 'b'), (30, 100, 'a')]);
        map.set(10, 40, 'c');
        assert_eq!(runs(&map), [(0, 10, 'a'), (10, 40, 'c'), (40, 100, 'a')]);
        map.set(10, 40, 'd');
        assert_eq!(runs(&map)[1], (10, 40, 'd'));
        map.remove(5, 50);
        assert_eq!(runs(&map), [(0, 5, 'a'), (50, 100, 'a')]);
        map.remove(0, 100);
        assert_eq!(runs(&map), []);
    }

    #[test]
    fn overlaps_and_gaps() {
        let mut map = Intervals::default();
        map.set(10, 20, 'a');
        map.set(20, 30, 'b');
        assert_eq!(map.overlapping(15, 16).count(), 1);
        assert_eq!(map.overlapping(19, 21).count(), 2);
        assert_eq!(map.overlapping(0, 10).count(), 0);
        assert_eq!(map.overlapping(30, 40).count(), 0);
        assert_eq!(map.overlapping(12, 12).count(), 1);
        assert_eq!(map.first_gap(10, 30), None);
        assert_eq!(map.first_gap(12, 31), Some(30));
        assert_eq!(map.first_gap(5, 12), Some(5));
        assert_eq!(map.first_gap(40, 41), Some(40));
    }

    #[test]
    fn an_update_fills_gaps() {
        let mut map = Intervals::default();
        map.set(10, 20, 'a');
        map.set(30, 40, 'b');
        let mut seen = Vec::new();
        map.update(15, 35, 'x', |at, value| {
            seen.push((at, *value));
            *value = 'z';
        });
        assert_eq!(seen, [(15, 'a'), (20, 'x'), (30, 'b')]);
        assert_eq!(
            runs(&map),
            [
                (10, 15, 'a'),
                (15, 20, 'z'),
                (20, 30, 'z'),
                (30, 35, 'z'),
                (35, 40, 'b')
            ]
        );
    }
}
