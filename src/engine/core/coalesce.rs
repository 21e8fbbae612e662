//! Splitting free blocks, and coalescing them with their neighbours.
//!
//! A free block is coalesced with a neighbour of the same stream, or with an idle one; never with another
//! stream's, as neither stream could use the result without waiting for the other.

use super::block::{Block, BlockId, BlockState, Blocks, Flags, NONE, Nodes, VACANT, absorb_next};
use super::counters::Counters;
use super::gpu::Gpu;
use super::pool::Pool;
use super::stream_lists::FreeLists;

impl<G: Gpu> Pool<G> {
    /// Splits `size` bytes off one end of a free block; the rest stays free. Returns a node that is in no
    /// list. `None` where there is no node left.
    #[inline(always)]
    pub(super) fn split_off(&mut self, free_block: BlockId, size: u64) -> Option<BlockId> {
        let Self {
            blocks,
            lists,
            counters,
            arenas,
            granularity,
            ..
        } = self;
        let owner = lists.get_mut(blocks[free_block].list);
        if blocks[free_block].size == size {
            counters.free_block_removed(size);
            owner.remove(blocks, free_block);
            return Some(free_block);
        }
        let id = blocks.new_node();
        if id == NONE {
            return None;
        }
        let nodes = &mut **blocks;
        // The rest keeps its node and its place in the order of frees.
        owner.bins.remove(nodes, free_block);
        let rest = &mut nodes[free_block];
        let mut block = Block { size, ..VACANT };
        counters.free_block_shrunk(size);
        let high = rest.size - size >= *granularity && splits_better_high(rest, size, *granularity);
        rest.size -= size;
        if high {
            block.address = rest.end();
            (block.prev, block.next) = (free_block, rest.next);
            rest.next = id;
            nodes[block.next].prev = id;
            let tail = &mut arenas[owner.arena as usize].tail;
            if *tail == free_block {
                *tail = id;
            }
        } else {
            block.address = rest.address;
            (block.prev, block.next) = (rest.prev, free_block);
            rest.address += size;
            rest.prev = id;
            nodes[block.prev].next = id;
        }
        nodes[id] = block;
        owner.bins.insert(nodes, free_block);
        Some(id)
    }

    /// Makes a node a free block of a list, freed at an epoch of its stream, and coalesces it.
    pub(super) fn add_free(&mut self, id: BlockId, list: u16, epoch: u64) {
        let owner = self.lists.get(list);
        let (tail, idle) = (&mut self.arenas[owner.arena as usize].tail, owner.idle);
        let (blocks, lists, counters) = (&mut self.blocks, &mut self.lists, &mut self.counters);
        coalesce(blocks, lists, counters, tail, idle, (id, list, epoch));
    }
}

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
fn splits_better_high(free_block: &Block, size: u64, granularity: u64) -> bool {
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
