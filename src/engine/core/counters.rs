//! What the pool counts, in PyTorch's terms: `allocated` minus `freed` is `current`, and `peak`
//! is the highest `current` since the last reset.

use std::ops::{Deref, DerefMut};

/// One quantity: how much was ever added, how much removed, and the highest difference.
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

/// The quantities that PyTorch splits by the size of the block.
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

/// Which of PyTorch's two classes a block is counted in, by its size.
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

/// Who asked for a block. PyTorch's figures count what PyTorch asked for, and not what other libraries of its
/// process have from the same pool.
///
/// The numbers leave the bits of a stream's handle alone: see `Owner` in `runtime/shelf`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u64)]
pub enum Origin {
    /// The allocator's own functions, which PyTorch calls.
    #[default]
    Allocator = 0,
    /// CUDA's functions, which a preloaded library answers: `cudaMalloc`, `cudaMallocAsync` and the like.
    Cuda = 1 << 62,
}

/// What the pool has counted, as it is read, with the blocks of one origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// All blocks of the origin, and all segments.
    pub all: Usage,
    /// Blocks up to 1 MiB; segments are shared, so they and what is free in them count as large.
    pub small: Usage,
    /// Blocks above 1 MiB, all segments, and what is free in them.
    pub large: Usage,
    /// Bytes of such blocks that were freed, and that other streams may still use.
    pub pending_bytes: u64,
    /// What happened, other than blocks that came and went.
    pub events: Events,
}

impl Deref for PoolStats {
    type Target = Events;
    fn deref(&self) -> &Events {
        &self.events
    }
}

/// What is counted one by one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Requests that did not fit and for which memory was given back before another try.
    pub alloc_retries: u64,
    /// Requests that failed for want of memory.
    pub ooms: u64,
    /// Times that the pool waited for the whole device, or had no work to wait for when it was emptied.
    pub syncs: u64,
    /// Chunks or plain segments taken from the driver.
    pub device_allocs: u64,
    /// Chunks or plain segments given back to the driver.
    pub device_frees: u64,
    /// Chunks mapped a second time to make a range contiguous, and their bytes.
    pub stitches: u64,
    #[allow(missing_docs)]
    pub stitched_bytes: u64,
    /// Requests met without growth, by a block that was free already.
    pub hits: u64,
    /// Requests that grew the pool.
    pub growths: u64,
    /// Old mappings that are still up, and bytes behind them.
    pub stale: u64,
    #[allow(missing_docs)]
    pub stale_bytes: u64,
    /// Driver calls that answered with an error other than out of memory.
    pub driver_errors: u64,
}

/// Amounts of several quantities.
#[derive(Clone, Copy)]
struct Amounts<const N: usize>([i64; N]);

/// Blocks: how many, their bytes, the bytes asked for.
type OfBlocks = Amounts<3>;

/// Free blocks or chunks: how many, their bytes.
type Sum = Amounts<2>;

impl<const N: usize> Default for Amounts<N> {
    fn default() -> Self {
        Amounts([0; N])
    }
}

impl<const N: usize> Amounts<N> {
    fn with(self, other: Self, of: impl Fn(i64, i64) -> i64) -> Self {
        Amounts(std::array::from_fn(|at| of(self.0[at], other.0[at])))
    }

    fn and(self, other: Self) -> Self {
        self.with(other, |a, b| a.wrapping_add(b))
    }

    fn less(self, other: Self) -> Self {
        self.with(other, |a, b| a.wrapping_sub(b))
    }

    /// Whether any of them is below 0.
    fn falls_short(self) -> bool {
        self.0.iter().any(|it| *it < 0)
    }

    fn get(self, at: usize) -> u64 {
        self.0[at] as u64
    }
}

impl OfBlocks {
    #[inline(always)]
    fn one(size: u64, requested: u64) -> Self {
        Amounts([1, size as i64, requested as i64])
    }

