//! Free blocks by size, for one list: exact best fit in few steps.
//!
//! There are 128 bins per power of two, and a two-level bitmap of those that are not empty. A bin links the
//! first blocks of its distinct sizes in ascending order, and each of those the other blocks of its size.
//! Below 128 KiB a bin has one size; above, few sizes are in use at once, so that the walk inside a bin is
//! short.

use crate::core::BLOCK;
use crate::core::block::{Block, BlockId, Blocks, NONE, Nodes};
use std::hint::select_unpredictable;

const STEPS: u64 = 128;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// 128 bins of one size, then 128 for each power of two up to twice [`crate::core::LARGEST_REQUEST`].
const BINS: usize = STEPS as usize * 32;
const WORDS: usize = BINS / 64;

/// The free blocks of a list by size.
pub struct Bins {
    /// Which words of `words` are not 0.
    summary: u64,
    words: [u64; WORDS],
    heads: [BlockId; BINS],
}

#[inline(always)]
fn bin_of(size: u64) -> usize {
    let units = size / BLOCK;
    // 0 for bins of one size.
    let power = 63 - STEP_BITS - (units | STEPS).leading_zeros();
    (STEPS as usize) * power as usize + (units >> power) as usize
}

/// Walks a bin's sizes: the last that is smaller than `size`, and the first that is not; `NONE` where there
/// is none.
///
/// Most bins have one size or none, and which is as good as random: the first step is branch-free, as a
/// branch would be mispredicted every other time.
#[inline(always)]
fn larger(nodes: &Nodes, first: BlockId, size: u64) -> (BlockId, BlockId) {
    let head = &nodes[first];
    let (mut less, mut at) = match head.size < size {
        true => (first, head.more),
        false => (NONE, first),
    };
    while nodes[at].size < size {
        less = at;
        at = nodes[at].more;
    }
    (less, at)
}

impl Default for Bins {
    fn default() -> Self {
        Bins::new()
    }
}

impl Bins {
    pub fn new() -> Self {
        Bins {
            summary: 0,
            words: [0; WORDS],
            heads: [NONE; BINS],
        }
    }

    pub fn is_empty(&self) -> bool {
        self.summary == 0
    }

    /// The smallest block of at least `size` bytes, or `NONE`.
    #[inline(always)]
    pub fn best_fit(&self, nodes: &Nodes, size: u64) -> BlockId {
        let bin = bin_of(size);
        let at = larger(nodes, self.heads[bin], size).1;
        // Looked up in any case, as a branch would not be predicted.
        let beyond = self.heads[self.next_bin(bin + 1)];
        if at != NONE { at } else { beyond }
    }

    /// The first bin from here on that is not empty, or the last of all, which always is empty.
    #[inline(always)]
    fn next_bin(&self, from: usize) -> usize {
        let word = from / 64;
        let here = self.words[word] & (!0 << (from % 64));
        // There are as many words as bits in the summary.
        let later = (self.summary & (!1 << word)).trailing_zeros() as usize;
        let later = later.min(WORDS - 1);
        let (word, bits) = match here {
            0 => (later, self.words[later]),
            _ => (word, here),
        };
        word * 64 + (bits.trailing_zeros() as usize).min(63)
    }

