//! A second account of what a program allocates and frees, and the identities that hold between counters.

use crate::harness::gpu::{MIB, rounded};
use concertina_engine::core::{Origin, PoolStats, Stat, Usage};
use concertina_engine::device::Figures;

/// What was added to and taken from one quantity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    added: u64,
    taken: u64,
    peak: u64,
}

impl Sum {
    fn add(&mut self, amount: u64) {
        self.added += amount;
        // A runner may free what another allocated, and then has no peak of its own.
        self.peak = self.peak.max(self.added.saturating_sub(self.taken));
    }
}

/// One of PyTorch's classes.
#[derive(Clone, Copy, Debug, Default)]
struct Class {
    blocks: Sum,
    bytes: Sum,
    requested: Sum,
    /// Blocks that were freed while other streams were recorded on them: their number, bytes and requested
    /// bytes.
    shared: (u64, u64, u64),
}

/// What a program allocated and freed, for each origin, counted without the pool.
#[derive(Clone, Debug, Default)]
pub struct Accounts {
    of_allocator: Account,
    of_cuda: Account,
}

impl Accounts {
    pub fn of(&mut self, origin: Origin) -> &mut Account {
        match origin {
            Origin::Allocator => &mut self.of_allocator,
            Origin::Cuda => &mut self.of_cuda,
        }
    }

    pub fn agree_with(&self, figures: &Figures) {
        self.of_allocator.agrees_with(&figures.counters);
        self.of_cuda.agrees_with(&figures.of_cuda);
    }

    /// Like `agree_with`, where no freed block is in use any more.
    pub fn agree_when_idle(&self, figures: &Figures) {
        self.of_allocator.agrees_when_idle(&figures.counters);
        self.of_cuda.agrees_when_idle(&figures.of_cuda);
    }
}

/// The account of one origin.
#[derive(Clone, Debug, Default)]
pub struct Account {
    all: Class,
    small: Class,
    large: Class,
}

impl Account {
    fn classes(&mut self, requested: u64) -> [&mut Class; 2] {
        let small = rounded(requested) <= MIB;
        [
            &mut self.all,
            if small {
                &mut self.small
            } else {
                &mut self.large
            },
        ]
    }

    pub fn allocated(&mut self, requested: u64) {
        for class in self.classes(requested) {
            class.blocks.add(1);
            class.bytes.add(rounded(requested));
            class.requested.add(requested);
        }
    }

    pub fn freed(&mut self, requested: u64, shared: bool) {
        for class in self.classes(requested) {
            class.blocks.taken += 1;
            class.bytes.taken += rounded(requested);
            class.requested.taken += requested;
            if shared {
                class.shared.0 += 1;
                class.shared.1 += rounded(requested);
                class.shared.2 += requested;
            }
        }
    }

    /// Compares with what the pool counted. Only the pool knows when blocks that other streams
    /// used came free, so those are known between bounds.
    fn agrees_with(&self, counters: &PoolStats) {
        for (name, class, usage) in [
            ("all", &self.all, &counters.all),
            ("small", &self.small, &counters.small),
            ("large", &self.large, &counters.large),
        ] {
            for (what, sum, flow) in [
                ("allocation", class.blocks, usage.allocation),
                ("allocated_bytes", class.bytes, usage.allocated_bytes),
            ] {
                let counted = Sum {
                    added: flow.allocated,
                    taken: flow.freed,
                    peak: flow.peak,
                };
                assert_eq!(counted, sum, "{what} of {name}");
                assert_eq!(flow.current, sum.added - sum.taken, "{what} of {name}");
            }
            for (what, sum, shared, flow) in [
                ("active", class.blocks, class.shared.0, usage.active),
                (
                    "active_bytes",
                    class.bytes,
                    class.shared.1,
                    usage.active_bytes,
                ),
                (
                    "requested_bytes",
                    class.requested,
                    class.shared.2,
                    usage.requested_bytes,
                ),
            ] {
                assert_eq!(flow.allocated, sum.added, "{what} of {name}");
                let surely_freed = sum.taken - shared;
                assert!(
                    (surely_freed..=sum.taken).contains(&flow.freed),
                    "{what} of {name}"
                );
                assert!(
                    (sum.peak..=sum.peak + shared).contains(&flow.peak),
                    "{what} of {name}"
                );
            }
        }
    }

    fn agrees_when_idle(&self, counters: &PoolStats) {
        self.agrees_with(counters);
        assert_eq!(counters.pending_bytes, 0);
        for usage in [&counters.all, &counters.small, &counters.large] {
            assert_eq!(usage.active.current, usage.allocation.current);
            assert_eq!(usage.active_bytes.current, usage.allocated_bytes.current);
        }
        for (class, usage) in [
            (&self.all, &counters.all),
            (&self.small, &counters.small),
            (&self.large, &counters.large),
        ] {
            let Sum { added, taken, .. } = class.requested;
            assert_eq!(usage.requested_bytes.current, added - taken);
        }
    }
}

pub fn flows(usage: &Usage) -> [(&'static str, Stat); 9] {
    [
        ("allocation", usage.allocation),
        ("segment", usage.segment),
        ("active", usage.active),
        ("inactive_split", usage.inactive_split),
        ("allocated_bytes", usage.allocated_bytes),
        ("reserved_bytes", usage.reserved_bytes),
        ("active_bytes", usage.active_bytes),
        ("inactive_split_bytes", usage.inactive_split_bytes),
        ("requested_bytes", usage.requested_bytes),
    ]
}

/// Asserts what always holds between counters, as long as they are not reset.
pub fn identities(figures: &Figures) {
    let (own, others) = (&figures.counters, &figures.of_cuda);
    of_one_origin(own);
    of_one_origin(others);
    for (own, others) in [(own.all, others.all), (own.large, others.large)] {
        assert_eq!(own.reserved_bytes, others.reserved_bytes);
        assert_eq!(own.inactive_split_bytes, others.inactive_split_bytes);
    }
    let active = own.all.active_bytes.current + others.all.active_bytes.current;
    let held = active + own.all.inactive_split_bytes.current;
    assert_eq!(own.all.reserved_bytes.current, held);
}

/// PyTorch's identities, for one origin's blocks.
fn of_one_origin(counters: &PoolStats) {
    let PoolStats {
        all, small, large, ..
    } = counters;
    for (name, flow) in [all, small, large].into_iter().flat_map(flows) {
        assert_eq!(flow.allocated - flow.freed, flow.current, "{name}");
        assert!(flow.peak >= flow.current, "{name}");
    }
    for ((name, all), (small, large)) in flows(all)
        .into_iter()
        .zip(flows(small).into_iter().zip(flows(large)))
    {
        let (small, large) = (small.1, large.1);
        assert_eq!(all.current, small.current + large.current, "{name}");
        assert_eq!(all.allocated, small.allocated + large.allocated, "{name}");
        assert_eq!(all.freed, small.freed + large.freed, "{name}");
        assert!(all.peak <= small.peak + large.peak, "{name}");
        assert!(all.peak >= small.peak.max(large.peak), "{name}");
    }
    assert_eq!(
        all.active_bytes.current,
        all.allocated_bytes.current + counters.pending_bytes
    );
    assert!(all.requested_bytes.current <= all.active_bytes.current);
    assert_eq!(all.segment.allocated, counters.device_allocs);
    assert_eq!(all.segment.freed, counters.device_frees);
    assert!(small.allocated_bytes.current <= MIB * small.allocation.current);
    assert!(large.allocated_bytes.current >= MIB * large.allocation.current);
}
