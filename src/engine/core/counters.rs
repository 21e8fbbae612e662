//! What the pool counts, in PyTorch's terms: `allocated` minus `freed` is `current`, and `peak`
//! is the highest `current` since the last reset.

use std::ops::{Deref, DerefMut};

/// One quantity: how much was ever added, how much removed, and the highest difference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
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
    pub allocation: Flow,
    pub allocated_bytes: Flow,
    pub requested_bytes: Flow,
    pub active: Flow,
    pub active_bytes: Flow,
    pub inactive_split: Flow,
    pub inactive_split_bytes: Flow,
    pub segment: Flow,
    pub reserved_bytes: Flow,
}

/// Which of PyTorch's two classes a block is counted in, by its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Up to [`super::SMALL`] bytes.
    Small,
    /// More.
    Large,
}

impl Class {
    /// The class of a block of `size` bytes.
    #[inline]
    pub fn of(size: u64) -> Self {
        [Class::Small, Class::Large][usize::from(size > super::SMALL)]
    }
}

/// What the pool has counted, as it is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// All blocks and all segments.
    pub all: Usage,
    /// Blocks up to 1 MiB; segments are shared, so they count as large.
    pub small: Usage,
    /// Blocks above 1 MiB, and all segments.
    pub large: Usage,
    /// Bytes freed by the program that other streams may still use.
    pub pending_bytes: u64,
    /// What happened, other than blocks that came and went.
    pub events: Events,
}

impl Deref for Counters {
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

/// Amounts of several quantities. What is done to all of them at once the compiler does at once.
#[derive(Clone, Copy)]
struct Amounts<const N: usize>([i64; N]);

/// Blocks: how many, their bytes, the bytes asked for.
type OfBlocks = Amounts<4>;

/// Holes or chunks: how many, their bytes.
type Sum = Amounts<2>;

impl<const N: usize> Default for Amounts<N> {
    fn default() -> Self {
        Amounts([0; N])
    }
}

impl<const N: usize> Amounts<N> {
    #[inline(always)]
    fn with(self, other: Self, of: impl Fn(i64, i64) -> i64) -> Self {
        Amounts(std::array::from_fn(|at| of(self.0[at], other.0[at])))
    }

    #[inline(always)]
    fn and(self, other: Self) -> Self {
        self.with(other, |a, b| a.wrapping_add(b))
    }

    #[inline(always)]
    fn less(self, other: Self) -> Self {
        self.with(other, |a, b| a.wrapping_sub(b))
    }

    /// Whether any of them is below 0.
    #[inline(always)]
    fn falls_short(self) -> bool {
        self.0.iter().fold(0, |all, it| all | it) < 0
    }