    /// Inserts a free block. Branch-free, as is `remove`, but for the summary: whether a size is there
    /// already, how often and where is as good as random. Stores that do not apply go to the sentinel.
    #[inline(always)]
    pub fn insert(&mut self, nodes: &mut Nodes, id: BlockId) {
        let (size, address) = (nodes[id].size, nodes[id].address);
        let bin = bin_of(size);
        let (less, at) = larger(nodes, self.heads[bin], size);
        let first = &nodes[at];
        let known = first.size == size;
        // The first of a size has the lowest address; the others are in no order.
        let behind = known & (address >= first.address);
        let (same, larger) = (first.same_next, first.more);
        let top = select_unpredictable(behind, at, id);
        let second = select_unpredictable(behind, id, select_unpredictable(known, at, NONE));
        let more = select_unpredictable(known, larger, at);

        (nodes[top].less, nodes[top].more) = (less, more);
        (nodes[top].same_prev, nodes[top].same_next) = (NONE, second);
        (nodes[second].less, nodes[second].more) = (NONE, NONE);
        (nodes[second].same_prev, nodes[second].same_next) = (top, same);
        nodes[select_unpredictable(known, same, NONE)].same_prev = second;
        nodes[less].more = top;
        nodes[more].less = top;
        let head = &mut self.heads[bin];
        *head = select_unpredictable(less == NONE, top, *head);
        let word = &mut self.words[bin / 64];
        if *word == 0 {
            self.summary |= 1 << (bin / 64);
        }
        *word |= 1 << (bin % 64);
    }

    /// Removes a free block.
    #[inline(always)]
    pub fn remove(&mut self, nodes: &mut Nodes, id: BlockId) {
        let &Block {
            size,
            same_prev,
            same_next,
            less,
            more,
            ..
        } = &nodes[id];
        let bin = bin_of(size);
        // If it is the first of its size, and not the only one, the next becomes the first.
        let has_next = same_next != NONE;
        let (above, below) = (
            select_unpredictable(has_next, same_next, more),
            select_unpredictable(has_next, same_next, less),
        );
        let next = &mut nodes[same_next];
        (next.less, next.more, next.same_prev) = (less, more, same_prev);
        nodes[same_prev].same_next = same_next;
        nodes[less].more = above;
        nodes[more].less = below;
        let is_head = (less == NONE) & (same_prev == NONE);
        let head = &mut self.heads[bin];
        *head = select_unpredictable(is_head, above, *head);
        let empty = u64::from(*head == NONE);
        let word = &mut self.words[bin / 64];
        *word &= !(empty << (bin % 64));
        if *word == 0 {
            self.summary &= !(1 << (bin / 64));
        }
    }

    /// The largest block, or `NONE`.
    pub fn largest(&self, blocks: &Blocks) -> BlockId {
        self.descending(blocks).next().unwrap_or(NONE)
    }

    /// Every block, the larger sizes first.
    pub fn descending<'a>(&'a self, blocks: &'a Blocks) -> impl Iterator<Item = BlockId> + 'a {
        self.bins().rev().flat_map(move |bin| {
            let mut last = self.heads[bin];
            while blocks[last].more != NONE {
                last = blocks[last].more;
            }
            chain(last, move |id| blocks[id].less)
                .flat_map(move |size| chain(size, move |id| blocks[id].same_next))
        })
    }

    /// Every block of at least `size` bytes, the smaller sizes first.
    pub fn ascending<'a>(
        &'a self,
        blocks: &'a Blocks,
        size: u64,
    ) -> impl Iterator<Item = BlockId> + 'a {
        let from = bin_of(size);
        self.bins()
            .filter(move |bin| *bin >= from)
            .flat_map(move |bin| {
                chain(self.heads[bin], move |id| blocks[id].more)
                    .flat_map(move |size| chain(size, move |id| blocks[id].same_next))
            })
            .filter(move |id| blocks[*id].size >= size)
    }

    /// Whether all links are mutual, and only the first block of each size is linked to other sizes.
    pub fn is_linked(&self, blocks: &Blocks) -> bool {
        self.bins().all(|bin| {
            let mut less = NONE;
            chain(self.heads[bin], |id| blocks[id].more).all(|top| {
                let before = std::mem::replace(&mut less, top);
                let mut same_prev = NONE;
                blocks[top].less == before
                    && chain(top, |id| blocks[id].same_next).all(|id| {
                        let before = std::mem::replace(&mut same_prev, id);
                        let block = &blocks[id];
                        let is_first = (block.less, block.more) == (NONE, NONE) || id == top;
                        block.same_prev == before && block.size == blocks[top].size && is_first
                    })
            })
        })
    }

    fn bins(&self) -> impl DoubleEndedIterator<Item = usize> + '_ {
        (0..WORDS)
            .filter(|word| self.words[*word] != 0)
            .flat_map(move |word| {
                (0..64)
                    .filter(move |bit| self.words[word] >> bit & 1 == 1)
                    .map(move |bit| word * 64 + bit)
            })
    }
}

