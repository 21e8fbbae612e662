//! The depot: deferred frees of a device (`free:relaxed`) that are in no thread's magazine.
//!
//! Work on any stream may still use a deferred block. The depot collects them in batches, with one event of
//! the whole device behind each, because an event costs more than an allocation and a free. Once it has
//! completed, the blocks are allocated again for the same size. To the pool a deferred block is in use, and
//! marked as used by several streams.

use crate::core::{ALL_STREAMS, Class, Event, Gpu, LiveBlock, Origin, Pool};
use crate::device::driver_gpu::DriverGpu;
use crate::util::hash::fibonacci;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// Blocks behind one event, at most: in the depot and in each magazine.
pub const BATCH: usize = 128;

/// The number of no magazine; they count from 1.
pub const NO_MAGAZINE: u8 = 0;

/// The number of the magazine that tracks each block, by the block's index in the pool. Under the device's
/// lock.
#[derive(Default)]
pub struct Holders(Vec<u8>);

impl Holders {
    /// Sets the magazine that tracks a block.
    pub fn set(&mut self, live: &LiveBlock, number: u8) {
        if self.0.len() <= live.index() {
            self.0.resize(live.index() + 1, NO_MAGAZINE);
        }
        self.0[live.index()] = number;
    }

    /// The magazine that tracks a block; [`NO_MAGAZINE`] if none does.
    #[inline]
    pub fn of(&self, live: &LiveBlock) -> u8 {
        self.0.get(live.index()).copied().unwrap_or(NO_MAGAZINE)
    }
}

/// A block whose free is deferred, or will be.
#[derive(Clone, Copy)]
pub struct RelaxedBlock {
    pub address: u64,
    pub live: LiveBlock,
    size: u64,
}

impl RelaxedBlock {
    /// Of a block in use that was looked up after the pool last changed.
    pub fn new(address: u64, live: LiveBlock, pool: &Pool<DriverGpu>) -> Self {
        RelaxedBlock {
            address,
            live,
            // The pool's size: the setting that rounds sizes up may have changed since the allocation.
            size: pool.size_of(address).unwrap_or(live.requested),
        }
    }

    /// Bytes of the block.
    #[inline]
    pub fn size(&self) -> u64 {
        self.size
    }
}

#[derive(Default)]
struct Batch {
    blocks: Vec<RelaxedBlock>,
    bytes: u64,
}

/// Hashes sizes, by one multiplication.
#[derive(Default)]
struct SizeHasher(u64);