    fn sum(self) -> Sum {
        Amounts([self.0[0], self.0[1]])
    }
}

impl Sum {
    #[inline(always)]
    fn one(size: u64) -> Self {
        Amounts([1, size as i64])
    }

    #[inline(always)]
    fn bytes(bytes: u64) -> Self {
        Amounts([0, bytes as i64])
    }
}

/// What came and went, and the most that there was.
///
/// What there is follows from what came and went. Whether it is more than ever is asked of the room alone:
/// how much more there may be before the peak is passed.
#[derive(Clone, Copy, Default)]
struct Level {
    came: Sum,
    went: Sum,
    room: Sum,
    peak: Sum,
    /// What there was when what came and went was last set to 0.
    before: Sum,
}

impl Level {
    #[inline(always)]
    fn add(&mut self, more: Sum) {
        self.came = self.came.and(more);
        self.room = self.room.less(more);
        if self.room.falls_short() {
            self.raise();
        }
    }

    #[inline(always)]
    fn take(&mut self, less: Sum) {
        self.went = self.went.and(less);
        self.room = self.room.and(less);
    }

    /// Raises the peak to what there is now, where that is more, and finds out how much room there is.
    #[cold]
    #[inline(never)]
    fn raise(&mut self) {
        let now = self.now();
        self.peak = self.peak.with(now, i64::max);
        self.room = self.peak.less(now);
    }

    fn now(&self) -> Sum {
        self.before.and(self.came).less(self.went)
    }

    fn reset_peak(&mut self) {
        self.peak = Sum::default();
        self.raise();
    }

    fn reset_accumulated(&mut self) {
        self.before = self.now();
        (self.came, self.went) = Default::default();
    }
}

/// Beside the two classes: all.
const ALL: usize = 2;

/// The same of blocks in each class, and the most that there was of each and of all.
///
/// The room is that of blocks and of bytes, at least. What comes takes its bytes from it, and what goes
/// gives the bytes back that were asked for, which are no more. Where the room is used up the peaks are
/// looked at.
///
/// The classes' amounts lie side by side and not each class's, so that each is added to where it lies:
/// to gather two for one instruction takes longer.
#[derive(Clone, Copy, Default)]
struct Levels {
    came: [[i64; 2]; 3],
    went: [[i64; 2]; 3],
    count_room: [i64; 3],
    byte_room: [i64; 3],
    peaks: [OfBlocks; 3],
    /// What there was when what came and went was last set to 0.
    before: [OfBlocks; 2],
}

impl Levels {
    #[inline(always)]
    fn add(&mut self, class: usize, more: OfBlocks) {
        for (came, more) in self.came.iter_mut().zip(more.0) {
            came[class] += more;
        }
        let mut left = 0;
        for of in [class, ALL] {
            self.count_room[of] -= more.0[0];
            self.byte_room[of] -= more.0[1];
            left |= self.count_room[of] | self.byte_room[of];
        }
        if left < 0 {
            self.raise();
        }
    }

    #[inline(always)]
    fn take(&mut self, class: usize, less: OfBlocks) {
        for (went, less) in self.went.iter_mut().zip(less.0) {
            went[class] += less;
        }
        for of in [class, ALL] {
            self.count_room[of] += less.0[0];
            self.byte_room[of] += less.0[2];
        }
    }

    /// Raises the peaks to what there is now, where that is more, and finds out how much room there is.
    #[cold]
    #[inline(never)]
    fn raise(&mut self) {
        for (of, now) in self.levels().into_iter().enumerate() {
            let peak = self.peaks[of].with(now, i64::max);
            let room = peak.less(now);
            self.peaks[of] = peak;
            self.count_room[of] = room.0[0];
            self.byte_room[of] = room.0[1].min(room.0[2]);
        }
    }