    fn get(self, at: usize) -> u64 {
        self.0[at] as u64
    }
}

impl OfBlocks {
    #[inline(always)]
    fn one(size: u64, requested: u64) -> Self {
        Amounts([1, size as i64, requested as i64, 0])
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

/// What there is now, kept as what is missing to the most that ever was: so whether there is more than
/// ever is a question of signs.
#[derive(Clone, Copy, Default)]
struct Level<const N: usize> {
    peak: Amounts<N>,
    room: Amounts<N>,
}

impl<const N: usize> Level<N> {
    /// So much more. True where that is more than ever, and the peak is to be raised.
    #[must_use]
    #[inline(always)]
    fn add(&mut self, more: Amounts<N>) -> bool {
        self.room = self.room.less(more);
        self.room.falls_short()
    }

    #[inline(always)]
    fn take(&mut self, less: Amounts<N>) {
        self.room = self.room.and(less);
    }

    fn now(&self) -> Amounts<N> {
        self.peak.less(self.room)
    }

    /// Raises the peak to what there is now.
    fn raise(&mut self) {
        self.peak = self.peak.with(self.now(), i64::max);
        self.room = self.room.with(Amounts::default(), i64::max);
    }

    fn reset(&mut self) {
        self.peak = self.now();
        self.room = Amounts::default();
    }
}

/// The levels of small, of large and of all.
#[derive(Clone, Copy, Default)]
struct Levels<const N: usize> {
    of: [Level<N>; 2],
    all: Level<N>,
}

impl<const N: usize> Levels<N> {
    #[must_use]
    #[inline(always)]
    fn add(&mut self, class: usize, more: Amounts<N>) -> bool {
        let (of, all) = (self.of[class].add(more), self.all.add(more));
        of | all
    }

    #[inline(always)]
    fn take(&mut self, class: usize, less: Amounts<N>) {
        self.of[class].take(less);
        self.all.take(less);
    }

    #[cold]
    #[inline(never)]
    fn raise(&mut self) {
        self.each(Level::raise);
    }

    fn each(&mut self, act: impl Fn(&mut Level<N>)) {
        self.of.iter_mut().chain([&mut self.all]).for_each(act);
    }

    fn now(&self) -> [Amounts<N>; 2] {
        self.of.map(|level| level.now())
    }
}

/// What there is now, or was, of one class or of both.
#[derive(Clone, Copy, Default)]
struct Now {
    live: Sum,
    /// Bytes asked for, of what is live or pending.
    requested: u64,
    /// Freed by the program while other streams may still use it.
    pending: Sum,
    holes: Sum,
    held: Sum,
}

impl Now {
    fn and(self, other: Now) -> Now {
        Now {
            live: self.live.and(other.live),
            requested: self.requested + other.requested,
            pending: self.pending.and(other.pending),
            holes: self.holes.and(other.holes),
            held: self.held.and(other.held),
        }
    }
}

/// What was added since the start, or since that was last reset.
#[derive(Clone, Copy, Default)]
struct Added {
    live: OfBlocks,
    holes: Sum,
    held: Sum,
}

impl Added {
    fn and(self, other: Added) -> Added {
        Added {
            live: self.live.and(other.live),
            holes: self.holes.and(other.holes),
            held: self.held.and(other.held),
        }
    }
}

/// The most that there was, of one class or of both.
struct Peak {
    live: OfBlocks,
    active: Sum,
    holes: Sum,
    held: Sum,
}

/// The counting itself: of PyTorch's many figures the few that the others follow from, so that a
/// block that comes or goes costs a handful of additions. What was removed is what was added less
/// what there is; active is live and pending together. All segments are large.
#[derive(Clone, Default)]
pub struct Tally {
    live: Levels<4>,
    holes: Levels<2>,
    held: Level<2>,
    added: [Added; 2],
    /// By class.
    pending: [Sum; 2],
    /// The most that was live and pending together, by class, and of both. At least what was live.
    active: [Sum; 2],
    active_of_all: Sum,
    events: Events,
    /// What there was when `added` was last reset.
    before: [Now; 2],
}

impl Deref for Tally {
    type Target = Events;
    fn deref(&self) -> &Events {
        &self.events
    }
}

impl DerefMut for Tally {
    #[inline]
    fn deref_mut(&mut self) -> &mut Events {
        &mut self.events
    }
}

impl Tally {
    /// A block was handed out.
    #[inline]
    pub fn allocated(&mut self, size: u64, requested: u64) {
        let (class, one) = (Class::of(size) as usize, OfBlocks::one(size, requested));
        self.added[class].live = self.added[class].live.and(one);
        if self.live.add(class, one) {
            self.live.raise();
        }
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
        let live = self.live.now().map(OfBlocks::sum);
        let active = [0, 1].map(|class| live[class].and(self.pending[class]));
        let raise = |peak: &mut Sum, now: Sum| *peak = peak.with(now, i64::max);
        raise(&mut self.active_of_all, active[0].and(active[1]));
        raise(&mut self.active[0], active[0]);
        raise(&mut self.active[1], active[1]);
    }

    /// Whether handing out a block of this size would set any peak anew. One that is too large to be
    /// looked at sets none.
    #[inline]
    pub fn would_peak(&self, size: u64, requested: u64) -> bool {
        if size > super::LARGEST_REQUEST {
            return false;
        }
        let (mut after, class) = (self.live, Class::of(size) as usize);
        let mut peaks = after.add(class, OfBlocks::one(size, requested));
        if self.is_pending() {
            let one = Sum::one(size);
            let live = self.live.now().map(OfBlocks::sum);
            let active = live[class].and(self.pending[class]).and(one);
            let other = live[1 - class].and(self.pending[1 - class]);
            let most = |active: Sum, level: &Level<4>| active.with(level.peak.sum(), i64::max);
            let of = most(self.active[class], &self.live.of[class]);
            let all = most(self.active_of_all, &self.live.all);
            peaks |= of.less(active).falls_short() || all.less(active.and(other)).falls_short();
        }
        peaks
    }

    /// The program gave the block back.
    #[inline]
    pub fn freed(&mut self, size: u64, requested: u64) {
        let one = OfBlocks::one(size, requested);
        self.live.take(Class::of(size) as usize, one);
    }

    /// The block that was given back may still be in use on another stream. Until it is not, what
    /// was asked for counts as such, as in PyTorch.
    pub fn deferred(&mut self, size: u64, requested: u64) {
        let class = Class::of(size) as usize;
        self.pending[class] = self.pending[class].and(Sum::one(size));
        let requested = Amounts([0, 0, requested as i64, 0]);
        // It was counted until just now.
        let _ = self.live.add(class, requested);
        self.raise_active();
    }

    /// It is so no more.
    pub fn let_go(&mut self, size: u64, requested: u64) {
        let class = Class::of(size) as usize;
        self.pending[class] = self.pending[class].less(Sum::one(size));
        self.live.take(class, Amounts([0, 0, requested as i64, 0]));
    }

    /// Blocks of one class went back and were handed out again unchanged, `count` times in all,
    /// without ever being free. No peak can have been passed: each went back first.
    pub fn recycled(&mut self, class: Class, count: u64, bytes: u64, requested: u64) {
        self.events.hits += count;
        let added = &mut self.added[class as usize].live;
        *added = added.and(Amounts([count as i64, bytes as i64, requested as i64, 0]));
    }

    /// A hole of `size` bytes is there that was not.
    #[inline]
    pub fn hole_added(&mut self, size: u64) {
        self.add_holes(Class::of(size) as usize, Sum::one(size));
    }

    #[inline(always)]
    fn add_holes(&mut self, class: usize, more: Sum) {
        self.added[class].holes = self.added[class].holes.and(more);
        if self.holes.add(class, more) {
            self.holes.raise();
        }
    }

    /// A hole is there no more.
    #[inline]
    pub fn hole_removed(&mut self, size: u64) {
        self.holes.take(Class::of(size) as usize, Sum::one(size));
    }

    /// A hole of `before` bytes became `more` bytes larger.
    #[inline]
    pub fn hole_grown(&mut self, before: u64, more: u64) {
        let class = Class::of(before + more);
        if class != Class::of(before) {
            self.hole_removed(before);
            self.hole_added(before + more);
            return;
        }
        self.add_holes(class as usize, Sum::bytes(more));
    }

    /// A hole of `before` bytes became `less` bytes smaller, and is not gone.
    #[inline]
    pub fn hole_cut(&mut self, before: u64, less: u64) {
        let class = Class::of(before);
        if class != Class::of(before - less) {
            self.hole_removed(before);
            self.hole_added(before - less);
            return;
        }
        self.holes.take(class as usize, Sum::bytes(less));
    }

    /// Memory was taken from the driver.
    pub fn chunk_added(&mut self, size: u64) {
        self.events.device_allocs += 1;
        let added = &mut self.added[Class::Large as usize].held;
        *added = added.and(Sum::one(size));
        if self.held.add(Sum::one(size)) {
            self.held.raise();
        }
    }

    /// Memory was given back to the driver.
    pub fn chunk_removed(&mut self, size: u64) {
        self.events.device_frees += 1;
        self.held.take(Sum::one(size));
    }

    /// Bytes in use by the program, and bytes held from the driver.
    pub fn in_use_and_held(&self) -> (u64, u64) {
        (self.live.all.now().get(1), self.held.now().get(1))
    }

    fn now(&self) -> [Now; 2] {
        let (live, holes) = (self.live.now(), self.holes.now());
        [Class::Small, Class::Large].map(|class| {
            let at = class as usize;
            Now {
                live: live[at].sum(),
                requested: live[at].get(2),
                pending: self.pending[at],
                holes: holes[at],
                held: match class {
                    Class::Small => Sum::default(),
                    Class::Large => self.held.now(),
                },
            }
        })
    }

    /// Everything counted so far.
    pub fn read(&self) -> Counters {
        let now = self.now();
        let [small, large] = [Class::Small, Class::Large].map(|class| {
            let at = class as usize;
            let peak = Peak {
                live: self.live.of[at].peak,
                active: self.active[at],
                holes: self.holes.of[at].peak,
                held: match class {
                    Class::Small => Sum::default(),
                    Class::Large => self.held.peak,
                },
            };
            usage(&self.before[at], &self.added[at], &now[at], &peak)
        });
        let both = now[0].and(now[1]);
        let peak = Peak {
            live: self.live.all.peak,
            active: self.active_of_all,
            holes: self.holes.all.peak,
            held: self.held.peak,
        };
        let all = usage(
            &self.before[0].and(self.before[1]),
            &self.added[0].and(self.added[1]),
            &both,
            &peak,
        );
        Counters {
            all,
            small,
            large,
            pending_bytes: both.pending.get(1),
            events: self.events,
        }
    }

    /// Sets every peak to what there is now.
    pub fn reset_peaks(&mut self) {
        self.live.each(Level::reset);
        self.holes.each(Level::reset);
        self.held.reset();
        self.active = Default::default();
        self.active_of_all = Sum::default();
        self.raise_active();
    }

    /// Starts counting anew what was ever added and removed, as PyTorch's
    /// `reset_accumulated_memory_stats`: `allocated` and `freed` are 0 after it, and so are the five
    /// events that PyTorch counts.
    pub fn reset_accumulated(&mut self) {
        self.added = Default::default();
        self.before = self.now();
        self.events = Events {
            alloc_retries: 0,
            ooms: 0,
            syncs: 0,
            device_allocs: 0,
            device_frees: 0,
            ..self.events
        };
    }
}

fn usage(before: &Now, added: &Added, now: &Now, peak: &Peak) -> Usage {
    let flow = |before: u64, added: u64, current: u64, peak| Flow {
        allocated: added,
        freed: before + added - current,
        current,
        peak,
    };
    let flows = |before: Sum, added: Sum, now: Sum, peak: Sum| {
        [0, 1].map(|at| flow(before.get(at), added.get(at), now.get(at), peak.get(at)))
    };
    let (was_active, is_active) = (before.live.and(before.pending), now.live.and(now.pending));
    // Where nothing was pending the two are the same.
    let most_active = peak.active.with(peak.live.sum(), i64::max);
    let live = added.live.sum();
    let [allocation, allocated_bytes] = flows(before.live, live, now.live, peak.live.sum());
    let [active, active_bytes] = flows(was_active, live, is_active, most_active);
    let [inactive_split, inactive_split_bytes] =
        flows(before.holes, added.holes, now.holes, peak.holes);
    let [segment, reserved_bytes] = flows(before.held, added.held, now.held, peak.held);
    Usage {
        allocation,
        allocated_bytes,
        requested_bytes: flow(
            before.requested,
            added.live.get(2),
            now.requested,
            peak.live.get(2),
        ),
        active,
        active_bytes,
        inactive_split,
        inactive_split_bytes,
        segment,
        reserved_bytes,
    }
}
