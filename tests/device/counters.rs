//! The counters: against an account that the runner keeps, against each other, and as PyTorch's
//! names for them.

use crate::gpu::{Bench, GIB, KIB, MIB, on_card, rounded};
use crate::runner::{Plan, Runner};
use concertina_engine::core::{Counters, Flow, Origin, Usage};
use concertina_engine::device::Figures;
use concertina_engine::process::stats;
use concertina_engine::settings::Settings;
use serde_json::{Map, Value};
use std::collections::BTreeSet;

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
    /// Blocks that were freed while other streams were recorded on them, their bytes and what was
    /// asked for.
    shared: (u64, u64, u64),
}

/// An account of what a program allocated and freed, kept without a look at the pool, for each origin.
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

    /// The same where nothing that was freed is in use any more.
    pub fn agree_at_rest(&self, figures: &Figures) {
        self.of_allocator.agrees_at_rest(&figures.counters);
        self.of_cuda.agrees_at_rest(&figures.of_cuda);
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
    fn agrees_with(&self, counters: &Counters) {
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

    fn agrees_at_rest(&self, counters: &Counters) {
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

fn flows(usage: &Usage) -> [(&'static str, Flow); 9] {
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

/// What always holds, as long as the sums are not reset.
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
fn of_one_origin(counters: &Counters) {
    let Counters {
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

/// A plan that fits a card too.
fn plan(share: bool) -> Plan {
    Plan {
        live: 300 * MIB,
        largest: 100 * MIB,
        share,
        check: true,
        ..Plan::default()
    }
}

#[test]
fn an_independent_account_agrees_after_every_operation() {
    for (seed, share, cuda) in [(1, false, false), (2, true, false), (3, true, true)] {
        let bench = Bench::new(Settings::default());
        bench.gpu.late();
        let plan = Plan {
            cuda,
            ..plan(share)
        };
        let mut runner = Runner::new(&bench.gpu, bench.device(), plan, seed);
        for _ in 0..if on_card() { 300 } else { 1000 } {
            runner.operation();
            let figures = bench.device().figures();
            identities(&figures);
            runner.accounts.agree_with(&figures);
            let counters = figures.counters;
            if let Some(machine) = bench.gpu.machine() {
                assert_eq!(machine.used(0), counters.all.reserved_bytes.current);
                assert_eq!(
                    machine.mappings() as u64,
                    counters.all.segment.current + counters.stale
                );
            }
        }
        runner.end();
        bench.device().empty_cache();
        let figures = bench.device().figures();
        identities(&figures);
        runner.accounts.agree_at_rest(&figures);
        bench.finish();
    }
}

#[test]
fn peaks_and_sums_start_anew_when_reset() {
    let bench = Bench::new(Settings::default());
    let (device, stream) = (bench.device(), bench.gpu.stream());
    let (small, large) = (
        bench.allocate(5000, stream),
        bench.allocate(30 * MIB, stream),
    );
    bench.free(large);
    let before = device.figures().counters;
    assert_eq!(before.all.allocated_bytes.peak, 30 * MIB + 5120);
    device.reset_peaks();
    identities(&device.figures());
    let after = device.figures().counters;
    for (name, flow) in [&after.all, &after.small, &after.large]
        .into_iter()
        .flat_map(flows)
    {
        assert_eq!(flow.peak, flow.current, "{name}");
    }
    let same = |a: &Usage, b: &Usage| {
        flows(a).iter().zip(flows(b)).all(|((_, a), (_, b))| {
            (a.allocated, a.freed, a.current) == (b.allocated, b.freed, b.current)
        })
    };
    assert!(same(&before.all, &after.all) && same(&before.large, &after.large));

    device.reset_accumulated();
    let after = device.figures().counters;
    for (name, flow) in [&after.all, &after.small, &after.large]
        .into_iter()
        .flat_map(flows)
    {
        assert_eq!((flow.allocated, flow.freed), (0, 0), "{name}");
    }
    assert_eq!((after.alloc_retries, after.ooms), (0, 0));
    assert_eq!(after.all.allocated_bytes.current, 5120);
    bench.free(small);
    let last = device.figures().counters;
    assert_eq!(
        (last.all.allocation.allocated, last.all.allocation.freed),
        (0, 1)
    );
    assert_eq!(device.check(), Ok(()));
    bench.finish();
}

#[test]
fn failures_and_retries_are_counted() {
    let bench = Bench::new(Settings {
        limit: Some(64 << 20),
        ..Settings::default()
    });
    let (device, stream) = (bench.device(), bench.gpu.stream());
    assert_eq!(
        (
            device.figures().counters.ooms,
            device.figures().counters.alloc_retries
        ),
        (0, 0)
    );
    assert!(device.allocate(GIB as usize, stream).is_err());
    let counters = device.figures().counters;
    assert_eq!(counters.ooms, 1);
    assert!(counters.alloc_retries >= 1);
    identities(&device.figures());
    bench.finish();
}

/// PyTorch's names for one quantity that it keeps four figures of.
fn four(name: &str) -> impl Iterator<Item = String> {
    ["current", "peak", "allocated", "freed"]
        .into_iter()
        .map(move |part| format!("{name}.{part}"))
}

#[test]
fn the_json_has_torchs_122_names_and_the_same_numbers() {
    let bench = Bench::new(Settings::default());
    let mut runner = Runner::new(&bench.gpu, bench.device(), plan(true), 4);
    runner.run(200);
    let counters = bench.device().figures().counters;
    let text = Value::Object(stats::memory_stats(&counters)).to_string();
    let stats: Map<String, Value> = serde_json::from_str(&text).expect("valid JSON");

    let pools = [
        ("all", &counters.all),
        ("small_pool", &counters.small),
        ("large_pool", &counters.large),
    ];
    let mut expected: Vec<(String, i64)> = Vec::new();
    for (pool, usage) in pools {
        for (name, flow) in flows(usage) {
            let values = [flow.current, flow.peak, flow.allocated, flow.freed];
            let values = values.map(|value| value as i64);
            expected.extend(four(&format!("{name}.{pool}")).zip(values));
        }
    }
    for name in ["oversize_allocations", "oversize_segments"] {
        expected.extend(four(name).map(|name| (name, 0)));
    }
    expected.extend(
        [
            ("num_alloc_retries", counters.alloc_retries as i64),
            ("num_ooms", counters.ooms as i64),
            ("num_sync_all_streams", counters.syncs as i64),
            ("num_device_alloc", counters.device_allocs as i64),
            ("num_device_free", counters.device_frees as i64),
            ("max_split_size", -1),
        ]
        .map(|(name, value)| (name.to_string(), value)),
    );
    assert_eq!(expected.len(), 122);
    let names: BTreeSet<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, stats.keys().map(String::as_str).collect());
    for (name, value) in &expected {
        assert_eq!(stats[name].as_i64(), Some(*value), "{name}");
    }
    assert!(
        counters.all.allocated_bytes.current > 4 * KIB,
        "there was something to count"
    );
    runner.end();
    bench.finish();
}

#[test]
fn origins_have_figures_of_their_own_though_their_blocks_change_hands() {
    let bench = Bench::new(Settings::default());
    let (device, stream) = (bench.device(), bench.gpu.stream());
    let key = device.key(stream);
    let size = 64 * KIB as usize;
    let live = |origin: &Counters| {
        let flow = origin.all.allocated_bytes;
        (flow.current, flow.peak, flow.allocated)
    };
    // By the pool, and by the caches of streams.
    for turn in 1..=200 {
        let own = device.allocate(size, stream).expect("memory");
        assert_eq!(device.free(own, stream), Ok(()));
        let others = device.allocate_on_stream(size, key).expect("memory");
        assert_eq!(device.free_on_stream(others, key), Ok(()));
        let unordered = device.allocate_unordered(size).expect("memory");
        // Whichever function frees it.
        assert_eq!(device.free(unordered, stream), Ok(()));
        let figures = device.figures();
        identities(&figures);
        let size = size as u64;
        assert_eq!(live(&figures.counters), (0, size, turn * size));
        assert_eq!(live(&figures.of_cuda), (0, size, 2 * turn * size));
    }
    // Neither's peak is that of both.
    let own = device.allocate(size, stream).expect("memory");
    let others: Vec<u64> = (0..3)
        .map(|_| device.allocate_on_stream(size, key).expect("memory"))
        .collect();
    assert_eq!(device.record_use(others[0], bench.gpu.stream()), Ok(()));
    let usage = device.usage();
    let size = size as u64;
    assert_eq!((usage.live, usage.live_of_allocator), (4 * size, size));
    let figures = device.figures();
    assert_eq!(live(&figures.counters).1, size);
    assert_eq!(live(&figures.of_cuda).1, 3 * size);
    for block in others {
        assert_eq!(device.free_on_stream(block, key), Ok(()));
    }
    let figures = device.figures();
    assert_eq!(figures.counters.pending_bytes, 0);
    assert_eq!(figures.of_cuda.all.allocated_bytes.current, 0);
    identities(&figures);
    assert_eq!(device.free(own, stream), Ok(()));
    // A request of the one that fails is no failure of the other.
    device.set_limit(Some(size));
    assert!(device.allocate_on_stream(GIB as usize, key).is_err());
    let figures = device.figures();
    assert_eq!((figures.counters.ooms, figures.of_cuda.ooms), (0, 1));
    assert_eq!(figures.counters.alloc_retries, 0);
    assert!(figures.of_cuda.alloc_retries > 0);
    device.set_limit(None);
    bench.finish();
}

#[test]
fn statistics_show_other_libraries_beside_the_allocators_own_requests() {
    let bench = Bench::new(Settings::default());
    let device = bench.device();
    let others = device.allocate_unordered(KIB as usize).expect("memory");
    // They are the program's as long as nobody else asks.
    let figures = device.figures();
    assert_eq!(figures.of_program().all.allocated_bytes.current, KIB);
    assert!(figures.of_others().is_none());
    let own = device.allocate(4 * KIB as usize, 0).expect("memory");
    let figures = device.figures();
    assert_eq!(figures.of_program().all.allocated_bytes.current, 4 * KIB);
    let shown = figures.of_others().expect("theirs");
    assert_eq!(shown.all.allocated_bytes.current, KIB);
    for block in [others, own] {
        assert_eq!(device.free(block, 0), Ok(()));
    }
    bench.finish();
}
