//! Blocks put back where they were, so that a private pool has the state of an earlier moment again.

use super::arena::GroupId;
use super::block::{Block, BlockId, State};
use super::counters::Origin;
use super::gpu::Gpu;
use super::inspect::Found;
use super::pool::Pool;

/// The address of a block that cannot be put there: the memory is in use, still used by other streams
/// after it was freed, or not the group's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unplaced(pub u64);

impl<G: Gpu> Pool<G> {
    /// Every block in use of one group.
    pub fn blocks_of(&self, group: GroupId) -> impl Iterator<Item = Found> {
        let of_group = move |it: &&Block| self.slots.get(it.slot).group == group;
        self.live_blocks()
            .filter(of_group)
            .map(|block| self.found(block))
    }

    /// Takes memory of a group that is free at these very places, all blocks or none. Whoever freed it:
    /// a captured graph that is replayed writes to its addresses without asking.
    pub fn place(&mut self, blocks: &[Found], group: GroupId) -> Result<(), Unplaced> {
        let mut holes: Vec<BlockId> = self
            .blocks
            .iter()
            .filter(|(_, it)| it.state == State::Free && self.slots.get(it.slot).group == group)
            .map(|(id, _)| id)
            .collect();
        holes.sort_unstable_by_key(|id| self.blocks[*id].address);
        let mut blocks = blocks.to_vec();
        blocks.sort_unstable_by_key(|block| block.start);
        let mut found = Vec::with_capacity(blocks.len());
        let mut free_from = 0;
        for block in &blocks {
            let unplaced = Unplaced(block.start);
            let after = holes.partition_point(|id| self.blocks[*id].address <= block.start);
            let hole = *after
                .checked_sub(1)
                .and_then(|at| holes.get(at))
                .ok_or(unplaced)?;
            let end = block.start.checked_add(block.size).ok_or(unplaced)?;
            if block.size == 0 || block.start < free_from || end > self.blocks[hole].end() {
                return Err(unplaced);
            }
            free_from = end;
            found.push(hole);
        }
        for (at, (block, hole)) in blocks.iter().zip(found).enumerate() {
            let Some(slot) = self.slots.of(block.stream, group) else {
                // More streams than there is room for. They were placed just now, and are known.
                for placed in &blocks[..at] {
                    let _ = self.free(placed.start);
                }
                return Err(Unplaced(block.start));
            };
            self.carve(hole, block, slot);
        }
        Ok(())
    }

    /// Cuts a block out of a hole around it. What is left of the hole behind the block keeps the hole's
    /// node.
    fn carve(&mut self, hole: BlockId, block: &Found, slot: u16) {
        let Block {
            address,
            size,
            detail: freed,
            slot: owner,
            ..
        } = self.blocks[hole];
        self.slots.get_mut(owner).remove(&mut self.blocks, hole);
        self.counters.hole_removed(size);
        let before = block.start - address;
        if before > 0 {
            let front = self.blocks.split_front(hole, before, owner, State::Free);
            self.put_back(front, freed);
        }
        let mut id = hole;
        if self.blocks[hole].size > block.size {
            id = self.blocks.split_front(hole, block.size, slot, State::Live);
            self.put_back(hole, freed);
        }
        let group = self.slots.get(slot).group;
        self.begin_use(id, block.requested, slot, group, Origin::Allocator);
    }

    /// A piece of a hole is a hole as that was.
    pub(super) fn put_back(&mut self, id: BlockId, freed: u64) {
        self.blocks[id].detail = freed;
        let Block { size, slot, .. } = self.blocks[id];
        self.slots.get_mut(slot).insert(&mut self.blocks, id);
        self.counters.hole_added(size);
    }
}
