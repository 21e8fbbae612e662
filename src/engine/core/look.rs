//! Looking a block up by any address inside it.

use super::block::State;
use super::gpu::Gpu;
use super::pool::Pool;
use super::stream::StreamKey;

/// A block in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Where it starts.
    pub start: u64,
    /// Its size in bytes.
    pub size: u64,
    /// The bytes that were asked for.
    pub requested: u64,
    /// The stream that it was allocated on.
    pub stream: StreamKey,
}

impl<G: Gpu> Pool<G> {
    /// The block in use that holds the byte at `address`. Quick for a block's first byte; looks at
    /// every block for another.
    pub fn block_around(&self, address: u64) -> Option<Found> {
        let start = self.table.get(&self.blocks, address);
        let found =
            match start {
                super::block::NONE => self.blocks.iter().map(|(_, block)| block).find(|it| {
                    it.state == State::Live && (it.address..it.end()).contains(&address)
                })?,
                start => &self.blocks[start],
            };
        Some(Found {
            start: found.address,
            size: found.size,
            requested: found.detail,
            stream: self.slots.get(found.slot).key,
        })
    }

    /// No other stream uses the block that starts at `address` any more.
    pub fn unshare(&mut self, address: u64) {
        let id = self.table.get(&self.blocks, address);
        if id != super::block::NONE {
            self.blocks[id].shared = false;
        }
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
    pub fn blocks_in_use(&self) -> impl Iterator<Item = Found> {
        let live = self.blocks.iter().map(|(_, block)| block);
        live.filter(|block| block.state == State::Live)
            .map(|block| Found {
                start: block.address,
                size: block.size,
                requested: block.detail,
                stream: self.slots.get(block.slot).key,
            })
    }
}