    /// Whether so much more would be more than ever.
    #[inline(always)]
    fn would_raise(&self, class: usize, more: OfBlocks) -> bool {
        let short = [class, ALL]
            .map(|of| (self.count_room[of] - more.0[0]) | (self.byte_room[of] - more.0[1]));
        short[0] | short[1] < 0 && self.would_raise_indeed(class, more)
    }

    #[cold]
    #[inline(never)]
    fn would_raise_indeed(&self, class: usize, more: OfBlocks) -> bool {
        let levels = self.levels();
        let passes = |of: usize| self.peaks[of].less(levels[of].and(more)).falls_short();
        passes(class) || passes(ALL)
    }

    /// What there is of each class.
    fn now(&self) -> [OfBlocks; 2] {
        let (came, went) = (self.came(), of_class(&self.went));
        [0, 1].map(|class| self.before[class].and(came[class]).less(went[class]))
    }

    /// The same, and of all.
    fn levels(&self) -> [OfBlocks; 3] {
        let [small, large] = self.now();
        [small, large, small.and(large)]
    }

    /// What came since that was last set to 0.
    fn came(&self) -> [OfBlocks; 2] {
        of_class(&self.came)
    }

    fn reset_peaks(&mut self) {
        self.peaks = Default::default();
        self.raise();
    }

    fn reset_accumulated(&mut self) {
        self.before = self.now();
        (self.came, self.went) = Default::default();
    }
}

fn of_class(amounts: &[[i64; 2]; 3]) -> [OfBlocks; 2] {
    [0, 1].map(|class| Amounts(amounts.map(|of| of[class])))
}

/// What a class, or all, has of segments and of what is free in them: those are large.
fn of_segments(of: usize, sum: Sum) -> Sum {
    match of == Class::Small as usize {
        true => Sum::default(),
        false => sum,
    }
}

/// What there is of one class or of both, or was, or what came.
#[derive(Clone, Copy)]
struct State {
    blocks: OfBlocks,
    /// Freed by the program while other streams may still use it.
    pending: Sum,
    free_blocks: Sum,
    held: Sum,
}

impl State {
    fn and(self, other: State) -> State {
        State {
            blocks: self.blocks.and(other.blocks),
            pending: self.pending.and(other.pending),
            free_blocks: self.free_blocks.and(other.free_blocks),
            held: self.held.and(other.held),
        }
    }
}

/// The most that there was, of one class or of both.
struct Peak {
    blocks: OfBlocks,
    active: Sum,
    free_blocks: Sum,
    held: Sum,
}

/// What is counted of the blocks of one origin: few figures, from which PyTorch's follow, so that a block
/// that comes or goes costs a handful of additions. What was removed is what was added less what there is;
/// active is live and pending together.
#[derive(Clone, Default)]
struct Account {
    /// Blocks in use; of those that are pending what was asked for.
    live: Levels,
    /// By class.
    pending: [Sum; 2],
    /// The same when what came was last set to 0.
    pending_before: [Sum; 2],
    /// The most that was live and pending together, of each class and of all. At least what was live.
    active: [Sum; 3],
}

impl Account {
    #[inline(always)]
    fn allocated(&mut self, size: u64, requested: u64) {
        let one = OfBlocks::one(size, requested);
        self.live.add(Class::of(size) as usize, one);
        if self.is_pending() {
            self.raise_active();
        }
    }

    /// Whether anything is. Where nothing is, the peak of what is active is that of what is live.
    #[inline(always)]
    fn is_pending(&self) -> bool {
        self.pending[0].0[0] | self.pending[1].0[0] != 0
    }

    #[cold]
    #[inline(never)]
    fn raise_active(&mut self) {
        let now = self.now_active();
        for (peak, now) in self.active.iter_mut().zip(now) {
            *peak = peak.with(now, i64::max);
        }
    }

    /// What is live and pending, of each class and of all.
    fn now_active(&self) -> [Sum; 3] {
        let live = self.live.now().map(OfBlocks::sum);
        let [small, large] = [0, 1].map(|class| live[class].and(self.pending[class]));
        [small, large, small.and(large)]
    }

