//! Looking up what lies around an address: a live block, an allocation, the chunks behind it.

use super::block::{Block, BlockState, NONE};
use super::gpu::Gpu;
use super::ids::{ArenaId, SHARED_ARENA, StreamKey};
use super::pool::Pool;
use std::collections::HashMap;

/// A live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInfo {
    /// Where it starts.
    pub start: u64,
    /// Its size in bytes.
    pub size: u64,
    /// The requested bytes.
    pub requested: u64,
    /// The stream that it was allocated on.
    pub stream: StreamKey,
}

/// What a program that asks about an address is told is one allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// A live block; in a private arena the whole run of mapped memory around it, live or not.
    pub found: BlockInfo,
    /// It is in a private arena.
    pub private: bool,
    /// It is in a plain segment, which is one allocation to the driver.
    pub plain: bool,
}

/// The memory that a live block lies in, as the driver knows it. None of it is remapped or given back while
/// the block is live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// Where the first part starts.
    pub start: u64,
    /// Contiguous chunks, by handle and size in bytes; or one plain segment, by address and size.
    pub parts: Vec<(u64, u64)>,
    /// The parts are chunks.
    pub mapped: bool,
}

impl Backing {
    /// Bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|(_, size)| size).sum()
    }
}

impl<G: Gpu> Pool<G> {
    /// The live block around `address`. Fast for a block's first byte; else walks all blocks.
    pub fn block_around(&self, address: u64) -> Option<BlockInfo> {
        self.live_around(address).map(|block| self.info_of(block))
    }

    fn live_around(&self, address: u64) -> Option<&Block> {
        match self.address_map.get(&self.blocks, address) {
            NONE => self
                .live_blocks()
                .find(|it| (it.address..it.end()).contains(&address)),
            start => Some(&self.blocks[start]),
        }
    }

    /// The allocation around an address. In a private arena that is a whole run of mapped memory, which does
    /// not change while a graph uses it, freed or not. `None` for supplied memory, which its supplier knows.
    /// Fast for the first byte of a live block; else walks all blocks.
    pub fn allocation_around(&self, address: u64) -> Option<Allocation> {
        let arena_of = |block: &Block| self.lists.get(block.list).arena;
        let is_own = |block: &Block| !self.arenas[arena_of(block) as usize].supplied;
        let first = match self.address_map.get(&self.blocks, address) {
            NONE => None,
            start => Some(&self.blocks[start]).filter(|it| is_own(it)),
        };
        let block = first.or_else(|| {
            let blocks = self.blocks.iter().map(|(_, block)| block);
            blocks
                .filter(|it| it.state == BlockState::Live || arena_of(it) != SHARED_ARENA)
                .find(|it| (it.address..it.end()).contains(&address) && is_own(it))
        })?;
        let private = arena_of(block) != SHARED_ARENA;
        let plain = self.is_plain_arena(arena_of(block));
        let mut found = self.info_of(block);
        if private && !plain {
            let first = self.first_of_run(block);
            let mut last = first;
            while last.next != NONE {
                last = &self.blocks[last.next];
            }
            found.start = first.address;
            found.size = last.end() - first.address;
            found.requested = found.size;
        }
        Some(Allocation {
            found,
            private,
            plain,
        })
    }

    fn first_of_run<'a>(&'a self, mut block: &'a Block) -> &'a Block {
        while block.prev != NONE {
            block = &self.blocks[block.prev];
        }
        block
    }

    pub(super) fn info_of(&self, block: &Block) -> BlockInfo {
        BlockInfo {
            start: block.address,
            size: block.size,
            requested: block.detail,
            stream: self.lists.get(block.list).key,
        }
    }

    /// The memory behind the live block around `address`.
    pub fn backing(&self, address: u64) -> Option<Backing> {
        let block = self.live_around(address)?;
        let id = self.lists.get(block.list).arena;
        let arena = &self.arenas[id as usize];
        if self.is_plain_arena(id) {
            let first = self.first_of_run(block);
            let size = *arena.segments.get(&first.address)?;
            return Some(Backing {
                start: first.address,
                parts: vec![(first.address, size)],
                mapped: false,
            });
        }
        self.chunks_behind(id, block.address, block.end())
    }

    /// The memory behind a private arena's allocation ([`Pool::allocation_around`]), where it is mapped.
    pub fn backing_of_run(&self, address: u64) -> Option<Backing> {
        let blocks = self.blocks.iter().map(|(_, block)| block);
        let mut blocks = blocks.filter(|it| {
            let arena = self.lists.get(it.list).arena;
            arena != SHARED_ARENA && !self.is_plain_arena(arena)
        });
        let block = blocks.find(|it| (it.address..it.end()).contains(&address))?;
        let run = self.allocation_around(block.address)?.found;
        let id = self.lists.get(block.list).arena;
        self.chunks_behind(id, run.start, run.start + run.size)
    }

    /// The chunks behind a mapped range of an arena.
    fn chunks_behind(&self, id: ArenaId, from: u64, to: u64) -> Option<Backing> {
        let chunks = &self.arenas[id as usize].chunks;
        let chunk = |address| Some(chunks.get(chunks.at(address)?));
        let (start, mut end) = (chunk(from)?.address, from);
        let mut parts = Vec::new();
        while end < to {
            let chunk = chunk(end)?;
            parts.push((chunk.handle, chunk.size));
            end = chunk.address + chunk.size;
        }
        Some(Backing {
            start,
            parts,
            mapped: true,
        })
    }

    /// Where each chunk is mapped, by its handle.
    pub fn chunk_addresses(&self) -> HashMap<u64, u64> {
        let chunks = self.arenas.iter().flat_map(|arena| arena.chunks.iter());
        chunks.map(|chunk| (chunk.handle, chunk.address)).collect()
    }

    /// Whether all memory is plain segments, each one allocation to the driver.
    pub fn is_plain(&self) -> bool {
        self.granularity == 0
    }

    /// Whether the address is the pool's memory, live or not. Walks all blocks.
    pub fn holds(&self, address: u64) -> bool {
        let mut blocks = self.blocks.iter().map(|(_, block)| block);
        blocks.any(|block| (block.address..block.end()).contains(&address))
    }

    /// All live blocks.
    pub fn blocks_in_use(&self) -> impl Iterator<Item = BlockInfo> {
        self.live_blocks().map(|block| self.info_of(block))
    }

    pub(super) fn live_blocks(&self) -> impl Iterator<Item = &Block> {
        let blocks = self.blocks.iter().map(|(_, block)| block);
        blocks.filter(|block| block.state == BlockState::Live)
    }
}
