//! The address map: a hash table from an address to the live block that starts there.
//!
//! Each bucket is a chain of blocks that are linked through their nodes. There are at least four buckets a
//! block, so that nearly every chain has one block, and a look-up reads that block's node anyway: look-up,
//! insertion and removal touch one cache line besides it. The table grows by one bucket at a time (linear
//! hashing), so that no insertion takes longer because there are many blocks.
//!
//! With a million blocks no cache holds the nodes and buckets, and an allocation and a free take some five
//! times as long as with a hundred: they read four cold lines one after the other, and one costs 200 ns where
//! the pair takes 150 (EPYC 7003, a virtual machine, huge pages). Prefetching the neighbours, inserting
//! later, or half as many buckets made no difference.

use crate::core::block::{BlockId, NODES, NONE, Nodes};
use crate::util::zeroed::{Zeroable, Zeroed};
use std::ops::{Index, IndexMut};

/// Buckets for each block.
const SPARE: usize = 4;

/// The most buckets there can be: 512 MiB, of which the system commits what is used.
const BUCKETS: usize = SPARE * NODES;

struct Buckets([BlockId; BUCKETS]);

// SAFETY: a `BlockId` of zeros is `NONE`.
#[allow(unsafe_code)]
unsafe impl Zeroable for Buckets {}

impl Index<usize> for Buckets {
    type Output = BlockId;
    #[inline(always)]
    fn index(&self, at: usize) -> &BlockId {
        // Every index is in range; the remainder spares the check.
        &self.0[at % BUCKETS]
    }
}

impl IndexMut<usize> for Buckets {
    #[inline(always)]
    fn index_mut(&mut self, at: usize) -> &mut BlockId {
        &mut self.0[at % BUCKETS]
    }
}

/// Finds live blocks by address.
pub struct AddressMap {
    buckets: Zeroed<Buckets>,
    /// Buckets in use: `half` or more, less than twice as many.
    used: usize,
    /// A power of two. As many of the first buckets as there are beyond it have been split.
    half: usize,
    count: usize,
}

/// Where a block was found: its bucket and the block before it in the chain.
#[derive(Clone, Copy)]
pub struct MapIndex {
    bucket: usize,
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

    /// Bytes of the buckets in use.
    pub fn bytes(&self) -> usize {
        self.used * size_of::<BlockId>()
    }

    pub fn len(&self) -> usize {
        self.count
    }

    /// The bucket of an address: Fibonacci hashing of the address in blocks, so that neighbours spread.
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

    /// The live block that starts at `address`, and where it was found.
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

    /// The live block that starts at `address`, or `NONE`.
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

    /// Removes a block that was found here since the map last changed.
    #[inline(always)]
    pub fn remove(&mut self, nodes: &mut Nodes, id: BlockId, at: MapIndex) {
        let after = nodes[id].chain;
        self.count -= 1;
        let link = match at.previous {
            NONE => &mut self.buckets[at.bucket],
            previous => &mut nodes[previous].chain,
        };
        debug_assert_eq!(*link, id);
        *link = after;
    }

    /// Adds a bucket and splits the one whose addresses it shares.
    #[cold]
    #[inline(never)]
    fn grow(&mut self, nodes: &mut Nodes) {
        let split = self.used - self.half;
        self.used += 1;
        let mut id = std::mem::replace(&mut self.buckets[split], NONE);
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
