//! The counters of a pool and the statistics read from them, in PyTorch's terms: `allocated` minus `freed` is
//! `current`, and `peak` the highest `current` since the last reset.
//!
//! What an allocation or a free counts is few figures, from which the others follow: each costs a handful of
//! additions.

use std::ops::{Deref, DerefMut};

/// A statistic: PyTorch's `Stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Added since the start, or since the accumulated figures were reset.
    pub allocated: u64,
    /// Removed since then.
    pub freed: u64,
    /// What there is now.
    pub current: u64,
    /// The highest `current` since the last reset of the peaks.
    pub peak: u64,
}

/// The statistics that PyTorch splits by the size of the block. Names with `bytes` are in bytes, the others
/// are numbers of blocks or segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Usage {
    pub allocation: Stat,
    pub allocated_bytes: Stat,
    pub requested_bytes: Stat,
    pub active: Stat,
    pub active_bytes: Stat,
    pub inactive_split: Stat,
    pub inactive_split_bytes: Stat,
    pub segment: Stat,
    pub reserved_bytes: Stat,
}

/// PyTorch's two classes of blocks, by size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Up to [`crate::core::SMALL`] bytes.
    Small,
    /// More.
    Large,
}

impl Class {
    /// The class of a block of `size` bytes.
    #[inline]
    pub fn of(size: u64) -> Self {
        match size > crate::core::SMALL {
            false => Class::Small,
            true => Class::Large,
        }
    }
}

/// By which functions a block was allocated. PyTorch's statistics count what PyTorch allocated, and not what
/// other libraries of its process have from the same pool.
///
/// The values are bits that no stream's handle has: a cache's key is the handle and the origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u64)]
pub enum Origin {
    /// The allocator's own functions, which PyTorch calls.
    #[default]
    Allocator = 0,
    /// CUDA's functions, which a preloaded library answers: `cudaMalloc`, `cudaMallocAsync` and the like.
    Cuda = 1 << 62,
}

/// The statistics of a pool at one moment, with the blocks of one origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// All blocks of the origin, and all segments.
    pub all: Usage,
    /// Blocks up to 1 MiB; segments are shared, so they and what is free in them count as large.
    pub small: Usage,
    /// Blocks above 1 MiB, all segments, and what is free in them.
    pub large: Usage,
    /// Bytes of the origin's blocks whose free is deferred.
    pub pending_bytes: u64,
    /// The plain counts.
    pub counts: Counts,
}

impl Deref for PoolStats {
    type Target = Counts;
    fn deref(&self) -> &Counts {
        &self.counts
    }
}

/// The plain counts, in all since the start. The pool increments them as `self.counters.NAME`.
///
/// `process/stats.rs` has a row for each that the JSON shows. Those that PyTorch shows are listed in
/// [`TORCH_COUNTS`] instead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Misses that went beyond growth: memory was synchronized with or given back before another try.
    pub alloc_retries: u64,
    /// Requests that failed for want of memory.
    pub ooms: u64,
    /// Synchronizations with the device, also when the cache was emptied and there was nothing to wait for.
    pub syncs: u64,
    /// Chunks and plain segments taken from the driver.
    pub device_allocs: u64,
    /// Chunks and plain segments given back to the driver.
    pub device_frees: u64,
    /// Requests met by a free block, on the fast path or on a rung of the ladder.
    pub hits: u64,
    /// Rung 1: hits after purged chunks were reclaimed.
    pub reclaims: u64,
    /// Rung 2: hits after events were polled.
    pub polls: u64,
    /// Rungs 5 and 9: hits in another stream's memory, behind a wait on the GPU.
    pub cross_stream_reuses: u64,
    /// Rungs 6 and 8: chunks remapped to make free memory contiguous.
    pub stitches: u64,
    /// Bytes of those chunks.
    pub stitched_bytes: u64,
    /// Rungs 4, 7 and 8: requests for which memory was taken from the driver.
    pub growths: u64,
    /// Rung 8: growths that the device or the limit refused at first.
    pub growth_refusals: u64,
    /// Stale mappings there are now.
    pub stale: u64,
    /// Bytes behind them.
    pub stale_bytes: u64,
    /// Driver calls that failed for another reason than want of memory.
    pub driver_errors: u64,
}

