//! From an address to the block that starts there: an open-addressed hash with linear probing and
//! backward-shift deletion, so that it never fills up with tombstones. Look-up, insertion and
//! removal touch one or two cache lines.

use super::block::{BlockId, NONE};

#[derive(Clone, Copy)]
struct Entry {
    address: u64,
    block: BlockId,
}

const EMPTY: Entry = Entry {
    address: 0,
    block: NONE,
};

/// Maps the addresses of blocks handed out to their blocks. Address 0 is never one.
pub struct Table {
    entries: Vec<Entry>,
    shift: u32,
    count: usize,
}

impl Table {
    pub fn new() -> Self {
        Table {
            entries: vec![EMPTY; 1 << 8],
            shift: 64 - 8,
            count: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.count
    }

    /// Fibonacci hashing of the address in blocks: neighbours spread, the top bits are the slot.
    #[inline]
    fn home(&self, address: u64) -> usize {
        ((address / super::BLOCK).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize
    }

    #[inline]
    pub fn get(&self, address: u64) -> BlockId {
        let mask = self.entries.len() - 1;
        let mut at = self.home(address);
        loop {
            let entry = self.entries[at & mask];
            if entry.address == address || entry.address == 0 {
                return entry.block;
            }
            at += 1;
        }
    }

    #[inline]
    pub fn insert(&mut self, address: u64, block: BlockId) {
        if (self.count + 1) * 2 > self.entries.len() {
            self.grow();
        }
        let mask = self.entries.len() - 1;
        let mut at = self.home(address);
        while self.entries[at & mask].address != 0 {
            at += 1;
        }
        self.entries[at & mask] = Entry { address, block };
        self.count += 1;
    }

    /// Removes the entry and returns its block, or `NONE`.
    #[inline]
    pub fn remove(&mut self, address: u64) -> BlockId {
        let mask = self.entries.len() - 1;
        let mut hole = self.home(address);
        loop {
            let entry = self.entries[hole & mask];
            if entry.address == 0 {
                return NONE;
            }
            if entry.address == address {
                break;
            }
            hole += 1;
        }
        let hole_start = hole & mask;
        let block = self.entries[hole_start].block;
        let mut hole = hole_start;
        let mut at = (hole + 1) & mask;
        while self.entries[at].address != 0 {
            let home = self.home(self.entries[at].address);
            // The entry may move back only if its home is not inside (hole, at], cyclically.
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.entries[hole] = self.entries[at];
                hole = at;
            }
            at = (at + 1) & mask;
        }
        self.entries[hole] = EMPTY;
        self.count -= 1;
        block
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        let bigger = vec![EMPTY; self.entries.len() * 2];
        let old = std::mem::replace(&mut self.entries, bigger);
        self.shift -= 1;
        let mask = self.entries.len() - 1;
        for entry in old.into_iter().filter(|entry| entry.address != 0) {
            let mut at = self.home(entry.address) & mask;
            while self.entries[at].address != 0 {
                at = (at + 1) & mask;
            }
            self.entries[at] = entry;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn agrees_with_a_map_over_a_random_run() {
        let (mut table, mut map) = (Table::new(), HashMap::new());
        let mut x = 88172645463325252u64;
        for step in 0..200_000u32 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            let address = 0x7f00_0000_0000 + (x % 5000) * 512;
            if let std::collections::hash_map::Entry::Vacant(e) = map.entry(address) {
                e.insert(step);
                table.insert(address, step);
            } else if x & 1 << 40 == 0 {
                assert_eq!(table.remove(address), map.remove(&address).unwrap());
            } else {
                assert_eq!(table.get(address), map[&address]);
            }
            assert_eq!(table.len(), map.len());
        }
        assert_eq!(table.get(512), NONE);
        assert_eq!(table.remove(512), NONE);
    }
}
