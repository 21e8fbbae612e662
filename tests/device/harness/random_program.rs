//! Random programs: allocations, frees, work and all else that a program may do, on one device, by one
//! thread. The runner has its own account of what is live and where, and checks what it gets: alignment,
//! overlap, contents, and (in the simulation) the order of all work.

use crate::harness::accounts::Accounts;
use crate::harness::gpu::{Gpu, KIB, MIB, rounded};
use crate::harness::random::Random;
use concertina_engine::core::Origin;
use concertina_engine::device::Device;
use concertina_engine::device::PoolId;
use concertina_engine::device::PoolRoute;
use std::collections::BTreeMap;
use std::time::Duration;

/// What a run does.
#[derive(Clone, Copy)]
pub struct Plan {
    pub streams: u64,
    /// The largest request in bytes.
    pub largest: u64,
    /// How many bytes to keep live, about.
    pub live: u64,
    /// Uses by other streams than the block's own.
    pub share: bool,
    /// Some blocks come from CUDA's functions, in the order of a stream or of none.
    pub cuda: bool,
    /// Streams are destroyed, and others get their handles.
    pub destroy: bool,
    /// The pool is not told of some streams.
    pub unknown: bool,
    /// The default streams are among them.
    pub defaults: bool,
    /// Streams of a second device use blocks too.
    pub foreign: bool,
    /// Blocks of CUDA's functions are freed in the order of other streams than their own, or in no order.
    pub other_streams_free: bool,
    /// `empty_cache` now and then.
    pub empty: bool,
    /// Idle memory is purged now and then.
    pub purge: bool,
    /// Private pools begin, end and are released.
    pub pools: bool,
    /// Limits from here to there are set now and then.
    pub limits: Option<(u64, u64)>,
    /// Check the invariants after every operation. That empties the pool's caches, so most runs do without.
    pub check: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            streams: 3,
            largest: 200 * MIB,
            live: 500 * MIB,
            share: true,
            cuda: false,
            destroy: false,
            unknown: false,
            defaults: false,
            foreign: false,
            other_streams_free: false,
            pools: false,
            empty: true,
            purge: false,
            limits: None,
            check: false,
        }
    }
}

/// A block that a runner holds. It may be handed to another runner.
pub struct Block {
    pub address: u64,
    pub size: u64,
    requested: u64,
    /// The stream that it was allocated on, or [`ENDED`].
    home: u64,
    /// That stream's handle, even when it has ended.
    handle: u64,
    /// The stream of the latest work on it; all earlier work comes before that.
    last: u64,
    /// What stands where: offset, bytes, word.
    windows: Vec<(u64, u64, u32)>,
    /// Other streams were recorded on it.
    recorded: bool,
    /// A stream used it without being recorded; its home must come after it before it is freed.
    unrecorded: bool,
    /// No stream orders it: any may use it, and it is freed once all work is done.
    unordered: bool,
    origin: Origin,
}

/// The default streams.
const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;

/// A stream of the device, of which the pool may know.
fn new_stream(gpu: &Gpu, device: &Device, plan: Plan, random: &mut Random) -> u64 {
    let stream = gpu.stream_on(device.ordinal() as usize);
    if plan.unknown && random.once_in(2) {
        device.remove_stream(stream);
    }
    stream
}

/// In place of a stream that is no more.
const ENDED: u64 = 0;

/// A copy on its way, and what it should bring.
struct Reading {
    words: Box<[u32]>,
    expected: u32,
    what: String,
}

/// One run.
pub struct Runner<'a> {
    pub gpu: &'a Gpu,
    pub device: &'a Device,
    pub random: Random,
    pub plan: Plan,
    pub accounts: Accounts,
    streams: Vec<u64>,
    /// Streams of another device.
    foreign: Vec<u64>,
    blocks: Vec<Block>,
    by_address: BTreeMap<u64, u64>,
    live: u64,
    next_word: u32,
    readings: Vec<Reading>,
    /// The private pools of open routes, the latest last, and each use of one.
    routes: Vec<PoolId>,
    pool_users: Vec<PoolId>,
    /// Requests that were refused: the allocator's own, and those of CUDA's functions.
    pub refused: [u64; 2],
    now: Duration,
}

impl<'a> Runner<'a> {
    pub fn new(gpu: &'a Gpu, device: &'a Device, plan: Plan, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut streams: Vec<u64> = (0..plan.streams)
            .map(|_| new_stream(gpu, device, plan, &mut random))
            .collect();
        if plan.defaults {
            streams.extend([LEGACY, PER_THREAD]);
        }
        let foreign = (0..if plan.foreign { 2 } else { 0 })
            .map(|_| gpu.stream_on(device.ordinal() as usize + 1))
            .collect();
        Runner {
            gpu,
            device,
            random,
            foreign,
            plan,
            accounts: Accounts::default(),
            streams,
            blocks: Vec::new(),
            by_address: BTreeMap::new(),
            live: 0,
            next_word: (seed as u32) << 12,
            readings: Vec::new(),
            routes: Vec::new(),
            pool_users: Vec::new(),
            refused: [0; 2],
            now: Duration::ZERO,
        }
    }