/// A count that PyTorch has, too.
pub struct TorchCount {
    /// PyTorch's key in `memory_stats`.
    pub name: &'static str,
    /// Counted by origin: for which functions' requests it happened.
    by_origin: bool,
    field: fn(&mut Counts) -> &mut u64,
}

/// The counts that PyTorch has, too: its `memory_stats` shows them, and `reset_accumulated_memory_stats` sets
/// them to 0.
pub const TORCH_COUNTS: [TorchCount; 5] = [
    TorchCount {
        name: "num_alloc_retries",
        by_origin: true,
        field: |it| &mut it.alloc_retries,
    },
    TorchCount {
        name: "num_ooms",
        by_origin: true,
        field: |it| &mut it.ooms,
    },
    TorchCount {
        name: "num_sync_all_streams",
        by_origin: true,
        field: |it| &mut it.syncs,
    },
    TorchCount {
        name: "num_device_alloc",
        by_origin: false,
        field: |it| &mut it.device_allocs,
    },
    TorchCount {
        name: "num_device_free",
        by_origin: false,
        field: |it| &mut it.device_frees,
    },
];

impl TorchCount {
    /// Its value among these.
    pub fn of(&self, counts: &Counts) -> u64 {
        let mut counts = *counts;
        *(self.field)(&mut counts)
    }
}

/// Several quantities that are added and subtracted together.
#[derive(Clone, Copy)]
struct Vector<const N: usize>([i64; N]);

/// Of live blocks: how many, their bytes, the bytes requested.
type CountBytesRequested = Vector<3>;

/// Of other blocks, or of chunks: how many, their bytes.
type CountBytes = Vector<2>;

impl<const N: usize> Default for Vector<N> {
    fn default() -> Self {
        Vector([0; N])
    }
}

impl<const N: usize> Vector<N> {
    fn zip(self, other: Self, of: impl Fn(i64, i64) -> i64) -> Self {
        Vector(std::array::from_fn(|at| of(self.0[at], other.0[at])))
    }

    fn plus(self, other: Self) -> Self {
        self.zip(other, |a, b| a.wrapping_add(b))
    }

    fn minus(self, other: Self) -> Self {
        self.zip(other, |a, b| a.wrapping_sub(b))
    }

    /// Whether any of them is below 0.
    fn any_negative(self) -> bool {
        self.0.iter().any(|it| *it < 0)
    }

    fn get(self, at: usize) -> u64 {
        self.0[at] as u64
    }
}

impl CountBytesRequested {
    #[inline(always)]
    fn one(size: u64, requested: u64) -> Self {
        Vector([1, size as i64, requested as i64])
    }

    fn without_requested(self) -> CountBytes {
        Vector([self.0[0], self.0[1]])
    }
}

impl CountBytes {
    #[inline(always)]
    fn one(size: u64) -> Self {
        Vector([1, size as i64])
    }

    #[inline(always)]
    fn bytes(bytes: u64) -> Self {
        Vector([0, bytes as i64])
    }
}

/// A quantity with its peak. The current value is `base` plus `added` minus `removed`. Whether it passes the
/// peak is told by the headroom alone: by how much it may still rise.
#[derive(Clone, Copy, Default)]
struct Gauge {
    added: CountBytes,
    removed: CountBytes,
    headroom: CountBytes,
    peak: CountBytes,
    /// The value when `added` and `removed` were last reset.
    base: CountBytes,
}

impl Gauge {
    #[inline(always)]
    fn add(&mut self, more: CountBytes) {
        self.added = self.added.plus(more);
        self.headroom = self.headroom.minus(more);
        if self.headroom.any_negative() {
            self.raise();
        }
    }

    #[inline(always)]
    fn remove(&mut self, less: CountBytes) {
        self.removed = self.removed.plus(less);
        self.headroom = self.headroom.plus(less);
    }

    /// Raises the peak to the current value, if that is higher, and computes the headroom.
    #[cold]
    #[inline(never)]
    fn raise(&mut self) {
        let now = self.now();
        self.peak = self.peak.zip(now, i64::max);
        self.headroom = self.peak.minus(now);
    }

