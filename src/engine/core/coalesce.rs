//! Splitting free blocks, and coalescing them with their neighbours.
//!
//! A free block is coalesced with a neighbour of the same stream, or with an idle one; never with another
//! stream's, as neither stream could use the result without waiting for the other.

use super::block::{Block, BlockId, BlockState, Blocks, Flags, Nodes, absorb_next};
use super::counters::Counters;
use super::stream_lists::FreeLists;

/// Makes a node a free block of this list with this epoch, coalesced with its neighbours.
#[inline(always)]
pub(super) fn coalesce(
    blocks: &mut Blocks,
    lists: &mut FreeLists,
    counters: &mut Counters,
    tail: &mut BlockId,
    idle: u16,
    (mut id, mut list, mut epoch): (BlockId, u16, u64),
) {
    let (nodes, vacant) = blocks.parts();
    // Read before anything is written: both branches are as good as random, and resolve sooner so.
    let is_free = |at: BlockId| nodes[at].state == BlockState::Free;
    let (prev, next) = (nodes[id].prev, nodes[id].next);
    let (prev_free, next_free) = (is_free(prev), is_free(next));
    // A neighbour's list, and the list and epoch of the two coalesced, if they may be.
    let merged = |nodes: &Nodes, at: BlockId, own: (u16, u64)| {
        let beside = &nodes[at];
        Some((
            beside.list,
            merged_owner(own, (beside.list, beside.detail), idle)?,
        ))
    };
    let (size, mut beside) = (nodes[id].size, 0);
    if prev_free && let Some((other, both)) = merged(nodes, prev, (list, epoch)) {
        (list, epoch) = both;
        lists.get_mut(other).remove(nodes, prev);
        beside += 1;
        absorb_next(nodes, vacant, prev, tail);
        id = prev;
    }
    if next_free && let Some((other, both)) = merged(nodes, next, (list, epoch)) {
        (list, epoch) = both;
        lists.get_mut(other).remove(nodes, next);
        beside += 1;
        absorb_next(nodes, vacant, id, tail);
    }
    counters.free_block_coalesced(size, beside);
    let free_block = &mut nodes[id];
    free_block.state = BlockState::Free;
    free_block.list = list;
    free_block.detail = epoch;
    free_block.flags = Flags::NONE;
    lists.get_mut(list).insert(nodes, id);
}

/// Whether more whole granules stay free if a block is split off the high end of a free block than off the
/// low end. Only whole free chunks can be remapped, and chunks begin and end on granules.
#[inline(always)]
pub(super) fn splits_better_high(free_block: &Block, size: u64, granularity: u64) -> bool {
    if granularity == 0 {
        return false;
    }
    // A power of two: the device's granularity is checked to be one.
    let shift = granularity.trailing_zeros();
    let whole =
        |start: u64, end: u64| (end >> shift).saturating_sub((start + granularity - 1) >> shift);
    whole(free_block.address, free_block.end() - size)
        > whole(free_block.address + size, free_block.end())
}

/// The list and epoch of two free blocks coalesced, from those of each; `None` where they are of two streams.
#[inline(always)]
pub(super) fn merged_owner(a: (u16, u64), b: (u16, u64), idle: u16) -> Option<(u16, u64)> {
    match (a.0, b.0) {
        // An odd epoch: no single event covers both frees.
        (x, y) if x == y => Some((x, a.1.max(b.1) | 1)),
        (x, _) if x == idle => Some(b),
        (_, y) if y == idle => Some(a),
        _ => None,
    }
}