    #[inline]
    fn would_peak(&self, size: u64, requested: u64) -> bool {
        let class = Class::of(size) as usize;
        self.live.would_raise(class, OfBlocks::one(size, requested))
            || self.is_pending() && self.would_raise_active(class, size)
    }

    #[cold]
    #[inline(never)]
    fn would_raise_active(&self, class: usize, size: u64) -> bool {
        let now = self.now_active();
        [class, ALL].into_iter().any(|of| {
            let most = self.active[of].with(self.live.peaks[of].sum(), i64::max);
            most.less(now[of].and(Sum::one(size))).falls_short()
        })
    }

    fn deferred(&mut self, size: u64, requested: u64) {
        let class = Class::of(size) as usize;
        self.pending[class] = self.pending[class].and(Sum::one(size));
        // It was counted until just now, so that there was room for it.
        self.live.went[2][class] -= requested as i64;
        for of in [class, ALL] {
            self.live.byte_room[of] -= requested as i64;
        }
        self.raise_active();
    }

    fn deferred_completed(&mut self, size: u64, requested: u64) {
        let class = Class::of(size) as usize;
        self.pending[class] = self.pending[class].less(Sum::one(size));
        // There is no more room for it: its bytes went before.
        self.live.went[2][class] += requested as i64;
    }

    fn recycled(&mut self, class: Class, count: u64, bytes: u64, requested: u64) {
        for (at, amount) in [count, bytes, requested].into_iter().enumerate() {
            self.live.came[at][class as usize] += amount as i64;
            self.live.went[at][class as usize] += amount as i64;
        }
    }

    fn reset_peaks(&mut self) {
        self.live.reset_peaks();
        self.active = Default::default();
        self.raise_active();
    }

    fn reset_accumulated(&mut self) {
        self.live.reset_accumulated();
        self.pending_before = self.pending;
    }
}

/// The counting itself: of each origin's blocks, and of the memory that they all lie in. All segments are
/// large, and so is what is free in them: a free block changes its size with almost every block, and to have it
/// change its class cost a seventh of all the time of a pair.
#[derive(Clone, Default)]
pub struct Counters {
    allocator: Account,
    cuda: Account,
    free_blocks: Level,
    held: Level,
    events: Events,
    /// Those of the events that PyTorch counts, and that were for requests of [`Origin::Cuda`].
    cuda_retries: Retries,
}

/// What was tried for requests that did not fit: retries, refusals, waits for the device.
#[derive(Clone, Copy, Default)]
pub struct Retries([u64; 3]);

impl Deref for Counters {
    type Target = Events;
    fn deref(&self) -> &Events {
        &self.events
    }
}

impl DerefMut for Counters {
    #[inline]
    fn deref_mut(&mut self) -> &mut Events {
        &mut self.events
    }
}

impl Counters {
    #[inline(always)]
    fn of(&self, origin: Origin) -> &Account {
        match origin {
            Origin::Allocator => &self.allocator,
            Origin::Cuda => &self.cuda,
        }
    }

    #[inline(always)]
    fn of_mut(&mut self, origin: Origin) -> &mut Account {
        match origin {
            Origin::Allocator => &mut self.allocator,
            Origin::Cuda => &mut self.cuda,
        }
    }

    /// A block was handed out.
    #[inline(always)]
    pub fn allocated(&mut self, origin: Origin, size: u64, requested: u64) {
        self.of_mut(origin).allocated(size, requested);
    }

    /// Whether handing out a block of this size would set any peak anew. One that is too large to be
    /// looked at sets none.
    #[inline]
    pub fn would_peak(&self, origin: Origin, size: u64, requested: u64) -> bool {
        size <= crate::core::LARGEST_REQUEST && self.of(origin).would_peak(size, requested)
    }

