//! From an address to the block that starts there: a hash whose buckets hold the first of a chain of
//! blocks each, linked through their nodes. There are at least four times as many buckets as blocks, so
//! nearly all chains are one long, and what is looked up has its node read anyway: look-up, insertion and
//! removal touch one cache line besides it, and whether a chain goes on is predicted well.
//!
//! The table grows by one bucket at a time (linear hashing): the chain of one bucket is divided among
//! that and the new one. So no insertion takes longer because there are many blocks.
//!
//! What grows with them is the wait for memory. No cache holds the nodes and buckets of a million blocks, and
//! a pair that hits four cold lines one after the other takes some five times as long as with a hundred: the
//! bucket of the block freed and its node (half of all the time), its neighbours' nodes (an eighth), the bucket
//! of the block handed out. One cold line took 200 ns when the whole pair took 150 with a hundred (EPYC 7003,
//! a virtual machine, huge pages). The look-up alone, a bucket and then its node in a loop that does nothing
//! else, went from 10 to 120 ns, and no allocator that knows its blocks by their addresses does without. To
//! fetch the neighbours previous they are needed, to insert later, or half the buckets made no difference.

use crate::core::block::{BlockId, NODES, NONE, Nodes};
use crate::util::zeroed::{Zeroable, Zeroed};
use std::ops::{Index, IndexMut};

/// Buckets for each block.
const SPARE: usize = 4;

/// As many as there can be: 512 MiB of them, of which the system gives what is used.
const BUCKETS: usize = SPARE * NODES;

struct Buckets([BlockId; BUCKETS]);

// SAFETY: of names, zero is `NONE`.
#[allow(unsafe_code)]
unsafe impl Zeroable for Buckets {}

impl Index<usize> for Buckets {
    type Output = BlockId;
    #[inline(always)]
    fn index(&self, at: usize) -> &BlockId {
        // The remainder, which changes nothing, spares a check.
        &self.0[at % BUCKETS]
    }
}

impl IndexMut<usize> for Buckets {
    #[inline(always)]
    fn index_mut(&mut self, at: usize) -> &mut BlockId {
        &mut self.0[at % BUCKETS]
    }
}

/// Maps the addresses of blocks handed out to their blocks.
pub struct AddressMap {
    buckets: Zeroed<Buckets>,
    /// How many are used: from `half` to less than twice as many.
    used: usize,
    /// A power of two. The first buckets, up to the number of those beyond it, have been divided.
    half: usize,
    count: usize,
}

/// Where a block was found.
#[derive(Clone, Copy)]
pub struct MapIndex {
    bucket: usize,
    /// The block previous it in its bucket.
    previous: BlockId,
}

impl AddressMap {
    /// `None` where the process may not have the addresses for it.
    pub fn new() -> Option<Self> {
        let half = 256;
        Some(AddressMap {
            buckets: Zeroed::new()?,
            used: half,
            half,
            count: 0,
        })
    }

    /// Bytes of its buckets, in use or not.
    pub fn bytes(&self) -> usize {
        self.used * size_of::<BlockId>()
    }

    pub fn len(&self) -> usize {
        self.count
    }

    /// Fibonacci hashing of the address in blocks, so that neighbours spread.
    #[inline(always)]
    fn bucket(&self, address: u64) -> usize {
        let hash = (address / crate::core::BLOCK).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        let bucket = hash as usize & (self.half * 2 - 1);
        if bucket < self.used {
            bucket
        } else {
            bucket - self.half
        }
    }

    /// The block in use that starts at `address`, and where it was found.
    #[inline(always)]
    pub fn find(&self, nodes: &Nodes, address: u64) -> Option<(BlockId, MapIndex)> {
        let bucket = self.bucket(address);
        let (mut previous, mut id) = (NONE, self.buckets[bucket]);
        while id != NONE {
            if nodes[id].address == address {
                return Some((id, MapIndex { bucket, previous }));
            }
            (previous, id) = (id, nodes[id].chain);
        }
        None
    }

    /// The block alone, or `NONE`.
    pub fn get(&self, nodes: &Nodes, address: u64) -> BlockId {
        self.find(nodes, address).map_or(NONE, |(id, _)| id)
    }

    #[inline(always)]
    pub fn insert(&mut self, nodes: &mut Nodes, id: BlockId) {
        self.count += 1;
        while self.count * SPARE > self.used {
            self.grow(nodes);
        }
        self.link(nodes, id);
    }

    #[inline(always)]
    fn link(&mut self, nodes: &mut Nodes, id: BlockId) {
        let node = &mut nodes[id];
        let bucket = self.bucket(node.address);
        node.chain = std::mem::replace(&mut self.buckets[bucket], id);
    }

    /// Removes a block that was found in this map_index since the address map was last changed.
    #[inline(always)]
    pub fn remove(&mut self, nodes: &mut Nodes, id: BlockId, map_index: MapIndex) {
        let after = nodes[id].chain;
        self.count -= 1;
        let link = match map_index.previous {
            NONE => &mut self.buckets[map_index.bucket],
            previous => &mut nodes[previous].chain,
        };
        debug_assert_eq!(*link, id);
        *link = after;
    }

    /// One bucket more.
    #[cold]
    #[inline(never)]
    fn grow(&mut self, nodes: &mut Nodes) {
        let divided = self.used - self.half;
        self.used += 1;
        let mut id = std::mem::replace(&mut self.buckets[divided], NONE);
        while id != NONE {
            let next = nodes[id].chain;
            self.link(nodes, id);
            id = next;
        }
        if self.used == self.half * 2 {
            self.half *= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::block::{BlockState, Blocks};
    use std::collections::HashMap;

    #[test]
    fn agrees_with_a_map_over_a_random_run() {
        let (mut address_map, mut map) = (AddressMap::new().expect("addresses"), HashMap::new());
        let mut blocks = Blocks::new().expect("addresses");
        let mut x = 88172645463325252u64;
        for _ in 0..200_000 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            let address = 0x7f00_0000_0000 + (x % 5000) * 512;
            if let std::collections::hash_map::Entry::Vacant(e) = map.entry(address) {
                let id = blocks.add(address, 512, 0, BlockState::Live);
                e.insert(id);
                address_map.insert(&mut blocks, id);
            } else if x & 1 << 40 == 0 {
                let id = map.remove(&address).unwrap();
                let (found, map_index) = address_map.find(&blocks, address).expect("the block");
                assert_eq!(found, id);
                address_map.remove(&mut blocks, id, map_index);
                blocks.remove(id);
            } else {
                assert_eq!(address_map.get(&blocks, address), map[&address]);
            }
            assert_eq!(address_map.len(), map.len());
        }
        assert_eq!(address_map.get(&blocks, 512), NONE);
        assert_eq!(address_map.get(&blocks, 0), NONE);
    }
}
