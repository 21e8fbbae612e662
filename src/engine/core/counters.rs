//! What the pool counts, in PyTorch's terms: `allocated` minus `freed` is `current`, and `peak`
//! is the highest `current` since the last reset.

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

impl Flow {
    #[inline]
    fn add(&mut self, amount: u64) {
        self.allocated += amount;
        self.current += amount;
        self.peak = self.peak.max(self.current);
    }

    #[inline]
    fn remove(&mut self, amount: u64) {
        self.freed += amount;
        self.current -= amount;
    }
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

macro_rules! every_flow {
    ($usage:expr, $flow:ident => $do:expr) => {
        for $flow in [
            &mut $usage.allocation,
            &mut $usage.allocated_bytes,
            &mut $usage.requested_bytes,
            &mut $usage.active,
            &mut $usage.active_bytes,
            &mut $usage.inactive_split,
            &mut $usage.inactive_split_bytes,
            &mut $usage.segment,
            &mut $usage.reserved_bytes,
        ] {
            $do
        }
    };
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

/// Everything that the pool counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// All blocks and all segments.
    pub all: Usage,
    /// Blocks up to 1 MiB; segments are shared, so they count as large.
    pub small: Usage,
    /// Blocks above 1 MiB, and all segments.
    pub large: Usage,
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
    /// Bytes freed by the program that other streams may still use.
    pub pending_bytes: u64,
    /// Old mappings that are still up, and bytes behind them.
    pub stale: u64,
    #[allow(missing_docs)]
    pub stale_bytes: u64,
    /// Driver calls that answered with an error other than out of memory.
    pub driver_errors: u64,
}

impl Counters {
    #[inline]
    fn class(&mut self, size: u64) -> &mut Usage {
        match Class::of(size) {
            Class::Small => &mut self.small,
            Class::Large => &mut self.large,
        }
    }

    #[inline]
    pub(super) fn allocated(&mut self, size: u64, requested: u64) {
        let class = self.class(size);
        class.allocation.add(1);
        class.allocated_bytes.add(size);
        class.requested_bytes.add(requested);
        class.active.add(1);
        class.active_bytes.add(size);
        let all = &mut self.all;
        all.allocation.add(1);
        all.allocated_bytes.add(size);
        all.requested_bytes.add(requested);
        all.active.add(1);
        all.active_bytes.add(size);
    }

    /// Blocks of one class went back and were handed out again unchanged, `count` times in all,
    /// without ever being free. No peak can have been passed: each went back first.
    pub fn recycled(&mut self, class: Class, count: u64, bytes: u64, requested: u64) {
        self.hits += count;
        let class = match class {
            Class::Small => &mut self.small,
            Class::Large => &mut self.large,
        };
        for usage in [class, &mut self.all] {
            for (flow, amount) in [
                (&mut usage.allocation, count),
                (&mut usage.active, count),
                (&mut usage.allocated_bytes, bytes),
                (&mut usage.active_bytes, bytes),
                (&mut usage.requested_bytes, requested),
            ] {
                flow.allocated += amount;
                flow.freed += amount;
            }
        }
    }

    /// The program gave the block back.
    #[inline]
    pub(super) fn freed(&mut self, size: u64, requested: u64) {
        let class = self.class(size);
        class.allocation.remove(1);
        class.allocated_bytes.remove(size);
        class.requested_bytes.remove(requested);
        let all = &mut self.all;
        all.allocation.remove(1);
        all.allocated_bytes.remove(size);
        all.requested_bytes.remove(requested);
    }

    /// No stream uses the block any more.
    #[inline]
    pub(super) fn retired(&mut self, size: u64) {
        let class = self.class(size);
        class.active.remove(1);
        class.active_bytes.remove(size);
        self.all.active.remove(1);
        self.all.active_bytes.remove(size);
    }

    #[inline]
    pub(super) fn hole_added(&mut self, size: u64) {
        let class = self.class(size);
        class.inactive_split.add(1);
        class.inactive_split_bytes.add(size);
        self.all.inactive_split.add(1);
        self.all.inactive_split_bytes.add(size);
    }

    /// A hole of `before` bytes became `more` bytes larger.
    pub(super) fn hole_grown(&mut self, before: u64, more: u64) {
        if Class::of(before) == Class::of(before + more) {
            self.class(before).inactive_split_bytes.add(more);
            self.all.inactive_split_bytes.add(more);
        } else {
            self.hole_removed(before);
            self.hole_added(before + more);
        }
    }

    /// Whether handing out a block of this size would set any peak anew.
    #[inline]
    pub fn would_peak(&self, size: u64, requested: u64) -> bool {
        let usages = match Class::of(size) {
            Class::Small => [&self.all, &self.small],
            Class::Large => [&self.all, &self.large],
        };
        usages.into_iter().any(|usage| {
            let above = |flow: &Flow, more| flow.current.saturating_add(more) > flow.peak;
            above(&usage.active_bytes, size)
                || above(&usage.allocated_bytes, size)
                || above(&usage.requested_bytes, requested)
                || usage.allocation.current >= usage.allocation.peak
                || usage.active.current >= usage.active.peak
        })
    }

    #[inline]
    pub(super) fn hole_removed(&mut self, size: u64) {
        let class = self.class(size);
        class.inactive_split.remove(1);
        class.inactive_split_bytes.remove(size);
        self.all.inactive_split.remove(1);
        self.all.inactive_split_bytes.remove(size);
    }

    pub(super) fn chunk_added(&mut self, size: u64) {
        self.device_allocs += 1;
        for usage in [&mut self.all, &mut self.large] {
            usage.segment.add(1);
            usage.reserved_bytes.add(size);
        }
    }

    pub(super) fn chunk_removed(&mut self, size: u64) {
        self.device_frees += 1;
        for usage in [&mut self.all, &mut self.large] {
            usage.segment.remove(1);
            usage.reserved_bytes.remove(size);
        }
    }

    /// Sets every peak to what there is now.
    pub fn reset_peaks(&mut self) {
        for usage in [&mut self.all, &mut self.small, &mut self.large] {
            every_flow!(usage, flow => flow.peak = flow.current);
        }
    }

    /// Starts counting anew what was ever added and removed, as PyTorch's
    /// `reset_accumulated_memory_stats`: `allocated` and `freed` are 0 after it.
    pub fn reset_accumulated(&mut self) {
        for usage in [&mut self.all, &mut self.small, &mut self.large] {
            every_flow!(usage, flow => (flow.allocated, flow.freed) = (0, 0));
        }
        (self.alloc_retries, self.ooms) = (0, 0);
    }
}