    /// The program gave the block back.
    #[inline(always)]
    pub fn freed(&mut self, origin: Origin, size: u64, requested: u64) {
        let one = OfBlocks::one(size, requested);
        let live = &mut self.of_mut(origin).live;
        live.take(Class::of(size) as usize, one);
    }

    /// The same, out of the way of [`Counters::freed`] for the allocator's own.
    #[inline(never)]
    pub fn freed_by(&mut self, origin: Origin, size: u64, requested: u64) {
        self.freed(origin, size, requested);
    }

    /// The block that was given back may still be in use on another stream. Until it is not, what
    /// was asked for counts as such, as in PyTorch.
    pub fn deferred(&mut self, origin: Origin, size: u64, requested: u64) {
        self.of_mut(origin).deferred(size, requested);
    }

    /// It is so no more.
    pub fn deferred_completed(&mut self, origin: Origin, size: u64, requested: u64) {
        self.of_mut(origin).deferred_completed(size, requested);
    }

    /// Blocks of one class went back and were handed out again unchanged, `count` times in all,
    /// without ever being free. No peak can have been passed: each went back first.
    pub fn recycled(
        &mut self,
        origin: Origin,
        class: Class,
        count: u64,
        bytes: u64,
        requested: u64,
    ) {
        self.events.hits += count;
        let account = self.of_mut(origin);
        account.recycled(class, count, bytes, requested);
    }

    /// What was tried up to now that is not known to have been for others than the allocator.
    pub fn retries(&self) -> Retries {
        let Events {
            alloc_retries,
            ooms,
            syncs,
            ..
        } = self.events;
        Retries([alloc_retries, ooms, syncs])
    }

    /// What has been tried since was for a request of [`Origin::Cuda`].
    pub fn attribute_retries_to_cuda(&mut self, before: Retries) {
        let now = self.retries();
        for (at, for_cuda) in self.cuda_retries.0.iter_mut().enumerate() {
            *for_cuda += now.0[at] - before.0[at];
        }
        self.set_retries(before);
    }

    fn set_retries(&mut self, tried: Retries) {
        let events = &mut self.events;
        [events.alloc_retries, events.ooms, events.syncs] = tried.0;
    }

    /// A free block of `size` bytes is there that was not.
    #[inline(always)]
    pub fn free_block_added(&mut self, size: u64) {
        self.free_blocks.add(Sum::one(size));
    }

    /// A free block is there no more.
    #[inline(always)]
    pub fn free_block_removed(&mut self, size: u64) {
        self.free_blocks.take(Sum::one(size));
    }

    /// So many bytes became free, and one free block with so many free blocks beside them, two at most.
    #[inline(always)]
    pub fn free_block_coalesced(&mut self, size: u64, beside: u64) {
        let goes = beside / 2;
        self.free_blocks.take(Amounts([goes as i64, 0]));
        let comes = 1 + goes - beside;
        self.free_blocks.add(Amounts([comes as i64, size as i64]));
    }

    /// A free block became `more` bytes larger.
    pub fn free_block_grown(&mut self, more: u64) {
        self.free_blocks.add(Sum::bytes(more));
    }

    /// A free block became `less` bytes smaller, and is not gone.
    #[inline(always)]
    pub fn free_block_shrunk(&mut self, less: u64) {
        self.free_blocks.take(Sum::bytes(less));
    }

    /// Memory was taken from the driver.
    pub fn chunk_added(&mut self, size: u64) {
        self.events.device_allocs += 1;
        self.held.add(Sum::one(size));
    }

    /// Memory was given back to the driver.
    pub fn chunk_removed(&mut self, size: u64) {
        self.events.device_frees += 1;
        self.held.take(Sum::one(size));
    }

    /// Bytes of each origin's blocks in use.
    pub fn in_use(&self, origin: Origin) -> u64 {
        self.of(origin).live.levels()[ALL].get(1)
    }

    /// Bytes held from the driver.
    pub fn reserved(&self) -> u64 {
        self.held.now().get(1)
    }