    fn now(&self) -> CountBytes {
        self.base.plus(self.added).minus(self.removed)
    }

    fn reset_peak(&mut self) {
        self.peak = CountBytes::default();
        self.raise();
    }

    fn reset_accumulated(&mut self) {
        self.base = self.now();
        (self.added, self.removed) = Default::default();
    }
}

/// An index beside those of the two classes: both together.
const ALL: usize = 2;

/// Gauges of live blocks by class, with the peaks of each class and of both.
///
/// The headroom is a lower bound: of bytes and requested bytes only the smaller is kept, from which an
/// allocation takes its bytes and to which a free returns its requested bytes, which are no more. Where it is
/// used up the exact peaks are looked at.
///
/// A quantity of both classes lies side by side, not all of one class's: the compiler would gather two for
/// one instruction, which takes longer than to add each in place.
#[derive(Clone, Copy, Default)]
struct ClassGauges {
    added: [[i64; 2]; 3],
    removed: [[i64; 2]; 3],
    count_headroom: [i64; 3],
    byte_headroom: [i64; 3],
    peaks: [CountBytesRequested; 3],
    /// The values when `added` and `removed` were last reset.
    base: [CountBytesRequested; 2],
}

impl ClassGauges {
    #[inline(always)]
    fn add(&mut self, class: usize, more: CountBytesRequested) {
        for (added, more) in self.added.iter_mut().zip(more.0) {
            added[class] += more;
        }
        let mut left = 0;
        for of in [class, ALL] {
            self.count_headroom[of] -= more.0[0];
            self.byte_headroom[of] -= more.0[1];
            left |= self.count_headroom[of] | self.byte_headroom[of];
        }
        if left < 0 {
            self.raise();
        }
    }

    #[inline(always)]
    fn remove(&mut self, class: usize, less: CountBytesRequested) {
        for (removed, less) in self.removed.iter_mut().zip(less.0) {
            removed[class] += less;
        }
        for of in [class, ALL] {
            self.count_headroom[of] += less.0[0];
            self.byte_headroom[of] += less.0[2];
        }
    }

    /// Raises the peaks to the current values, where those are higher, and computes the headroom.
    #[cold]
    #[inline(never)]
    fn raise(&mut self) {
        for (of, now) in self.now_with_all().into_iter().enumerate() {
            let peak = self.peaks[of].zip(now, i64::max);
            let headroom = peak.minus(now);
            self.peaks[of] = peak;
            self.count_headroom[of] = headroom.0[0];
            self.byte_headroom[of] = headroom.0[1].min(headroom.0[2]);
        }
    }

    /// Whether adding `more` would raise a peak.
    #[inline(always)]
    fn would_raise(&self, class: usize, more: CountBytesRequested) -> bool {
        let short = [class, ALL]
            .map(|of| (self.count_headroom[of] - more.0[0]) | (self.byte_headroom[of] - more.0[1]));
        short[0] | short[1] < 0 && self.would_raise_slow(class, more)
    }

    #[cold]
    #[inline(never)]
    fn would_raise_slow(&self, class: usize, more: CountBytesRequested) -> bool {
        let now = self.now_with_all();
        let passes = |of: usize| self.peaks[of].minus(now[of].plus(more)).any_negative();
        passes(class) || passes(ALL)
    }

    /// The current values of each class.
    fn now(&self) -> [CountBytesRequested; 2] {
        let (added, removed) = (self.added(), by_class(&self.removed));
        [0, 1].map(|class| self.base[class].plus(added[class]).minus(removed[class]))
    }

    /// The current values of each class and of both.
    fn now_with_all(&self) -> [CountBytesRequested; 3] {
        let [small, large] = self.now();
        [small, large, small.plus(large)]
    }

    /// What was added since the last reset.
    fn added(&self) -> [CountBytesRequested; 2] {
        by_class(&self.added)
    }

    fn reset_peaks(&mut self) {
        self.peaks = Default::default();
        self.raise();
    }

