//! PoolStats: compared with a second account of random programs, with each other, and with PyTorch's names.

use crate::harness::accounts::{flows, identities};
use crate::harness::gpu::{Bench, GIB, KIB, MIB, on_card};
use crate::harness::random_program::{Plan, Runner};
use concertina_engine::core::{PoolStats, Usage};
use concertina_engine::process::stats;
use concertina_engine::settings::Settings;
use serde_json::{Map, Value};
use std::collections::BTreeSet;

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
fn counters_agree_with_a_second_account_after_every_operation() {
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
        runner.accounts.agree_when_idle(&figures);
        bench.finish();
    }
}

#[test]
fn counters_reset_peaks_and_sums() {
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
fn counters_of_failures_and_retries() {
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

/// PyTorch's four names for one quantity.
fn four(name: &str) -> impl Iterator<Item = String> {
    ["current", "peak", "allocated", "freed"]
        .into_iter()
        .map(move |part| format!("{name}.{part}"))
}

#[test]
fn counters_json_has_torchs_122_names_and_the_same_numbers() {
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
fn counters_are_separate_for_the_allocator_and_cuda_functions() {
    let bench = Bench::new(Settings::default());
    let (device, stream) = (bench.device(), bench.gpu.stream());
    let key = device.key(stream);
    let size = 64 * KIB as usize;
    let live = |origin: &PoolStats| {
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
fn counters_of_other_libraries_beside_the_allocators() {
    let bench = Bench::new(Settings::default());
    let device = bench.device();
    let others = device.allocate_unordered(KIB as usize).expect("memory");
    // They count as the program's as long as the allocator has no requests of its own.
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

mod sim_only {
    use crate::harness::gpu::{Bench, MIB};
    use concertina_engine::core::Counts;
    use concertina_engine::settings::Settings;
    use concertina_sim::Config;
    use std::time::Duration;

    const SIZE: u64 = 64 * MIB;

    fn counts(bench: &Bench) -> Counts {
        bench.device().figures().counters.counts
    }

    #[test]
    fn ladder_counts_the_rung_that_meets_a_miss() {
        let bench = Bench::simulated("ladder", Config::default(), Settings::default())
            .expect("the simulated GPU");
        let (gpu, a, b) = (&bench.gpu, bench.gpu.stream(), bench.gpu.stream());
        let block = bench.allocate(SIZE, a);
        let grown = counts(&bench);
        assert_eq!((grown.growths, grown.hits), (1, 0));
        bench.free(block);

        // The other stream's work has completed.
        gpu.synchronize(a);
        let block = bench.allocate(SIZE, b);
        let polled = counts(&bench);
        assert_eq!((polled.polls, polled.hits, polled.growths), (1, 1, 1));

        // It has not.
        gpu.late();
        gpu.fill(block, SIZE, 1, b);
        bench.free(block);
        let block = bench.allocate(SIZE, a);
        let reused = counts(&bench);
        assert_eq!((reused.cross_stream_reuses, reused.hits), (1, 2));
        bench.free(block);
        gpu.settle();

        // Nobody has allocated for an hour.
        let hour = Duration::from_secs(3600);
        bench.device().purge_idle(hour, 4 * hour);
        let block = bench.allocate(SIZE, a);
        let reclaimed = counts(&bench);
        assert_eq!((reclaimed.reclaims, reclaimed.hits), (1, 3));
        assert_eq!(reclaimed.growths, 1);
        bench.free(block);
        bench.finish();
    }

    /// Growth by two blocks would keep within the slack of what is live, and the limit refuses it.
    #[test]
    fn ladder_counts_growth_that_the_limit_refuses() {
        let settings = Settings {
            limit: Some(4 << 30),
            ..Settings::default()
        };
        let bench = Bench::simulated("ladder_limit", Config::default(), settings)
            .expect("the simulated GPU");
        let stream = bench.gpu.stream();
        let mut blocks: Vec<u64> = (0..256).map(|_| bench.allocate(16 * MIB, stream)).collect();
        bench.free(blocks.remove(100));
        bench.free(blocks.remove(50));
        let before = counts(&bench);
        assert_eq!((before.growth_refusals, before.stitches), (0, 0));
        blocks.push(bench.allocate(32 * MIB, stream));
        let after = counts(&bench);
        assert_eq!((after.growth_refusals, after.ooms), (1, 0));
        assert!(after.stitches > 0);
        blocks.into_iter().for_each(|it| bench.free(it));
        bench.finish();
    }
}