impl Hasher for SizeHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    #[inline]
    fn write_u64(&mut self, value: u64) {
        self.0 = fibonacci(self.0 ^ value).rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The deferred blocks of one device.
pub struct Depot {
    /// The most bytes behind one event, and the most that are ready.
    limit: u64,
    /// The latest frees, without an event yet.
    open: Batch,
    /// Closed batches, in the order of their events.
    waiting: VecDeque<(Event, Batch)>,
    /// Completed blocks by requested size.
    ready: HashMap<u64, Vec<RelaxedBlock>, BuildHasherDefault<SizeHasher>>,
    ready_bytes: u64,
    /// Bytes of all deferred blocks.
    bytes: u64,
    /// Which magazines track which of the other blocks.
    pub holders: Holders,
}

impl Depot {
    /// The depot of a device with `total` bytes of memory.
    pub fn new(total: u64) -> Self {
        Depot {
            limit: (total / 512).max(32 << 20),
            open: Batch::default(),
            waiting: VecDeque::new(),
            ready: HashMap::default(),
            ready_bytes: 0,
            bytes: 0,
            holders: Holders::default(),
        }
    }

    /// Bytes of all deferred blocks.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds a block that was looked up just now. False if it is deferred already.
    #[inline]
    pub fn put(&mut self, block: RelaxedBlock, pool: &mut Pool<DriverGpu>) -> bool {
        if !pool.mark_multi_stream(&block.live) {
            return false;
        }
        self.bytes += block.size();
        self.open.bytes += block.size();
        self.open.blocks.push(block);
        let full = self.open.blocks.len() >= BATCH || self.open.bytes >= self.limit / 2;
        if full && let Some(event) = pool.gpu_mut().record_event(ALL_STREAMS) {
            let batch = std::mem::take(&mut self.open);
            self.waiting.push_back((event, batch));
        }
        true
    }

    /// Adds blocks whose event has been recorded.
    pub fn add_waiting(
        &mut self,
        event: Event,
        blocks: Vec<RelaxedBlock>,
        pool: &mut Pool<DriverGpu>,
    ) {
        let bytes = self.mark_in_depot(&blocks, pool);
        self.waiting.push_back((event, Batch { blocks, bytes }));
    }

    /// Adds blocks that no work uses any more.
    pub fn add_ready(&mut self, blocks: Vec<RelaxedBlock>, pool: &mut Pool<DriverGpu>) {
        let bytes = self.mark_in_depot(&blocks, pool);
        self.make_ready(Batch { blocks, bytes }, pool);
    }

    /// Marks blocks as deferred, which they are not yet. Returns their bytes.
    fn mark_in_depot(&mut self, blocks: &[RelaxedBlock], pool: &mut Pool<DriverGpu>) -> u64 {
        for block in blocks {
            pool.mark_multi_stream(&block.live);
        }
        let bytes = blocks.iter().map(RelaxedBlock::size).sum();
        self.bytes += bytes;
        bytes
    }

    /// Allocates a block of exactly this size that no work uses any more.
    pub fn take(&mut self, requested: u64, pool: &mut Pool<DriverGpu>) -> Option<RelaxedBlock> {
        let mut found = self.pop(requested);
        // No more batches than needed: with too many bytes ready, all of them go to the pool.
        while found.is_none() && self.advance(pool) {
            found = self.pop(requested);
        }
        let block = found?;
        pool.clear_multi_stream(&block.live);
        let size = block.size();
        self.bytes -= size;
        self.ready_bytes -= size;
        let counters = pool.counters_mut();
        counters.recycled(Origin::Cuda, Class::of(size), 1, size, block.live.requested);
        Some(block)
    }

    fn pop(&mut self, requested: u64) -> Option<RelaxedBlock> {
        self.ready.get_mut(&requested)?.pop()
    }

    /// Makes the oldest batch ready if its event has completed. Returns whether it has.
    fn advance(&mut self, pool: &mut Pool<DriverGpu>) -> bool {
        let completed = |(event, _): &(Event, Batch)| pool.gpu_mut().has_completed(*event);
        if !self.waiting.front().is_some_and(completed) {
            return false;
        }
        let Some((event, batch)) = self.waiting.pop_front() else {
            return false;
        };
        pool.gpu_mut().release_event(event);
        self.make_ready(batch, pool);
        true
    }

    fn make_ready(&mut self, batch: Batch, pool: &mut Pool<DriverGpu>) {
        if self.ready_bytes + batch.bytes > self.limit {
            self.free_ready(pool);
        }
        self.ready_bytes += batch.bytes;
        for block in batch.blocks {
            self.ready
                .entry(block.live.requested)
                .or_default()
                .push(block);
        }
    }

    fn free_ready(&mut self, pool: &mut Pool<DriverGpu>) {
        for (_, blocks) in self.ready.drain() {
            for block in blocks {
                self.bytes -= block.size();
                free_to_pool(block, pool);
            }
        }
        self.ready_bytes = 0;
    }

    /// Frees the blocks that no work uses any more, as far as is known, to the pool.
    pub fn free_completed(&mut self, pool: &mut Pool<DriverGpu>) {
        while self.advance(pool) {}
        self.free_ready(pool);
    }

    /// Frees all of them to the pool: the caller has waited for the device.
    pub fn free_all(&mut self, pool: &mut Pool<DriverGpu>) {
        self.free_ready(pool);
        let open = std::mem::take(&mut self.open);
        let waiting = std::mem::take(&mut self.waiting);
        for (event, batch) in waiting {
            pool.gpu_mut().release_event(event);
            batch
                .blocks
                .into_iter()
                .for_each(|it| free_to_pool(it, pool));
        }
        open.blocks
            .into_iter()
            .for_each(|it| free_to_pool(it, pool));
        self.bytes = 0;
    }
}

fn free_to_pool(block: RelaxedBlock, pool: &mut Pool<DriverGpu>) {
    pool.clear_multi_stream(&block.live);
    // The pool knows it: it was looked up when it was set aside.
    let _ = pool.free(block.address);
}