    fn reset_accumulated(&mut self) {
        self.base = self.now();
        (self.added, self.removed) = Default::default();
    }
}

fn by_class(quantities: &[[i64; 2]; 3]) -> [CountBytesRequested; 2] {
    [0, 1].map(|class| Vector(quantities.map(|it| it[class])))
}

/// What a class, or both, has of segments and of free blocks: those all count as large.
fn for_class(class: usize, amount: CountBytes) -> CountBytes {
    match class == Class::Small as usize {
        true => CountBytes::default(),
        false => amount,
    }
}

/// All values of one class or of both: current ones, bases, or what was added.
#[derive(Clone, Copy)]
struct Reading {
    blocks: CountBytesRequested,
    /// Deferred frees.
    pending: CountBytes,
    free_blocks: CountBytes,
    reserved: CountBytes,
}

impl Reading {
    fn plus(self, other: Reading) -> Reading {
        Reading {
            blocks: self.blocks.plus(other.blocks),
            pending: self.pending.plus(other.pending),
            free_blocks: self.free_blocks.plus(other.free_blocks),
            reserved: self.reserved.plus(other.reserved),
        }
    }
}

/// The peaks of one class or of both.
struct Peaks {
    blocks: CountBytesRequested,
    active: CountBytes,
    free_blocks: CountBytes,
    reserved: CountBytes,
}

/// The gauges of one origin's blocks. PyTorch's active blocks are the live and the pending ones together.
#[derive(Clone, Default)]
struct BlockGauges {
    /// Live blocks; the requested bytes of pending ones count here too, as in PyTorch.
    live: ClassGauges,
    /// Pending blocks, by class.
    pending: [CountBytes; 2],
    /// `pending` at the last reset of the accumulated figures.
    pending_base: [CountBytes; 2],
    /// The peak of active blocks, by class and of both, as far as any was pending then; it is the peak of
    /// live blocks where that is higher.
    active_peaks: [CountBytes; 3],
}

impl BlockGauges {
    #[inline(always)]
    fn allocated(&mut self, size: u64, requested: u64) {
        let one = CountBytesRequested::one(size, requested);
        self.live.add(Class::of(size) as usize, one);
        if self.has_pending() {
            self.raise_active();
        }
    }

    /// Whether any block is pending. Where none is, active blocks are the live ones.
    #[inline(always)]
    fn has_pending(&self) -> bool {
        self.pending[0].0[0] | self.pending[1].0[0] != 0
    }

    #[cold]
    #[inline(never)]
    fn raise_active(&mut self) {
        let now = self.now_active();
        for (peak, now) in self.active_peaks.iter_mut().zip(now) {
            *peak = peak.zip(now, i64::max);
        }
    }

    /// Active blocks, by class and of both.
    fn now_active(&self) -> [CountBytes; 3] {
        let live = self.live.now().map(CountBytesRequested::without_requested);
        let [small, large] = [0, 1].map(|class| live[class].plus(self.pending[class]));
        [small, large, small.plus(large)]
    }

    #[inline]
    fn would_peak(&self, size: u64, requested: u64) -> bool {
        let class = Class::of(size) as usize;
        self.live
            .would_raise(class, CountBytesRequested::one(size, requested))
            || self.has_pending() && self.would_raise_active(class, size)
    }

    #[cold]
    #[inline(never)]
    fn would_raise_active(&self, class: usize, size: u64) -> bool {
        let now = self.now_active();
        [class, ALL].into_iter().any(|of| {
            let live = self.live.peaks[of].without_requested();
            let peak = self.active_peaks[of].zip(live, i64::max);
            peak.minus(now[of].plus(CountBytes::one(size)))
                .any_negative()
        })
    }

    fn deferred(&mut self, size: u64, requested: u64) {
        let class = Class::of(size) as usize;
        self.pending[class] = self.pending[class].plus(CountBytes::one(size));
        // It was live until just now, so that there is headroom for it.
        self.live.removed[2][class] -= requested as i64;
        for of in [class, ALL] {
            self.live.byte_headroom[of] -= requested as i64;
        }
        self.raise_active();
    }

