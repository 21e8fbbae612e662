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
        if size <= super::SMALL {
            Class::Small
        } else {
            Class::Large
        }
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
    /// Times that the pool waited for the whole device.
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

/// So many of something, and their bytes.
#[derive(Clone, Copy, Default)]
struct Sum {
    count: u64,
    bytes: u64,
}

impl Sum {
    #[inline]
    fn add(&mut self, size: u64) {
        self.count += 1;
        self.bytes += size;
    }

    #[inline]
    fn take(&mut self, size: u64) {
        self.count -= 1;
        self.bytes -= size;
    }

    #[inline]
    fn and(self, other: Sum) -> Sum {
        Sum {
            count: self.count + other.count,
            bytes: self.bytes + other.bytes,
        }
    }

    #[inline]
    fn is_below(self, other: Sum) -> bool {
        other.count > self.count || other.bytes > self.bytes
    }

    /// Raises a peak to what there is now.
    #[inline]
    fn raise(&mut self, now: Sum) {
        self.count = self.count.max(now.count);
        self.bytes = self.bytes.max(now.bytes);
    }
}

/// What there is now.
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
    live: Sum,
    requested: u64,
    holes: Sum,
    held: Sum,
}

impl Added {
    fn and(self, other: Added) -> Added {
        Added {
            live: self.live.and(other.live),
            requested: self.requested + other.requested,
            holes: self.holes.and(other.holes),
            held: self.held.and(other.held),
        }
    }
}

/// The most that there was.
#[derive(Clone, Copy, Default)]
struct Peak {
    live: Sum,
    requested: u64,
    active: Sum,
    holes: Sum,
    held: Sum,
}

impl Peak {
    fn raise(&mut self, now: &Now) {
        self.live.raise(now.live);
        self.requested = self.requested.max(now.requested);
        self.active.raise(now.live.and(now.pending));
        self.holes.raise(now.holes);
        self.held.raise(now.held);
    }

    #[inline]
    fn is_below(&self, live: Sum, requested: u64) -> bool {
        self.live.is_below(live) || requested > self.requested
    }
}