    /// Does a number of operations.
    pub fn run(&mut self, operations: u64) {
        for _ in 0..operations {
            self.operation();
            if self.plan.check {
                assert_eq!(self.device.check(), Ok(()));
            }
        }
    }

    /// Does one operation.
    pub fn operation(&mut self) {
        let full = self.live >= self.plan.live;
        match self.random.below(100) {
            0..42 if !full => self.allocate(),
            0..72 => self.free_one(),
            72..82 => self.work_on_one(),
            82..90 if self.plan.share => self.use_on_another_stream(),
            90..93 => self.verify_one(),
            93 if self.plan.empty && self.random.once_in(3) => self.device.empty_cache(),
            93 if self.plan.empty && self.random.once_in(2) => self.device.release_idle(),
            93 if self.plan.purge => self.purge_idle(),
            94 => self.set_limit(),
            95 if self.plan.destroy => self.replace_stream(),
            96 | 97 if self.plan.pools => self.use_pools(),
            _ => self.let_time_pass(),
        }
    }

    fn size(&mut self) -> u64 {
        let random = &mut self.random;
        let size = match random.below(100) {
            0..35 => random.between(1, 4 * KIB),
            35..60 => random.between(1, 2 * MIB),
            60..90 => random.between(MIB, 20 * MIB),
            // Sizes that come again, as in a training loop.
            90..95 => [2 * MIB, 4 * MIB, 10 * MIB, 32 * MIB][random.below(4) as usize],
            _ => random.between(1, self.plan.largest),
        };
        size.min(self.plan.largest)
    }

    fn stream(&mut self) -> u64 {
        self.streams[self.random.below(self.streams.len() as u64) as usize]
    }

    fn word(&mut self) -> u32 {
        self.next_word = self.next_word.wrapping_add(1);
        self.next_word
    }

    fn allocate(&mut self) {
        let (requested, home) = (self.size(), self.stream());
        let (origin, unordered) = match self.plan.cuda {
            true if self.random.once_in(4) => (Origin::Cuda, true),
            true if self.random.once_in(4) => (Origin::Cuda, false),
            _ => (Origin::Allocator, false),
        };
        let size = requested as usize;
        let found = match origin {
            Origin::Cuda if unordered => self.device.allocate_unordered(size),
            Origin::Cuda => self.device.allocate_on_stream(size, self.device.key(home)),
            Origin::Allocator => self.device.allocate(size, home),
        };
        let Ok(address) = found else {
            self.refused[usize::from(origin == Origin::Cuda)] += 1;
            return;
        };
        let size = rounded(requested);
        assert_eq!(address % 512, 0, "{address:#x} is not aligned");
        if self.plan.check {
            assert_eq!(self.device.size_of(address), Some(size));
        }
        let before = self.by_address.range(..address + size).next_back();
        if let Some((other, end)) = before.filter(|(_, end)| **end > address) {
            panic!(
                "{address:#x}..{:#x} overlaps {other:#x}..{end:#x}",
                address + size
            );
        }
        self.by_address.insert(address, address + size);
        self.accounts.of(origin).allocated(requested);
        self.live += size;
        let word = self.word();
        self.gpu.claim(address, size, u64::from(word));
        let block = Block {
            address,
            size,
            requested,
            home,
            handle: home,
            last: home,
            windows: Vec::new(),
            recorded: false,
            unrecorded: false,
            unordered,
            origin,
        };
        self.blocks.push(block);
        self.write(self.blocks.len() - 1, home);
    }

    /// Writes a new word to parts of a block, its ends among them. Small blocks are written whole.
    fn write(&mut self, at: usize, stream: u64) {
        let word = self.word();
        let size = self.blocks[at].size;
        let mut windows = vec![
            (0, size.min(4 * KIB)),
            (size - size.min(4 * KIB), size.min(4 * KIB)),
        ];
        if size <= 64 * KIB
            || size <= MIB && self.random.once_in(4)
            || size <= 4 * MIB && self.random.once_in(16)
        {
            windows = vec![(0, size)];
        } else {
            for _ in 0..3 {
                windows.push((self.random.below(size / 512) * 512, 512));
            }
        }
        let address = self.blocks[at].address;
        for (offset, bytes) in &windows {
            self.gpu.fill(address + offset, *bytes, word, stream);
        }
        let windows = windows
            .into_iter()
            .map(|(offset, bytes)| (offset, bytes, word));
        self.blocks[at].windows = windows.collect();
        self.blocks[at].last = stream;
    }