    fn deferred_completed(&mut self, size: u64, requested: u64) {
        let class = Class::of(size) as usize;
        self.pending[class] = self.pending[class].minus(CountBytes::one(size));
        // The headroom stays as it is: `remove` added to it when the block was freed.
        self.live.removed[2][class] += requested as i64;
    }

    fn recycled(&mut self, class: Class, count: u64, bytes: u64, requested: u64) {
        for (at, amount) in [count, bytes, requested].into_iter().enumerate() {
            self.live.added[at][class as usize] += amount as i64;
            self.live.removed[at][class as usize] += amount as i64;
        }
    }

    fn reset_peaks(&mut self) {
        self.live.reset_peaks();
        self.active_peaks = Default::default();
        self.raise_active();
    }

    fn reset_accumulated(&mut self) {
        self.live.reset_accumulated();
        self.pending_base = self.pending;
    }
}

/// The counters of a pool: gauges of each origin's blocks, of free blocks and of reserved memory, and plain
/// counts.
///
/// Free blocks and segments all count as large: a free block changes its size with almost every allocation,
/// and to have it change its class took a seventh of the time of an allocation and a free.
#[derive(Clone, Default)]
pub struct Counters {
    allocator: BlockGauges,
    cuda: BlockGauges,
    free_blocks: Gauge,
    reserved: Gauge,
    counts: Counts,
    /// Counts by origin that were for requests of [`Origin::Cuda`].
    cuda_counts: Counts,
}

impl Deref for Counters {
    type Target = Counts;
    fn deref(&self) -> &Counts {
        &self.counts
    }
}

impl DerefMut for Counters {
    #[inline]
    fn deref_mut(&mut self) -> &mut Counts {
        &mut self.counts
    }
}

impl Counters {
    #[inline(always)]
    fn of(&self, origin: Origin) -> &BlockGauges {
        match origin {
            Origin::Allocator => &self.allocator,
            Origin::Cuda => &self.cuda,
        }
    }

    #[inline(always)]
    fn of_mut(&mut self, origin: Origin) -> &mut BlockGauges {
        match origin {
            Origin::Allocator => &mut self.allocator,
            Origin::Cuda => &mut self.cuda,
        }
    }

    /// A block was allocated.
    #[inline(always)]
    pub fn allocated(&mut self, origin: Origin, size: u64, requested: u64) {
        self.of_mut(origin).allocated(size, requested);
    }

    /// Whether allocating a block of this size would raise a peak. One above the largest request does not.
    #[inline]
    pub fn would_peak(&self, origin: Origin, size: u64, requested: u64) -> bool {
        size <= crate::core::LARGEST_REQUEST && self.of(origin).would_peak(size, requested)
    }

    /// A live block was freed.
    #[inline(always)]
    pub fn freed(&mut self, origin: Origin, size: u64, requested: u64) {
        let one = CountBytesRequested::one(size, requested);
        let live = &mut self.of_mut(origin).live;
        live.remove(Class::of(size) as usize, one);
    }

    /// [`Counters::freed`] out of line, for the rarer origin.
    #[inline(never)]
    pub fn freed_by(&mut self, origin: Origin, size: u64, requested: u64) {
        self.freed(origin, size, requested);
    }

    /// A free, counted by [`Counters::freed`], is deferred: the block is pending. Its requested bytes go on
    /// counting, as in PyTorch.
    pub fn deferred(&mut self, origin: Origin, size: u64, requested: u64) {
        self.of_mut(origin).deferred(size, requested);
    }

    /// A block is pending no more.
    pub fn deferred_completed(&mut self, origin: Origin, size: u64, requested: u64) {
        self.of_mut(origin).deferred_completed(size, requested);
    }

    /// A cache above the pool took blocks of one class back and gave them out again, `count` times in all. No
    /// peak can have been passed, as each was freed first. Sizes are in bytes, over all times.
    pub fn recycled(
        &mut self,
        origin: Origin,
        class: Class,
        count: u64,
        bytes: u64,
        requested: u64,
    ) {
        self.counts.hits += count;
        let gauges = self.of_mut(origin);
        gauges.recycled(class, count, bytes, requested);
    }