/// The blocks from `first` on, as `next` links them.
fn chain(
    first: BlockId,
    next: impl Fn(BlockId) -> BlockId + Copy,
) -> impl Iterator<Item = BlockId> {
    std::iter::successors((first != NONE).then_some(first), move |id| {
        let next = next(*id);
        (next != NONE).then_some(next)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::block::BlockState;

    fn random() -> impl FnMut() -> u64 {
        let mut x = 88172645463325252u64;
        move || {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x
        }
    }

    #[test]
    fn bins_are_in_order_and_exact_where_promised() {
        let mut last = 0;
        for units in 1..1u64 << 20 {
            let bin = bin_of(units * BLOCK);
            assert!(bin == last || bin == last + 1, "{units}");
            assert!(units >= 256 || bin == units as usize);
            last = bin;
        }
        assert!(bin_of(2 * crate::core::LARGEST_REQUEST - BLOCK) < BINS);
    }

    #[test]
    fn agrees_with_a_sorted_set_over_a_random_run() {
        let (mut blocks, mut bins) = (Blocks::new().expect("addresses"), Bins::new());
        let mut set = std::collections::BTreeSet::new();
        let mut random = random();
        for step in 0..100_000u64 {
            let size = BLOCK * (1 + (random() % 400) * (1 << (random() % 12)));
            if random() % 100 < 45 {
                let id = blocks.add(step * (1 << 30), size, 0, BlockState::Free);
                bins.insert(&mut blocks, id);
                set.insert((size, id));
            } else {
                let best = bins.best_fit(&blocks, size);
                let want = set.range((size, NONE)..).next().map(|(size, _)| *size);
                assert_eq!((best != NONE).then(|| blocks[best].size), want);
                if best != NONE {
                    bins.remove(&mut blocks, best);
                    assert!(set.remove(&(blocks[best].size, best)));
                    blocks.remove(best);
                }
            }
        }
        assert!(!set.is_empty());
        let mut up: Vec<_> = bins
            .ascending(&blocks, BLOCK)
            .map(|id| blocks[id].size)
            .collect();
        assert_eq!(up, set.iter().map(|(size, _)| *size).collect::<Vec<_>>());
        up.reverse();
        assert_eq!(
            bins.descending(&blocks)
                .map(|id| blocks[id].size)
                .collect::<Vec<_>>(),
            up
        );
        for (_, id) in set {
            bins.remove(&mut blocks, id);
        }
        assert!(bins.is_empty());
    }

    #[test]
    fn blocks_of_few_sizes_come_and_go_in_any_order() {
        let (mut blocks, mut bins) = (Blocks::new().expect("addresses"), Bins::new());
        let mut inside = Vec::new();
        let mut random = random();
        for _ in 0..20_000 {
            if random() % 100 < 52 {
                // Several of a size, and several sizes in a bin.
                let size = BLOCK * (1000 + random() % 40);
                let id = blocks.add(random() % 1000 * (1 << 30), size, 0, BlockState::Free);
                bins.insert(&mut blocks, id);
                inside.push(id);
            } else if !inside.is_empty() {
                let id = inside.swap_remove(random() as usize % inside.len());
                bins.remove(&mut blocks, id);
                blocks.remove(id);
            }
            assert!(bins.is_linked(&blocks));
            assert!(blocks.is_sentinel_intact());
            assert_eq!(bins.ascending(&blocks, BLOCK).count(), inside.len());
        }
        assert!(inside.len() > 100);
    }
}
