//! The counters: against an account that the runner keeps, against each other, and as PyTorch's
//! names for them.

use crate::gpu::{Bench, GIB, KIB, MIB, on_card, rounded};
use crate::runner::{Plan, Runner};
use concertina_engine::core::{Counters, Flow, Usage};
use concertina_engine::runtime::settings::Settings;
use concertina_engine::runtime::stats;
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

/// An account of what a program allocated and freed, kept without a look at the pool.
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
    pub fn agrees_with(&self, counters: &Counters) {
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

    /// The same where nothing that was freed is in use any more.
    pub fn agrees_at_rest(&self, counters: &Counters) {
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

/// PyTorch's identities, which hold at every moment as long as the sums are not reset.
pub fn identities(counters: &Counters) {
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
    let held = all.active_bytes.current + all.inactive_split_bytes.current;
    assert_eq!(all.reserved_bytes.current, held);
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
    for (seed, share) in [(1, false), (2, true), (3, true)] {
        let bench = Bench::new(Settings::default());
        bench.gpu.late();
        let mut runner = Runner::new(&bench.gpu, bench.device(), plan(share), seed);
        for _ in 0..if on_card() { 300 } else { 1000 } {
            runner.operation();
            let counters = bench.device().figures().counters;
            identities(&counters);
            runner.account.agrees_with(&counters);
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
        let counters = bench.device().figures().counters;
        identities(&counters);
        runner.account.agrees_at_rest(&counters);
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
    let after = device.figures().counters;
    for (name, flow) in [&after.all, &after.small, &after.large]
        .into_iter()
        .flat_map(flows)
    {
        assert_eq!(flow.peak, flow.current, "{name}");
    }
    identities(&after);
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
    identities(&counters);
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
