//! Chunks: physical memory, where each is mapped, and the stale mappings of remapped ones.

use super::ids::{Handle, StreamKey};
use std::collections::VecDeque;

/// An index into [`Chunks`].
pub type ChunkId = u32;

const NO_CHUNK: ChunkId = u32::MAX;

/// One chunk of physical memory.
#[derive(Clone, Copy)]
pub struct Chunk {
    pub handle: Handle,
    pub size: u64,
    /// Where it is mapped and split into blocks.
    pub address: u64,
    /// How many stale mappings of it there are.
    pub stale: u32,
}

/// A stale mapping: what is left where a chunk was before it was remapped. No block uses it; it can be
/// unmapped once the stream has completed its work up to the free of epoch `until`.
#[derive(Clone, Copy)]
pub struct StaleMapping {
    pub chunk: ChunkId,
    pub address: u64,
    pub stream: StreamKey,
    pub until: u64,
}

/// Which chunk is mapped at each granule of one reserved range.
struct Range {
    start: u64,
    granules: Vec<ChunkId>,
}

/// An arena's chunks.
pub struct Chunks {
    granularity: u64,
    all: Vec<Chunk>,
    vacant: Vec<ChunkId>,
    ranges: Vec<Range>,
    /// Stale mappings, the oldest first.
    pub stale: VecDeque<StaleMapping>,
    count: usize,
}

impl Chunks {
    pub fn new(granularity: u64) -> Self {
        Chunks {
            granularity: granularity.max(1),
            all: Vec::new(),
            vacant: Vec::new(),
            ranges: Vec::new(),
            stale: VecDeque::new(),
            count: 0,
        }
    }

    /// Adds a reserved range of addresses.
    pub fn add_range(&mut self, start: u64, size: u64) {
        let granules = vec![NO_CHUNK; (size / self.granularity) as usize];
        self.ranges.push(Range { start, granules });
    }

    /// How many chunks there are.
    pub fn len(&self) -> usize {
        self.count
    }

    pub fn get(&self, id: ChunkId) -> &Chunk {
        &self.all[id as usize]
    }

    pub fn get_mut(&mut self, id: ChunkId) -> &mut Chunk {
        &mut self.all[id as usize]
    }

    /// Every chunk.
    pub fn iter(&self) -> impl Iterator<Item = &Chunk> {
        self.all.iter().filter(|chunk| chunk.size != 0)
    }

    /// Adds a chunk that is mapped at `address`.
    pub fn add(&mut self, handle: Handle, size: u64, address: u64) -> ChunkId {
        let chunk = Chunk {
            handle,
            size,
            address,
            stale: 0,
        };
        let id = match self.vacant.pop() {
            Some(id) => {
                self.all[id as usize] = chunk;
                id
            }
            None => {
                self.all.push(chunk);
                (self.all.len() - 1) as ChunkId
            }
        };
        self.count += 1;
        self.index(address, size, id);
        id
    }

    /// The chunk was remapped to another address.
    pub fn set_address(&mut self, id: ChunkId, address: u64) {
        let Chunk {
            address: old, size, ..
        } = self.all[id as usize];
        self.index(old, size, NO_CHUNK);
        self.index(address, size, id);
        self.all[id as usize].address = address;
    }

    /// The chunk was given back.
    pub fn remove(&mut self, id: ChunkId) {
        let Chunk { address, size, .. } = self.all[id as usize];
        self.index(address, size, NO_CHUNK);
        self.all[id as usize].size = 0;
        self.vacant.push(id);
        self.count -= 1;
    }

    /// Sets which chunk is mapped at these granules.
    fn index(&mut self, address: u64, size: u64, id: ChunkId) {
        let granularity = self.granularity;
        if let Some(range) = self.ranges.iter_mut().find(|range| {
            (range.start..range.start + range.granules.len() as u64 * granularity)
                .contains(&address)
        }) {
            let first = ((address - range.start) / granularity) as usize;
            range.granules[first..first + (size / granularity) as usize].fill(id);
        }
    }

    /// The chunk that is mapped around `address`.
    pub fn at(&self, address: u64) -> Option<ChunkId> {
        self.ranges.iter().find_map(|range| {
            let granule = address.checked_sub(range.start)? / self.granularity;
            let id = *range.granules.get(granule as usize)?;
            (id != NO_CHUNK).then_some(id)
        })
    }

    /// The chunks that lie wholly inside `start..end`, in address order.
    pub fn within(&self, start: u64, end: u64) -> impl Iterator<Item = ChunkId> + '_ {
        let mut at = start;
        std::iter::from_fn(move || {
            while at < end {
                let id = self.at(at)?;
                let chunk = &self.all[id as usize];
                let (from, to) = (chunk.address, chunk.address + chunk.size);
                at = to;
                if from >= start && to <= end {
                    return Some(id);
                }
            }
            None
        })
    }
}
