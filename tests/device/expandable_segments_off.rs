//! `expandable_segments:False`, and devices that cannot map memory: the pool consists of cudaMalloc segments.

use crate::harness::gpu::{Bench, GIB, KIB, MIB};
use crate::harness::random_program::{Plan, Runner};
use concertina_engine::settings::Settings;

fn segments_setting() -> Settings {
    Settings {
        expandable_segments: false,
        ..Settings::default()
    }
}

fn random_workload(bench: &Bench, operations: u64) {
    let plan = Plan {
        streams: 3,
        largest: 64 * MIB,
        live: 300 * MIB,
        limits: Some((200 * MIB, 2 * GIB)),
        check: true,
        ..Plan::default()
    };
    for seed in 0..3 {
        let mut runner = Runner::new(&bench.gpu, bench.device(), plan, seed);
        runner.run(operations);
        runner.end();
        bench.device().set_limit(Some(2 * GIB));
    }
}

/// No memory was mapped.
fn assert_nothing_mapped(bench: &Bench) {
    for call in ["cuMemCreate", "cuMemMap", "cuMemAddressReserve"] {
        assert_eq!(bench.calls(call), 0, "{call}");
    }
    assert!(bench.calls("cuMemAlloc") > 0);
}

#[test]
fn expandable_segments_off_maps_nothing() {
    let bench = Bench::new(segments_setting());
    bench.gpu.late();
    random_workload(&bench, 300);
    assert_nothing_mapped(&bench);
    bench.finish();
}

#[test]
fn expandable_segments_off_segments_have_torchs_sizes_and_are_split_and_coalesced() {
    let bench = Bench::new(segments_setting());
    let stream = bench.gpu.stream();
    for (size, segment) in [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (9 * MIB, 20 * MIB),
    ]
    .into_iter()
    .chain([(10 * MIB, 10 * MIB), (11 * MIB - 5, 12 * MIB)])
    {
        let block = bench.allocate(size, stream);
        assert_eq!(bench.reserved(), segment, "{size}");
        bench.free(block);
        bench.device().empty_cache();
        assert_eq!(bench.reserved(), 0);
    }
    let blocks: Vec<u64> = (0..512).map(|_| bench.allocate(4 * KIB, stream)).collect();
    assert_eq!(bench.reserved(), 2 * MIB);
    blocks.iter().rev().for_each(|block| bench.free(*block));
    let whole = bench.allocate(MIB, stream);
    assert_eq!(bench.reserved(), 2 * MIB);
    bench.free(whole);
    bench.finish();
}

#[test]
fn expandable_segments_off_free_segments_make_way_for_a_larger_request() {
    let bench = Bench::new(Settings {
        limit: Some(100 << 20),
        ..segments_setting()
    });
    let stream = bench.gpu.stream();
    let blocks: Vec<u64> = (0..5).map(|_| bench.allocate(20 * MIB, stream)).collect();
    blocks.iter().for_each(|block| bench.free(*block));
    // No segment is large enough: all are freed for it.
    let large = bench.allocate(90 * MIB, stream);
    assert_eq!(bench.reserved(), 90 * MIB);
    bench.free(large);
    bench.finish();
}

mod sim_only {
    use super::{assert_nothing_mapped, random_workload};
    use crate::harness::gpu::{Bench, GIB};
    use concertina_engine::settings::Settings;
    use concertina_sim::{Config, Pace};

    #[test]
    fn expandable_segments_off_on_a_device_without_virtual_memory() {
        let config = Config {
            memory: 2 * GIB,
            virtual_memory: false,
            ..Config::default()
        };
        let name = "expandable_segments_off_on_a_device_without_virtual_memory";
        let Some(bench) = Bench::simulated(name, config, Settings::default()) else {
            return;
        };
        for pace in [Pace::Immediate, Pace::Held, Pace::Late(20), Pace::Random(5)] {
            bench.machine().set_pace(pace);
            random_workload(&bench, 250);
        }
        assert_nothing_mapped(&bench);
        bench.finish();
    }
}
