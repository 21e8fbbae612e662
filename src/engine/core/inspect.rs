//! Looking a block up by any address inside it.

use super::arena::{ArenaId, SHARED_ARENA};
use super::block::{Block, BlockState, NONE};
use super::gpu::Gpu;
use super::pool::Pool;
use super::stream_lists::StreamKey;
use std::collections::HashMap;

/// A block in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInfo {
    /// Where it starts.
    pub start: u64,
    /// Its size in bytes.
    pub size: u64,
    /// The bytes that were asked for.
    pub requested: u64,
    /// The stream that it was allocated on.
    pub stream: StreamKey,
}

/// What a program is to take for one allocation when it asks about an address in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// A block in use; in a private pool all memory around it without a gap, used or not.
    pub found: BlockInfo,
    /// It is a private pool's.
    pub private: bool,
    /// It lies in a plain segment, which is one allocation to the driver.
    pub plain: bool,
}

/// The memory that a block in use lies in, as the driver knows it. Nothing of it moves or goes back as
/// long as the block is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// Where the first part begins.
    pub start: u64,
    /// Chunks by their handles, one behind the other, with their sizes in bytes; or one plain segment,
    /// by its address.
    pub parts: Vec<(u64, u64)>,
    /// They are chunks.
    pub mapped: bool,
}

impl Backing {
    /// Bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|(_, size)| size).sum()
    }
}

impl<G: Gpu> Pool<G> {
    /// The block in use that holds the byte at `address`. Quick for a block's first byte; looks at
    /// every block for another.
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

    /// The allocation around an address. In a private pool that is what does not change while a graph uses
    /// it, freed or not: mapped memory without a gap. What somebody else supplies is that one's to tell.
    /// Quick for the first byte of a block in use; looks at every block for another.
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

    /// The memory behind the block in use that holds the byte at `address`.
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

    /// The memory behind a private pool's allocation ([`Pool::allocation_around`]), which is mapped.
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

    /// The chunks that mapped memory of an arena lies in.
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

    /// Where each chunk is at home, by its handle.
    pub fn chunk_addresses(&self) -> HashMap<u64, u64> {
        let chunks = self.arenas.iter().flat_map(|arena| arena.chunks.iter());
        chunks.map(|chunk| (chunk.handle, chunk.address)).collect()
    }

    /// Whether memory comes in plain segments, each of them one allocation to the driver.
    pub fn is_plain(&self) -> bool {
        self.granularity == 0
    }

    /// Whether the byte at `address` is the pool's, in use or not. Looks at every block.
    pub fn holds(&self, address: u64) -> bool {
        let mut blocks = self.blocks.iter().map(|(_, block)| block);
        blocks.any(|block| (block.address..block.end()).contains(&address))
    }

    /// Every block in use.
    pub fn blocks_in_use(&self) -> impl Iterator<Item = BlockInfo> {
        self.live_blocks().map(|block| self.info_of(block))
    }

    pub(super) fn live_blocks(&self) -> impl Iterator<Item = &Block> {
        let blocks = self.blocks.iter().map(|(_, block)| block);
        blocks.filter(|block| block.state == BlockState::Live)
    }
}
