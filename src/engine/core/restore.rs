//! Restoring a private arena's live blocks at given addresses, so that it has the state of an earlier moment.

use super::block::{Block, BlockId, BlockState};
use super::counters::Origin;
use super::gpu::Gpu;
use super::ids::ArenaId;
use super::inspect::BlockInfo;
use super::pool::Pool;

/// The address of a block that cannot be allocated there: the memory is live, pending, or not the arena's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupied(pub u64);

impl<G: Gpu> Pool<G> {
    /// The live blocks of one arena.
    pub fn blocks_of(&self, arena: ArenaId) -> impl Iterator<Item = BlockInfo> {
        let of_arena = move |it: &&Block| self.lists.get(it.list).arena == arena;
        self.live_blocks()
            .filter(of_arena)
            .map(|block| self.info_of(block))
    }

    /// Allocates blocks at these very addresses of an arena, all or none. It matters not which stream freed
    /// them: a captured graph that is replayed writes to its addresses anyway.
    pub fn allocate_at(&mut self, blocks: &[BlockInfo], arena: ArenaId) -> Result<(), Occupied> {
        let mut free_blocks: Vec<BlockId> = self
            .blocks
            .iter()
            .filter(|(_, it)| {
                it.state == BlockState::Free && self.lists.get(it.list).arena == arena
            })
            .map(|(id, _)| id)
            .collect();
        free_blocks.sort_unstable_by_key(|id| self.blocks[*id].address);
        let mut blocks = blocks.to_vec();
        blocks.sort_unstable_by_key(|block| block.start);
        let mut found = Vec::with_capacity(blocks.len());
        let mut free_from = 0;
        for block in &blocks {
            let unavailable = Occupied(block.start);
            let after = free_blocks.partition_point(|id| self.blocks[*id].address <= block.start);
            let free_block = *after
                .checked_sub(1)
                .and_then(|at| free_blocks.get(at))
                .ok_or(unavailable)?;
            let end = block.start.checked_add(block.size).ok_or(unavailable)?;
            if block.size == 0 || block.start < free_from || end > self.blocks[free_block].end() {
                return Err(unavailable);
            }
            free_from = end;
            found.push(free_block);
        }
        for (at, (block, free_block)) in blocks.iter().zip(found).enumerate() {
            let Some(list) = self.lists.find_or_add(block.stream, arena) else {
                // There are too many streams. The blocks before were just allocated, so that they can be
                // freed.
                for allocated in &blocks[..at] {
                    let _ = self.free(allocated.start);
                }
                return Err(Occupied(block.start));
            };
            self.carve(free_block, block, list);
        }
        Ok(())
    }

    /// Splits a block out of the free block around it, and marks it live. What is left behind it keeps the
    /// free block's node.
    fn carve(&mut self, free_block: BlockId, block: &BlockInfo, list: u16) {
        let Block {
            address,
            size,
            detail: freed,
            list: owner,
            ..
        } = self.blocks[free_block];
        self.lists
            .get_mut(owner)
            .remove(&mut self.blocks, free_block);
        self.counters.free_block_removed(size);
        let before = block.start - address;
        if before > 0 {
            let front = self
                .blocks
                .split_front(free_block, before, owner, BlockState::Free);
            self.reinsert_rest(front, freed);
        }
        let mut id = free_block;
        if self.blocks[free_block].size > block.size {
            id = self
                .blocks
                .split_front(free_block, block.size, list, BlockState::Live);
            self.reinsert_rest(free_block, freed);
        }
        let arena = self.lists.get(list).arena;
        self.mark_live(id, block.requested, list, arena, Origin::Allocator);
    }

    /// Inserts a part of a free block that was split, with the epoch that it had, and does not coalesce it.
    pub(super) fn reinsert_rest(&mut self, id: BlockId, freed: u64) {
        self.blocks[id].detail = freed;
        let Block { size, list, .. } = self.blocks[id];
        self.lists.get_mut(list).insert(&mut self.blocks, id);
        self.counters.free_block_added(size);
    }
}