    /// The counts now, before a request that may be [`Origin::Cuda`]'s.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// What was counted by origin since `before` was for a request of [`Origin::Cuda`].
    pub fn attribute_to_cuda(&mut self, before: Counts) {
        for count in TORCH_COUNTS.iter().filter(|it| it.by_origin) {
            let before = count.of(&before);
            let now = std::mem::replace((count.field)(&mut self.counts), before);
            *(count.field)(&mut self.cuda_counts) += now - before;
        }
    }

    /// A free block of `size` bytes was added.
    #[inline(always)]
    pub fn free_block_added(&mut self, size: u64) {
        self.free_blocks.add(CountBytes::one(size));
    }

    /// A free block was removed.
    #[inline(always)]
    pub fn free_block_removed(&mut self, size: u64) {
        self.free_blocks.remove(CountBytes::one(size));
    }

    /// `size` bytes became free and were coalesced with this many neighbours, two at most.
    #[inline(always)]
    pub fn free_block_coalesced(&mut self, size: u64, neighbours: u64) {
        let removed = neighbours / 2;
        self.free_blocks.remove(Vector([removed as i64, 0]));
        let added = 1 + removed - neighbours;
        self.free_blocks.add(Vector([added as i64, size as i64]));
    }

    /// A free block became `more` bytes larger.
    pub fn free_block_grown(&mut self, more: u64) {
        self.free_blocks.add(CountBytes::bytes(more));
    }

    /// A free block became `less` bytes smaller.
    #[inline(always)]
    pub fn free_block_shrunk(&mut self, less: u64) {
        self.free_blocks.remove(CountBytes::bytes(less));
    }

    /// A chunk or a plain segment was taken from the driver.
    pub fn chunk_added(&mut self, size: u64) {
        self.counts.device_allocs += 1;
        self.reserved.add(CountBytes::one(size));
    }

    /// A chunk or a plain segment was given back to the driver.
    pub fn chunk_removed(&mut self, size: u64) {
        self.counts.device_frees += 1;
        self.reserved.remove(CountBytes::one(size));
    }

    /// Bytes of an origin's live blocks.
    pub fn in_use(&self, origin: Origin) -> u64 {
        self.of(origin).live.now_with_all()[ALL].get(1)
    }

    /// Bytes reserved from the driver.
    pub fn reserved(&self) -> u64 {
        self.reserved.now().get(1)
    }

    /// The statistics, with the blocks of this origin.
    pub fn read(&self, origin: Origin) -> PoolStats {
        let Counters {
            free_blocks,
            reserved,
            ..
        } = self;
        let BlockGauges {
            live,
            pending,
            pending_base,
            active_peaks,
        } = self.of(origin);
        let readings = |blocks: [CountBytesRequested; 2],
                        pending: [CountBytes; 2],
                        free_blocks: CountBytes,
                        reserved: CountBytes| {
            let [small, large] = [0, 1].map(|class| Reading {
                blocks: blocks[class],
                pending: pending[class],
                free_blocks: for_class(class, free_blocks),
                reserved: for_class(class, reserved),
            });
            [small, large, small.plus(large)]
        };
        let base = readings(live.base, *pending_base, free_blocks.base, reserved.base);
        let added = readings(
            live.added(),
            Default::default(),
            free_blocks.added,
            reserved.added,
        );
        let now = readings(live.now(), *pending, free_blocks.now(), reserved.now());
        let [small, large, all] = [0, 1, ALL].map(|of| {
            let peaks = Peaks {
                blocks: live.peaks[of],
                active: active_peaks[of],
                free_blocks: for_class(of, free_blocks.peak),
                reserved: for_class(of, reserved.peak),
            };
            usage(&base[of], &added[of], &now[of], &peaks)
        });
        let mut counts = self.counts;
        if origin == Origin::Cuda {
            for count in TORCH_COUNTS.iter().filter(|it| it.by_origin) {
                *(count.field)(&mut counts) = count.of(&self.cuda_counts);
            }
        }
        PoolStats {
            all,
            small,
            large,
            pending_bytes: now[ALL].pending.get(1),
            counts,
        }
    }