    /// Everything counted so far, with the blocks of this origin.
    pub fn read(&self, origin: Origin) -> PoolStats {
        let Counters {
            free_blocks, held, ..
        } = self;
        let Account {
            live,
            pending,
            pending_before,
            active,
        } = self.of(origin);
        let states = |blocks: [OfBlocks; 2], pending: [Sum; 2], free_blocks: Sum, held: Sum| {
            let [small, large] = [0, 1].map(|class| State {
                blocks: blocks[class],
                pending: pending[class],
                free_blocks: of_segments(class, free_blocks),
                held: of_segments(class, held),
            });
            [small, large, small.and(large)]
        };
        let before = states(
            live.before,
            *pending_before,
            free_blocks.before,
            held.before,
        );
        let came = states(live.came(), Default::default(), free_blocks.came, held.came);
        let now = states(live.now(), *pending, free_blocks.now(), held.now());
        let [small, large, all] = [0, 1, ALL].map(|of| {
            let peak = Peak {
                blocks: live.peaks[of],
                active: active[of],
                free_blocks: of_segments(of, free_blocks.peak),
                held: of_segments(of, held.peak),
            };
            usage(&before[of], &came[of], &now[of], &peak)
        });
        let mut events = self.events;
        if origin == Origin::Cuda {
            [events.alloc_retries, events.ooms, events.syncs] = self.cuda_retries.0;
        }
        PoolStats {
            all,
            small,
            large,
            pending_bytes: now[ALL].pending.get(1),
            events,
        }
    }

    /// Sets every peak to what there is now.
    pub fn reset_peaks(&mut self) {
        self.allocator.reset_peaks();
        self.cuda.reset_peaks();
        self.free_blocks.reset_peak();
        self.held.reset_peak();
    }

    /// Starts counting anew what was ever added and removed, as PyTorch's
    /// `reset_accumulated_memory_stats`: `allocated` and `freed` are 0 after it, and so are the five
    /// events that PyTorch counts.
    pub fn reset_accumulated(&mut self) {
        self.allocator.reset_accumulated();
        self.cuda.reset_accumulated();
        self.free_blocks.reset_accumulated();
        self.held.reset_accumulated();
        self.events.device_allocs = 0;
        self.events.device_frees = 0;
        self.set_retries(Retries::default());
        self.cuda_retries = Retries::default();
    }
}

fn usage(before: &State, came: &State, now: &State, peak: &Peak) -> Usage {
    let flow = |before: u64, added: u64, current: u64, peak| Stat {
        allocated: added,
        freed: before + added - current,
        current,
        peak,
    };
    let flows = |before: Sum, added: Sum, now: Sum, peak: Sum| {
        [0, 1].map(|at| flow(before.get(at), added.get(at), now.get(at), peak.get(at)))
    };
    let (was_live, is_live) = (before.blocks.sum(), now.blocks.sum());
    let (was_active, is_active) = (was_live.and(before.pending), is_live.and(now.pending));
    // Where nothing was pending the two are the same.
    let most_active = peak.active.with(peak.blocks.sum(), i64::max);
    let live = came.blocks.sum();
    let [allocation, allocated_bytes] = flows(was_live, live, is_live, peak.blocks.sum());
    let [active, active_bytes] = flows(was_active, live, is_active, most_active);
    let [inactive_split, inactive_split_bytes] = flows(
        before.free_blocks,
        came.free_blocks,
        now.free_blocks,
        peak.free_blocks,
    );
    let [segment, reserved_bytes] = flows(before.held, came.held, now.held, peak.held);
    Usage {
        allocation,
        allocated_bytes,
        requested_bytes: flow(
            before.blocks.get(2),
            came.blocks.get(2),
            now.blocks.get(2),
            peak.blocks.get(2),
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

    /// What there is and the most that there was: blocks, their bytes, bytes asked for, blocks and bytes
    /// that are active.
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