    /// Has a stream's later work come after all work on the block so far.
    fn reach(&self, at: usize, stream: u64) -> bool {
        let last = self.blocks[at].last;
        last == stream || self.gpu.order(last, stream)
    }

    fn any_block(&mut self) -> Option<usize> {
        let count = self.blocks.len() as u64;
        (count > 0).then(|| self.random.below(count) as usize)
    }

    /// More work on a block's own stream.
    fn work_on_one(&mut self) {
        if let Some(at) = self.any_block()
            && self.blocks[at].home != ENDED
            && self.reach(at, self.blocks[at].home)
        {
            self.write(at, self.blocks[at].home);
        }
    }

    /// Work on another stream, which the pool is told of, or else the block's own stream.
    fn use_on_another_stream(&mut self) {
        let (Some(at), mut other) = (self.any_block(), self.stream()) else {
            return;
        };
        if !self.foreign.is_empty() && !self.blocks[at].unordered && self.random.once_in(3) {
            other = self.foreign[self.random.below(self.foreign.len() as u64) as usize];
        }
        if other == self.blocks[at].home || !self.reach(at, other) {
            return;
        }
        // A block that no stream orders is freed after all work on it.
        let ordered = !self.blocks[at].unordered;
        if ordered && (self.blocks[at].home == ENDED || self.random.once_in(2)) {
            assert_eq!(
                self.device.record_use(self.blocks[at].address, other),
                Ok(())
            );
            self.blocks[at].recorded = true;
        } else {
            self.blocks[at].unrecorded = true;
        }
        self.write(at, other);
    }

    fn verify_one(&mut self) {
        if let Some(at) = self.any_block() {
            self.verify(at);
        }
    }

    /// Copies out what should stand in a block; compared at the end of the run.
    fn verify(&mut self, at: usize) {
        let block = &self.blocks[at];
        // Windows written one after the other with the same word may overlap.
        for (offset, bytes, word) in &block.windows {
            let mut words = vec![!*word; (*bytes / 4) as usize].into_boxed_slice();
            // SAFETY: the buffer lives in `readings` until all work is done, or never runs.
            unsafe {
                let to = words.as_mut_ptr();
                self.gpu
                    .copy_out(to, block.address + offset, *bytes, block.last);
            }
            let what = format!("{offset} bytes into {:#x} of {}", block.address, block.size);
            self.readings.push(Reading {
                words,
                expected: *word,
                what,
            });
        }
    }

    fn free_one(&mut self) {
        let Some(at) = self.any_block() else { return };
        if self.random.once_in(4) {
            self.verify(at);
        }
        self.free(at);
    }

    /// Frees a block while its work may still run.
    fn free(&mut self, at: usize) {
        let block = &self.blocks[at];
        if block.unordered {
            assert_eq!(self.device.synchronize(), 0);
        } else if block.unrecorded && block.last != block.home {
            if block.home == ENDED {
                self.gpu.synchronize(block.last);
            } else if !self.gpu.order(block.last, block.home) {
                return;
            }
        }
        let block = self.blocks.swap_remove(at);
        self.forget(&block);
        if self.plan.other_streams_free
            && !block.unordered
            && block.origin == Origin::Cuda
            && !self.foreign.contains(&block.last)
            && self.random.once_in(2)
        {
            self.free_on_another_stream(&block);
            return;
        }
        let account = self.accounts.of(block.origin);
        account.freed(block.requested, block.recorded);
        self.gpu.disown(block.address, block.size);
        if block.unordered {
            assert_eq!(self.device.free_completed(block.address), Ok(()));
            return;
        }
        if block.origin == Origin::Cuda && block.home != ENDED && self.random.once_in(2) {
            let key = self.device.key(block.home);
            assert_eq!(self.device.free_on_stream(block.address, key), Ok(()));
            return;
        }
        // The caller may name the stream, or another.
        let home = if self.random.once_in(8) {
            self.stream()
        } else {
            block.handle
        };
        assert_eq!(self.device.free(block.address, home), Ok(()));
    }

    /// Frees a block in the order of its latest work, or in no order.
    fn free_on_another_stream(&mut self, block: &Block) {
        let late = self.random.once_in(2);
        let shared = block.recorded || late || block.last != block.home;
        self.accounts
            .of(block.origin)
            .freed(block.requested, shared);
        self.gpu.disown(block.address, block.size);
        let key = self.device.key(block.last);
        let freed = match late {
            true => self.device.free_after_all_streams(block.address),
            false => self.device.free_on_stream(block.address, key),
        };
        assert_eq!(freed, Ok(()));
    }