    /// Sets every peak to the current value.
    pub fn reset_peaks(&mut self) {
        self.allocator.reset_peaks();
        self.cuda.reset_peaks();
        self.free_blocks.reset_peak();
        self.reserved.reset_peak();
    }

    /// PyTorch's `reset_accumulated_memory_stats`: sets what was ever allocated and freed to 0, and
    /// [`TORCH_COUNTS`].
    pub fn reset_accumulated(&mut self) {
        self.allocator.reset_accumulated();
        self.cuda.reset_accumulated();
        self.free_blocks.reset_accumulated();
        self.reserved.reset_accumulated();
        for count in &TORCH_COUNTS {
            *(count.field)(&mut self.counts) = 0;
        }
        self.cuda_counts = Counts::default();
    }
}

/// PyTorch's statistics of one class, or of both. What was removed is what was there and added less what is
/// left.
fn usage(base: &Reading, added: &Reading, now: &Reading, peaks: &Peaks) -> Usage {
    let stat = |base: u64, added: u64, current: u64, peak| Stat {
        allocated: added,
        freed: base + added - current,
        current,
        peak,
    };
    let stats = |base: CountBytes, added: CountBytes, now: CountBytes, peak: CountBytes| {
        [0, 1].map(|at| stat(base.get(at), added.get(at), now.get(at), peak.get(at)))
    };
    let [base_live, added_live, now_live] =
        [base, added, now].map(|it| it.blocks.without_requested());
    let live_peak = peaks.blocks.without_requested();
    let [allocation, allocated_bytes] = stats(base_live, added_live, now_live, live_peak);
    let base_active = base_live.plus(base.pending);
    let now_active = now_live.plus(now.pending);
    let active_peak = peaks.active.zip(live_peak, i64::max);
    let [active, active_bytes] = stats(base_active, added_live, now_active, active_peak);
    let [inactive_split, inactive_split_bytes] = stats(
        base.free_blocks,
        added.free_blocks,
        now.free_blocks,
        peaks.free_blocks,
    );
    let [segment, reserved_bytes] =
        stats(base.reserved, added.reserved, now.reserved, peaks.reserved);
    Usage {
        allocation,
        allocated_bytes,
        requested_bytes: stat(
            base.blocks.get(2),
            added.blocks.get(2),
            now.blocks.get(2),
            peaks.blocks.get(2),
        ),
        active,
        active_bytes,
        inactive_split,
        inactive_split_bytes,
        segment,
        reserved_bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{BLOCK, SMALL};

    /// Current values and peaks of live blocks, their bytes and requested bytes, and of active blocks and
    /// their bytes.
    #[derive(Clone, Copy, Default)]
    struct Plain {
        now: [u64; 5],
        peak: [u64; 5],
    }

    impl Plain {
        fn change(&mut self, change: impl Fn(&mut [u64; 5])) {
            change(&mut self.now);
            for (peak, now) in self.peak.iter_mut().zip(self.now) {
                *peak = now.max(*peak);
            }
        }

        fn agrees_with(&self, usage: &Usage) {
            let flows = [
                usage.allocation,
                usage.allocated_bytes,
                usage.requested_bytes,
                usage.active,
                usage.active_bytes,
            ];
            assert_eq!(flows.map(|flow| flow.current), self.now);
            assert_eq!(flows.map(|flow| flow.peak), self.peak);
        }
    }

    fn random() -> impl FnMut(u64) -> u64 {
        let mut x = 88172645463325252u64;
        move |below| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x % below
        }
    }

    #[test]
    fn what_is_free_is_that_of_a_plain_account_after_every_step() {
        let mut random = random();
        let mut counters = Counters::default();
        // Free blocks and their bytes: how many there are, the most, and how many ever came.
        let (mut now, mut peak, mut came) = ([0u64; 2], [0u64; 2], [0u64; 2]);
        for step in 0..20_000 {
            let size = BLOCK * (1 + random(10_000));
            let more = match random(4) {
                0 => {
                    let beside = random(3).min(now[0]);
                    counters.free_block_coalesced(size, beside);
                    now[0] -= beside.saturating_sub(1);
                    [u64::from(beside == 0), size]
                }
                1 if now[0] > 0 && now[1] > size => {
                    counters.free_block_shrunk(size);
                    now[1] -= size;
                    [0, 0]
                }
                2 if now[0] > 1 && now[1] > size => {
                    counters.free_block_removed(size);
                    now = [now[0] - 1, now[1] - size];
                    [0, 0]
                }
                3 if now[0] > 0 => {
                    counters.free_block_grown(size);
                    [0, size]
                }
                _ => {
                    counters.free_block_added(size);
                    [1, size]
                }
            };
            for of in 0..2 {
                now[of] += more[of];
                came[of] += more[of];
            }
            peak = [0, 1].map(|of| peak[of].max(now[of]));
            match random(500) {
                0 => {
                    counters.reset_peaks();
                    peak = now;
                }
                1 => {
                    counters.reset_accumulated();
                    came = [0; 2];
                }
                _ => {}
            }
            let PoolStats {
                all, small, large, ..
            } = counters.read(Origin::Allocator);
            let flows = [all.inactive_split, all.inactive_split_bytes];
            assert_eq!(flows.map(|it| it.current), now, "step {step}");
            assert_eq!(flows.map(|it| it.peak), peak, "step {step}");
            assert_eq!(flows.map(|it| it.allocated), came, "step {step}");
            // It lies in segments, which are large.
            assert_eq!(flows, [large.inactive_split, large.inactive_split_bytes]);
            assert_eq!(small, Usage::default());
        }
    }

    #[test]
    fn peaks_are_those_of_a_plain_account_after_every_step() {
        let mut random = random();
        let mut counters = Counters::default();
        let mut plain = [Plain::default(); 3];
        let (mut live, mut pending) = (Vec::new(), Vec::new());
        for step in 0..20_000 {
            let grows = random(20) < if step / 1000 % 2 == 0 { 11 } else { 9 };
            if grows || live.is_empty() {
                // Some are small, and some of the same size as others.
                let requested = 1 + random(4) * (SMALL / 3) + random(3) * 300;
                let size = requested.next_multiple_of(BLOCK);
                let class = Class::of(size) as usize;
                let before = plain;
                for of in [class, ALL] {
                    plain[of].change(|now| {
                        for (at, more) in [1, size, requested, 1, size].into_iter().enumerate() {
                            now[at] += more;
                        }
                    });
                }
                let peaks = (0..3).any(|of| plain[of].peak != before[of].peak);
                assert_eq!(
                    counters.would_peak(Origin::Allocator, size, requested),
                    peaks,
                    "step {step}"
                );
                counters.allocated(Origin::Allocator, size, requested);
                live.push((size, requested));
            } else {
                let at = random(live.len() as u64) as usize;
                let (size, requested) = live.swap_remove(at);
                let class = Class::of(size) as usize;
                let waits = random(4) == 0;
                counters.freed(Origin::Allocator, size, requested);
                if waits {
                    counters.deferred(Origin::Allocator, size, requested);
                    pending.push((size, requested));
                }
                for of in [class, ALL] {
                    plain[of].change(|now| {
                        let goes = if waits { [0; 3] } else { [requested, 1, size] };
                        for (at, less) in [1, size].into_iter().chain(goes).enumerate() {
                            now[at] -= less;
                        }
                    });
                }
            }
            if random(6) == 0
                && let Some((size, requested)) = pending.pop()
            {
                counters.deferred_completed(Origin::Allocator, size, requested);
                for of in [Class::of(size) as usize, ALL] {
                    plain[of].change(|now| {
                        for (at, less) in [requested, 1, size].into_iter().enumerate() {
                            now[2 + at] -= less;
                        }
                    });
                }
            }
            match random(500) {
                0 => {
                    counters.reset_peaks();
                    plain.iter_mut().for_each(|it| it.peak = it.now);
                }
                1 => counters.reset_accumulated(),
                _ => {}
            }
            let stats = counters.read(Origin::Allocator);
            for (of, usage) in [&stats.small, &stats.large, &stats.all]
                .into_iter()
                .enumerate()
            {
                plain[of].agrees_with(usage);
            }
        }
    }
}