/// The counting itself: of PyTorch's many figures the few that the others follow from, so that a
/// block that comes or goes costs a handful of additions. What was removed is what was added less
/// what there is; active is live and pending together; all is small and large together, but for the
/// peaks.
#[derive(Clone, Default)]
pub struct Tally {
    now: [Now; 2],
    added: [Added; 2],
    /// By class.
    peak: [Peak; 2],
    /// Of both classes together.
    peak_of_all: Peak,
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
        let class = Class::of(size) as usize;
        let (now, added) = (&mut self.now[class], &mut self.added[class]);
        now.live.add(size);
        now.requested += requested;
        added.live.add(size);
        added.requested += requested;
        if self.passes_peak(class, Sum::default(), 0) {
            self.raise_peaks();
        }
    }

    /// Whether handing out a block of this size would set any peak anew. One that is too large to be
    /// looked at sets none.
    #[inline]
    pub fn would_peak(&self, size: u64, requested: u64) -> bool {
        if size > super::LARGEST_REQUEST {
            return false;
        }
        let more = Sum {
            count: 1,
            bytes: size,
        };
        self.passes_peak(Class::of(size) as usize, more, requested)
    }

    /// Whether a peak is passed with so much more live in one class.
    #[inline]
    fn passes_peak(&self, class: usize, more: Sum, requested: u64) -> bool {
        let [small, large] = &self.now;
        let now = &self.now[class];
        let live = small.live.and(large.live).and(more);
        let pending = small.pending.and(large.pending);
        self.peak[class].is_below(now.live.and(more), now.requested + requested)
            || self
                .peak_of_all
                .is_below(live, small.requested + large.requested + requested)
            // The peak of what is active is never below that of what is live, so it can be passed
            // alone only where something is pending.
            || (pending.count > 0
                && (self.peak_of_all.active.is_below(live.and(pending))
                    || self.peak[class]
                        .active
                        .is_below(now.live.and(now.pending).and(more))))
    }

    #[cold]
    #[inline(never)]
    fn raise_peaks(&mut self) {
        let [small, large] = &self.now;
        self.peak_of_all.raise(&small.and(*large));
        self.peak[0].raise(small);
        self.peak[1].raise(large);
    }

    /// The program gave the block back.
    #[inline]
    pub fn freed(&mut self, size: u64, requested: u64) {
        let now = &mut self.now[Class::of(size) as usize];
        now.live.take(size);
        now.requested -= requested;
    }

    /// The block that was given back may still be in use on another stream. Until it is not, what
    /// was asked for counts as such, as in PyTorch.
    pub fn deferred(&mut self, size: u64, requested: u64) {
        let now = &mut self.now[Class::of(size) as usize];
        now.pending.add(size);
        now.requested += requested;
    }

    /// It is so no more.
    pub fn let_go(&mut self, size: u64, requested: u64) {
        let now = &mut self.now[Class::of(size) as usize];
        now.pending.take(size);
        now.requested -= requested;
    }

    /// Blocks of one class went back and were handed out again unchanged, `count` times in all,
    /// without ever being free. No peak can have been passed: each went back first.
    pub fn recycled(&mut self, class: Class, count: u64, bytes: u64, requested: u64) {
        self.events.hits += count;
        let added = &mut self.added[class as usize];
        added.live = added.live.and(Sum { count, bytes });
        added.requested += requested;
    }

    /// A hole of `size` bytes is there that was not.
    #[inline]
    pub fn hole_added(&mut self, size: u64) {
        let class = Class::of(size) as usize;
        self.now[class].holes.add(size);
        self.added[class].holes.add(size);
        self.holes_risen(class);
    }

    /// A hole is there no more.
    #[inline]
    pub fn hole_removed(&mut self, size: u64) {
        self.now[Class::of(size) as usize].holes.take(size);
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
        let class = class as usize;
        self.now[class].holes.bytes += more;
        self.added[class].holes.bytes += more;
        self.holes_risen(class);
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
        self.now[class as usize].holes.bytes -= less;
    }

    #[inline]
    fn holes_risen(&mut self, class: usize) {
        let [small, large] = &self.now;
        if self
            .peak_of_all
            .holes
            .is_below(small.holes.and(large.holes))
            || self.peak[class].holes.is_below(self.now[class].holes)
        {
            self.raise_peaks();
        }
    }

    /// Memory was taken from the driver.
    pub fn chunk_added(&mut self, size: u64) {
        self.events.device_allocs += 1;
        let large = Class::Large as usize;
        self.now[large].held.add(size);
        self.added[large].held.add(size);
        self.raise_peaks();
    }

    /// Memory was given back to the driver.
    pub fn chunk_removed(&mut self, size: u64) {
        self.events.device_frees += 1;
        self.now[Class::Large as usize].held.take(size);
    }

    /// Bytes in use by the program, and bytes held from the driver.
    pub fn in_use_and_held(&self) -> (u64, u64) {
        let [small, large] = &self.now;
        (
            small.live.bytes + large.live.bytes,
            small.held.bytes + large.held.bytes,
        )
    }

    /// Everything counted so far.
    pub fn read(&self) -> Counters {
        let of = |class: usize| {
            usage(
                &self.before[class],
                &self.added[class],
                &self.now[class],
                &self.peak[class],
            )
        };
        let now = self.now[0].and(self.now[1]);
        let all = usage(
            &self.before[0].and(self.before[1]),
            &self.added[0].and(self.added[1]),
            &now,
            &self.peak_of_all,
        );
        Counters {
            all,
            small: of(0),
            large: of(1),
            pending_bytes: now.pending.bytes,
            events: self.events,
        }
    }

    /// Sets every peak to what there is now.
    pub fn reset_peaks(&mut self) {
        self.peak = Default::default();
        self.peak_of_all = Peak::default();
        self.raise_peaks();
    }

    /// Starts counting anew what was ever added and removed, as PyTorch's
    /// `reset_accumulated_memory_stats`: `allocated` and `freed` are 0 after it, and so are the five
    /// events that PyTorch counts.
    pub fn reset_accumulated(&mut self) {
        self.added = Default::default();
        self.before = self.now;
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
    let (was_active, active) = (before.live.and(before.pending), now.live.and(now.pending));
    let counts = |before: Sum, added: Sum, now: Sum, peak: Sum| {
        flow(before.count, added.count, now.count, peak.count)
    };
    let bytes = |before: Sum, added: Sum, now: Sum, peak: Sum| {
        flow(before.bytes, added.bytes, now.bytes, peak.bytes)
    };
    Usage {
        allocation: counts(before.live, added.live, now.live, peak.live),
        allocated_bytes: bytes(before.live, added.live, now.live, peak.live),
        requested_bytes: flow(
            before.requested,
            added.requested,
            now.requested,
            peak.requested,
        ),
        active: counts(was_active, added.live, active, peak.active),
        active_bytes: bytes(was_active, added.live, active, peak.active),
        inactive_split: counts(before.holes, added.holes, now.holes, peak.holes),
        inactive_split_bytes: bytes(before.holes, added.holes, now.holes, peak.holes),
        segment: counts(before.held, added.held, now.held, peak.held),
        reserved_bytes: bytes(before.held, added.held, now.held, peak.held),
    }
}
