//! An arena's address space: the reserved ranges, and the gaps in them where nothing is mapped.

use std::collections::BTreeMap;

/// Reserved ranges and the gaps in them.
#[derive(Default)]
pub struct AddressSpace {
    /// Start and size of every reservation.
    pub ranges: Vec<(u64, u64)>,
    /// Start and size of every gap. Two gaps of one range never touch.
    gaps: BTreeMap<u64, u64>,
}

impl AddressSpace {
    /// Adds a reservation, all of it a gap.
    pub fn add(&mut self, start: u64, size: u64) {
        self.ranges.push((start, size));
        self.gaps.insert(start, size);
    }

    /// Bytes of the gap from `address` on.
    pub fn gap_at(&self, address: u64) -> u64 {
        match self.gaps.range(..=address).next_back() {
            Some((start, size)) if start + size > address => start + size - address,
            _ => 0,
        }
    }

    /// Where the gap around `address` starts; `address` itself where there is none.
    pub fn gap_start(&self, address: u64) -> u64 {
        match self.gaps.range(..=address).next_back() {
            Some((start, size)) if start + size > address => *start,
            _ => address,
        }
    }

    /// Start and size of the largest gap.
    pub fn largest_gap(&self) -> Option<(u64, u64)> {
        self.gaps
            .iter()
            .map(|(start, size)| (*start, *size))
            .max_by_key(|(_, size)| *size)
    }

    /// Something was mapped inside a gap.
    pub fn mark_mapped(&mut self, address: u64, size: u64) {
        let Some((start, length)) = self
            .gaps
            .range(..=address)
            .next_back()
            .map(|(start, size)| (*start, *size))
        else {
            return;
        };
        self.gaps.remove(&start);
        if start < address {
            self.gaps.insert(start, address - start);
        }
        let end = address + size;
        if end < start + length {
            self.gaps.insert(end, start + length - end);
        }
    }

    /// Something was unmapped.
    pub fn mark_unmapped(&mut self, address: u64, size: u64) {
        let (mut start, mut end) = (address, address + size);
        let limits = self.range_of(address);
        if let Some((before, length)) = self.gaps.range(..start).next_back().map(|(s, l)| (*s, *l))
            && before + length == start
            && before >= limits.0
        {
            self.gaps.remove(&before);
            start = before;
        }
        if end < limits.1
            && let Some(length) = self.gaps.remove(&end)
        {
            end += length;
        }
        self.gaps.insert(start, end - start);
    }

    /// Start and end of the reservation around `address`.
    pub fn range_of(&self, address: u64) -> (u64, u64) {
        self.ranges
            .iter()
            .find(|(start, size)| (*start..start + size).contains(&address))
            .map_or((0, 0), |(start, size)| (*start, start + size))
    }

    /// Bytes of all gaps together, for the invariant walker.
    pub fn unmapped(&self) -> u64 {
        self.gaps.values().sum()
    }

    /// Bytes of all reservations.
    pub fn reserved(&self) -> u64 {
        self.ranges.iter().map(|(_, size)| size).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_split_and_coalesce_and_stay_inside_their_range() {
        let mut addresses = AddressSpace::default();
        addresses.add(1000, 100);
        addresses.add(1100, 50);
        assert_eq!(addresses.gap_at(1000), 100);
        addresses.mark_mapped(1020, 10);
        assert_eq!(
            (
                addresses.gap_at(1000),
                addresses.gap_at(1020),
                addresses.gap_at(1030)
            ),
            (20, 0, 70)
        );
        assert_eq!(addresses.largest_gap(), Some((1030, 70)));
        addresses.mark_unmapped(1020, 10);
        assert_eq!(
            (
                addresses.gap_at(1000),
                addresses.gap_at(1099),
                addresses.gap_at(1100)
            ),
            (100, 1, 50)
        );
        addresses.mark_mapped(1100, 10);
        addresses.mark_unmapped(1100, 10);
        assert_eq!((addresses.gap_at(1090), addresses.gap_at(1100)), (10, 50));
        assert_eq!((addresses.unmapped(), addresses.reserved()), (150, 150));
    }
}