    fn forget(&mut self, block: &Block) {
        self.live -= block.size;
        self.by_address.remove(&block.address);
    }

    /// Gives a block to another runner.
    pub fn hand_over(&mut self) -> Option<Block> {
        let at = self.any_block()?;
        let block = self.blocks.swap_remove(at);
        self.forget(&block);
        Some(block)
    }

    /// Takes another runner's block, whose streams live as long as this one.
    pub fn take_over(&mut self, block: Block) {
        self.by_address
            .insert(block.address, block.address + block.size);
        self.live += block.size;
        self.blocks.push(block);
    }

    fn set_limit(&mut self) {
        if let Some((from, to)) = self.plan.limits {
            let limit = match self.random.below(3) {
                0 => None,
                _ => Some(self.random.between(from, to)),
            };
            self.device.set_limit(limit);
        }
    }

    /// Ends a stream and makes another, which gets its handle if the driver does so.
    fn replace_stream(&mut self) {
        let at = self.random.below(self.streams.len() as u64) as usize;
        let old = self.streams[at];
        if old <= PER_THREAD {
            return;
        }
        let heir = self.streams[(at + 1) % self.streams.len()];
        if heir == old || !self.gpu.order(old, heir) {
            return;
        }
        for block in &mut self.blocks {
            // What comes after the heir comes after the old stream too.
            if block.last == old {
                block.last = heir;
            }
            if block.home == old {
                block.home = ENDED;
            }
        }
        self.gpu.destroy(old);
        self.streams[at] = new_stream(self.gpu, self.device, self.plan, &mut self.random);
    }

    /// Opens or ends a route to a private pool, or releases one.
    fn use_pools(&mut self) {
        let choice = self.random.below(4);
        if choice < 2 && self.routes.len() < 2 {
            let pool = (1 + self.random.below(3), 0);
            let only = self.random.once_in(2).then(|| self.stream());
            let filter = move |stream| only.is_none_or(|only| only == stream);
            self.device.begin_pool(PoolRoute {
                pool,
                filter: Box::new(filter),
            });
            self.routes.push(pool);
            self.pool_users.push(pool);
        } else if choice == 2 {
            self.end_route();
        } else if self.routes.is_empty() {
            self.release_pool();
        }
    }

    fn end_route(&mut self) {
        if let Some(pool) = self.routes.pop() {
            self.device.end_pool(pool);
        }
    }

    fn release_pool(&mut self) {
        if let Some(pool) = self.pool_users.pop() {
            self.device.release_pool(pool);
        }
    }

    /// Some time passes, and memory that was idle for longer than a random timeout is purged.
    fn purge_idle(&mut self) {
        self.now += Duration::from_millis(self.random.below(10));
        let timeout = Duration::from_millis(self.random.between(1, 10));
        while self.device.purge_idle(self.now, timeout) {}
    }

    fn let_time_pass(&mut self) {
        let Some(machine) = self.gpu.machine() else {
            return;
        };
        match self.random.below(8) {
            0 => machine.run_all(),
            1 | 2 => {
                let stream = self.stream();
                machine.step(stream as _);
            }
            _ => machine.tick(),
        }
    }

    /// Frees everything, has all work done, and compares what was read.
    pub fn end(&mut self) {
        for at in (0..self.blocks.len()).rev() {
            self.verify(at);
        }
        (0..self.routes.len()).for_each(|_| self.end_route());
        let early = self.random.below(1 + self.pool_users.len() as u64);
        (0..early).for_each(|_| self.release_pool());
        while !self.blocks.is_empty() {
            let count = self.blocks.len();
            self.free(count - 1);
            if self.blocks.len() == count {
                // The driver, made to fail, refused; the next call will succeed.
                self.blocks.rotate_right(1);
            }
        }
        (0..self.pool_users.len()).for_each(|_| self.release_pool());
        self.gpu.settle();
        self.compare();
    }

    fn compare(&mut self) {
        for Reading {
            words,
            expected,
            what,
        } in self.readings.drain(..)
        {
            if let Some(found) = words.iter().find(|word| **word != expected) {
                panic!("{found:#x} instead of {expected:#x}, {what}");
            }
        }
    }
}

impl Drop for Runner<'_> {
    /// A run that failed leaves copies on their way, whose buffers must stay.
    fn drop(&mut self) {
        std::mem::forget(std::mem::take(&mut self.readings));
    }
}

/// Says which seed it was when a run fails.
pub struct Seed(pub u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("failed with seed {}", self.0);
        }
    }
}
