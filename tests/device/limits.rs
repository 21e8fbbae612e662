//! Memory that runs out, by a limit or in truth, and driver calls that fail.

use crate::harness::gpu::{Bench, GIB, MIB, every_other};
use concertina_engine::settings::Settings;

fn limited(bytes: u64) -> Settings {
    Settings {
        limit: Some(bytes as usize),
        ..Settings::default()
    }
}

#[test]
fn what_the_limit_leaves_can_all_be_had_and_no_more() {
    let limit = 256 * MIB;
    let bench = Bench::new(limited(limit));
    let (gpu, device, stream) = (&bench.gpu, bench.device(), bench.gpu.stream());
    assert_eq!(device.limit(), Some(limit));
    for _ in 0..2 {
        let blocks: Vec<u64> = (0..32).map(|_| bench.allocate(8 * MIB, stream)).collect();
        assert_eq!(bench.reserved(), limit);
        for size in [1, 8 * MIB, limit, 10 * GIB] {
            let shortage = device
                .allocate(size as usize, stream)
                .expect_err("a full device");
            assert_eq!(shortage.shortage.asked, size);
            assert_eq!(shortage.limit, Some(limit));
        }
        assert_eq!(device.check(), Ok(()));
        // The pool is as good as before: one block less is one block more.
        bench.free(blocks[7]);
        let again = bench.allocate(8 * MIB, stream);
        gpu.fill(again, 8 * MIB, 1, stream);
        bench.free(again);
        blocks
            .iter()
            .filter(|block| **block != blocks[7])
            .for_each(|block| bench.free(*block));
        // All of it in one piece, wherever its chunks lie.
        let whole = bench.allocate(limit, stream);
        gpu.fill(whole, limit, 2, stream);
        gpu.expect(whole, limit, 2, stream);
        bench.free(whole);
        assert_eq!(bench.reserved(), limit);
    }
    bench.finish();
}

#[test]
fn what_a_large_block_was_made_of_can_be_joined_again_under_a_limit() {
    let bench = Bench::new(limited(10 * GIB));
    let stream = bench.gpu.stream();
    for (large, size, wanted) in [(&[9900][..], 8, 3000), (&[5000, 4900], 6, 3600)] {
        let blocks: Vec<u64> = large
            .iter()
            .map(|mib| bench.allocate(mib * MIB, stream))
            .collect();
        blocks.into_iter().for_each(|block| bench.free(block));
        // Every other one of the blocks that come after is freed: more than is wanted, in pieces.
        let blocks: Vec<u64> = (0..9600 / size)
            .map(|_| bench.allocate(size * MIB, stream))
            .collect();
        let (stay, go) = every_other(&blocks);
        go.into_iter().for_each(|block| bench.free(block));
        let whole = bench.allocate(wanted * MIB, stream);
        bench.free(whole);
        stay.into_iter().for_each(|block| bench.free(block));
        bench.device().empty_cache();
    }
    bench.finish();
}

#[test]
fn the_message_says_what_was_asked_and_what_there_is() {
    let bench = Bench::new(limited(64 * MIB));
    let (device, stream) = (bench.device(), bench.gpu.stream());
    let block = bench.allocate(32 * MIB, stream);
    let shortage = device.allocate(3 << 30, stream).expect_err("too much");
    let text = shortage.to_string();
    assert!(
        text.starts_with("CUDA out of memory. "),
        "retry helpers look for these words: {text}"
    );
    for part in ["3.00 GiB", "32.00 MiB", "64.00 MiB", "GPU 0", "limit"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    assert!(!text.contains('\n'), "{text}");
    bench.free(block);
    bench.finish();
}

#[test]
fn a_limit_can_be_lowered_and_lifted() {
    let bench = Bench::new(limited(GIB));
    let (device, stream) = (bench.device(), bench.gpu.stream());
    let block = bench.allocate(128 * MIB, stream);
    device.set_limit(Some(64 * MIB));
    // What is held beyond it stays, and what is free within it can still be had.
    assert_eq!(bench.reserved(), 128 * MIB);
    assert!(device.allocate(MIB as usize, stream).is_err());
    bench.free(block);
    let small = bench.allocate(100 * MIB, stream);
    bench.free(small);
    device.empty_cache();
    assert_eq!(bench.reserved(), 0);
    assert!(device.allocate(65 << 20, stream).is_err());
    let fits = bench.allocate(64 * MIB, stream);
    device.set_limit(Some(GIB));
    let more = bench.allocate(65 * MIB, stream);
    [fits, more].into_iter().for_each(|block| bench.free(block));

    device.set_memory_fraction(0.01);
    let share = (device.total_bytes() as f64 * 0.01) as u64;
    assert_eq!(device.limit(), Some(share));
    assert!(device.allocate(share as usize + (2 << 20), stream).is_err());
    device.set_memory_fraction(1.0);
    assert_eq!(device.limit(), None);
    bench.finish();
}

#[test]
fn a_fraction_in_the_settings_limits_too() {
    let settings = Settings {
        per_process_memory_fraction: 0.001,
        ..Settings::default()
    };
    let bench = Bench::new(settings);
    let (device, stream) = (bench.device(), bench.gpu.stream());
    let share = (device.total_bytes() as f64 * 0.001) as u64;
    assert_eq!(device.limit(), Some(share));
    assert!(device.allocate(share as usize + 1, stream).is_err());
    let block = bench.allocate(share / (2 * MIB) * (2 * MIB), stream);
    bench.free(block);
    bench.finish();
}

#[test]
fn empty_cache_gives_whole_free_chunks_back_and_keeps_the_rest() {
    let bench = Bench::new(Settings {
        chunk_size: 2 << 20,
        ..Settings::default()
    });
    let (gpu, device, stream) = (&bench.gpu, bench.device(), bench.gpu.stream());
    gpu.late();
    let blocks: Vec<u64> = (0..64).map(|_| bench.allocate(MIB, stream)).collect();
    for (turn, block) in blocks.iter().enumerate() {
        gpu.fill(*block, MIB, turn as u32, stream);
    }
    // 64 blocks in 32 chunks: of each four blocks the first stays, so every other chunk is free.
    for (_, block) in blocks.iter().enumerate().filter(|(turn, _)| turn % 4 != 0) {
        bench.free(*block);
    }
    assert_eq!(bench.reserved(), 64 * MIB);
    device.empty_cache();
    assert_eq!(bench.reserved(), 32 * MIB);
    assert_eq!(device.check(), Ok(()));
    if let Some(machine) = gpu.machine() {
        assert_eq!(machine.used(0), 32 * MIB);
    }
    for (turn, block) in blocks.iter().enumerate().step_by(4) {
        gpu.expect(*block, MIB, turn as u32, stream);
        bench.free(*block);
    }
    device.empty_cache();
    assert_eq!(bench.reserved(), 0);
    // And all can be had again.
    let block = bench.allocate(64 * MIB, stream);
    gpu.fill(block, 64 * MIB, 1, stream);
    bench.free(block);
    bench.finish();
}

/// The work on freed memory still runs, on its own and on other streams: what goes back to the
/// driver waits for it.
#[test]
fn empty_cache_waits_for_late_work() {
    let bench = Bench::new(Settings::default());
    let (gpu, device) = (&bench.gpu, bench.device());
    gpu.late();
    let (a, b) = (gpu.stream(), gpu.stream());
    for _ in 0..3 {
        let (block, shared) = (bench.allocate(512 * MIB, a), bench.allocate(64 * MIB, a));
        gpu.fill(block, 512 * MIB, 1, a);
        gpu.fill(shared, 64 * MIB, 1, a);
        assert!(gpu.order(a, b));
        gpu.fill(shared, 64 * MIB, 2, b);
        assert_eq!(device.record_use(shared, b), Ok(()));
        [block, shared]
            .into_iter()
            .for_each(|block| bench.free(block));
        device.empty_cache();
        assert_eq!(bench.reserved(), 0);
        assert_eq!(device.check(), Ok(()));
    }
    bench.finish();
}

/// A whole limit's worth freed on one stream, with its work still to run, is another stream's
/// before the request fails.
#[test]
fn a_full_device_waits_before_it_refuses() {
    let limit = 128 * MIB;
    let bench = Bench::new(limited(limit));
    let (gpu, device) = (&bench.gpu, bench.device());
    gpu.late();
    let (a, b) = (gpu.stream(), gpu.stream());
    let blocks: Vec<u64> = (0..16).map(|_| bench.allocate(8 * MIB, a)).collect();
    for (turn, block) in blocks.iter().enumerate() {
        gpu.fill(*block, 8 * MIB, 1, a);
        if turn % 3 == 0 {
            assert_eq!(device.record_use(*block, b), Ok(()));
        }
        bench.free(*block);
    }
    let whole = bench.allocate(limit, b);
    gpu.fill(whole, limit, 2, b);
    gpu.expect(whole, limit, 2, b);
    bench.free(whole);
    bench.finish();
}

/// Many chunks are moved, so that old mappings come down while others of the same stream's free blocks
/// are still free: those are not lost to other streams.
#[test]
fn holes_are_not_lost_when_old_mappings_come_down() {
    let limit = 1180 * MIB;
    let settings = Settings {
        chunk_size: 2 << 20,
        ..limited(limit)
    };
    let bench = Bench::new(settings);
    let (gpu, device) = (&bench.gpu, bench.device());
    let (a, b) = (gpu.stream(), gpu.stream());
    let blocks: Vec<u64> = (0..590).map(|_| bench.allocate(2 * MIB, a)).collect();
    for (turn, block) in blocks.iter().enumerate() {
        if turn % 20 != 0 {
            bench.free(*block);
        }
    }
    gpu.synchronize(a);
    let large = bench.allocate(700 * MIB, a);
    assert!(device.figures().counters.stitches > 0);
    // More than 400 MiB are free and idle; the other stream is seen for the first time.
    let other = bench.allocate(300 * MIB, b);
    gpu.fill(other, 300 * MIB, 1, b);
    device.empty_cache();
    assert!(
        bench.reserved() <= 1062 * MIB,
        "{} bytes are held",
        bench.reserved()
    );
    let walls = blocks.iter().step_by(20).copied();
    walls
        .chain([large, other])
        .for_each(|block| bench.free(block));
    bench.finish();
}

mod sim_only {
    use crate::harness::gpu::{Bench, GIB, MIB};
    use crate::harness::random::Random;
    use crate::harness::random_program::{Plan, Runner, Seed};
    use concertina_engine::driver::sys::CUresult;
    use concertina_engine::settings::Settings;
    use concertina_sim::{Config, Pace};

    fn machine(memory: u64) -> Config {
        Config {
            memory,
            ..Config::default()
        }
    }

    /// What the message for a request of 10 MiB advises on a full device of which every other MiB is
    /// free.
    fn advice(memory: u64, settings: Settings) -> Option<String> {
        let name = "the_message_advises_what_helps";
        let bench = Bench::simulated(name, machine(memory), settings)?;
        let (device, stream) = (bench.device(), bench.gpu.stream());
        let mut blocks = Vec::new();
        while let Ok(block) = device.allocate(MIB as usize, stream) {
            blocks.push(bench.adopt(block, MIB, stream));
        }
        let (free, kept): (Vec<u64>, Vec<u64>) = blocks
            .into_iter()
            .partition(|it| (it / MIB).is_multiple_of(2));
        free.into_iter().for_each(|block| bench.free(block));
        let shortage = device
            .allocate(10 << 20, stream)
            .expect_err("the pieces are too small");
        kept.into_iter().for_each(|block| bench.free(block));
        bench.finish();
        Some(shortage.to_string())
    }

    #[test]
    fn the_message_advises_what_helps() {
        for (part, settings) in [
            ("too small to be joined", Settings::default()),
            (
                "expandable_segments:False",
                Settings {
                    expandable_segments: false,
                    ..Settings::default()
                },
            ),
            (
                "chunk_size_mb:2",
                Settings {
                    chunk_size: 32 << 20,
                    ..Settings::default()
                },
            ),
        ] {
            if let Some(text) = advice(128 * MIB, settings) {
                assert!(text.contains(part), "{part} is not in: {text}");
            }
        }
    }

    #[test]
    fn a_device_that_is_full_refuses_and_goes_on() {
        let name = "a_device_that_is_full_refuses_and_goes_on";
        let Some(bench) = Bench::simulated(name, machine(GIB), Settings::default()) else {
            return;
        };
        let (device, stream) = (bench.device(), bench.gpu.stream());
        let half = bench.allocate(GIB / 2, stream);
        let shortage = device.allocate(GIB as usize, stream).expect_err("too much");
        assert_eq!(shortage.limit, None);
        assert_eq!(shortage.memory.map(|(_, total)| total), Some(GIB));
        let other = bench.allocate(GIB / 2, stream);
        assert!(device.allocate(1, stream).is_err());
        [half, other]
            .into_iter()
            .for_each(|block| bench.free(block));
        let whole = bench.allocate(GIB, stream);
        bench.free(whole);
        bench.finish();
    }

    /// Whose memory it is does not matter when memory runs out: another pool's is given back.
    #[test]
    fn a_closed_private_pool_gives_way() {
        let name = "a_closed_private_pool_gives_way";
        let Some(bench) = Bench::simulated(name, machine(GIB), Settings::default()) else {
            return;
        };
        let stream = bench.gpu.stream();
        let block =
            crate::private_pools::with_pool(&bench, (1, 0), || bench.allocate(GIB / 2, stream));
        bench.device().release_pool((1, 0));
        bench.free(block);
        let whole = bench.allocate(GIB, stream);
        bench.free(whole);
        bench.finish();
    }

    /// As in a process whose address space is limited.
    #[test]
    fn fewer_addresses_will_do() {
        let name = "fewer_addresses_will_do";
        let Some(bench) = Bench::simulated(name, machine(GIB), Settings::default()) else {
            return;
        };
        let (machine, stream) = (bench.machine(), bench.gpu.stream());
        for nth in 1..=2 {
            machine.fail(
                "cuMemAddressReserve",
                nth,
                CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            );
        }
        let whole = bench.allocate(GIB, stream);
        assert_eq!(bench.calls("cuMemAddressReserve"), 3);
        bench.free(whole);
        bench.finish();
    }

    /// The calls that a pool makes, made to fail.
    const MAPPED: [&str; 9] = [
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemAddressReserve",
        "cuMemUnmap",
        "cuEventRecord",
        "cuEventCreate",
        "cuEventQuery",
        "cuCtxSynchronize",
    ];

    const ERRORS: [CUresult; 3] = [
        CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        CUresult::CUDA_ERROR_UNKNOWN,
        CUresult::CUDA_ERROR_OPERATING_SYSTEM,
    ];

    /// A workload under which every one of those calls is made often, with `failures` planned.
    fn survive(seed: u64, mapped: bool, failures: &[(&str, Option<u64>, CUresult)]) {
        let _seed = Seed(seed);
        let settings = Settings {
            chunk_size: 2 << 20,
            expandable_segments: mapped,
            ..Settings::default()
        };
        let Some(bench) = Bench::simulated("survive", machine(GIB), settings) else {
            return;
        };
        let machine = bench.machine();
        machine.set_pace(Pace::Random(seed));
        let plan = Plan {
            streams: 3,
            largest: 150 * MIB,
            live: 400 * MIB,
            limits: Some((300 * MIB, GIB)),
            check: true,
            ..Plan::default()
        };
        let mut runner = Runner::new(&bench.gpu, bench.device(), plan, seed);
        for (name, nth, status) in failures {
            match nth {
                Some(nth) => machine.fail(name, *nth, *status),
                None => machine.fail_every(name, *status),
            }
        }
        runner.run(120);
        bench.device().empty_cache();
        assert_eq!(bench.device().check(), Ok(()));
        machine.clear_failures();
        bench.device().set_limit(None);
        // All that can be had at the end is what can be had at the beginning.
        runner.end();
        let whole = bench.allocate(900 * MIB, bench.gpu.stream());
        bench.free(whole);
        bench.finish();
    }

    #[test]
    fn any_one_call_may_fail() {
        for name in MAPPED {
            for nth in 1..=40 {
                survive(nth, true, &[(name, Some(nth), ERRORS[nth as usize % 3])]);
            }
        }
    }

    #[test]
    fn any_one_call_for_plain_segments_may_fail() {
        let others = [
            "cuEventRecord",
            "cuEventCreate",
            "cuEventQuery",
            "cuCtxSynchronize",
        ];
        for name in ["cuMemAlloc_v2", "cuMemFree_v2"].into_iter().chain(others) {
            for nth in 1..=40 {
                survive(nth, false, &[(name, Some(nth), ERRORS[nth as usize % 3])]);
            }
        }
    }

    #[test]
    fn any_call_may_fail_for_good() {
        for name in MAPPED {
            for seed in 0..4 {
                survive(seed, true, &[(name, None, ERRORS[seed as usize % 3])]);
            }
        }
    }

    /// What is to be undone fails as well.
    #[test]
    fn undoing_may_fail_too() {
        for nth in 1..=40 {
            let access = ("cuMemSetAccess", Some(nth), ERRORS[0]);
            for undo in ["cuMemUnmap", "cuMemRelease"] {
                survive(nth, true, &[access, (undo, None, ERRORS[1])]);
                survive(nth, true, &[access, (undo, Some(1), ERRORS[1])]);
            }
        }
    }

    #[test]
    fn several_calls_may_fail_at_random() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let failures: Vec<_> = (0..random.between(2, 12))
                .map(|_| {
                    let name = MAPPED[random.below(MAPPED.len() as u64) as usize];
                    (
                        name,
                        Some(random.between(1, 60)),
                        ERRORS[random.below(3) as usize],
                    )
                })
                .collect();
            survive(seed, true, &failures);
        }
    }

    /// Chunks taken for a request that fails half-way stay usable.
    #[test]
    fn a_request_that_fails_half_way_is_met_when_asked_again() {
        for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess"] {
            for nth in 1..=16 {
                let settings = Settings {
                    chunk_size: 2 << 20,
                    ..Settings::default()
                };
                let Some(bench) = Bench::simulated(call, machine(GIB), settings) else {
                    return;
                };
                let (gpu, stream) = (&bench.gpu, bench.gpu.stream());
                let kept = bench.allocate(5 * MIB, stream);
                gpu.fill(kept, 5 * MIB, 1, stream);
                bench
                    .machine()
                    .fail(call, nth, CUresult::CUDA_ERROR_UNKNOWN);
                let first = bench.device().allocate(64 << 20, stream);
                assert_eq!(bench.device().check(), Ok(()));
                bench.machine().clear_failures();
                if let Ok(address) = first {
                    assert_eq!(bench.device().free(address, stream), Ok(()));
                }
                let block = bench.allocate(64 * MIB, stream);
                assert!(
                    bench.reserved() <= 72 * MIB,
                    "{call} {nth}: {}",
                    bench.reserved()
                );
                gpu.fill(block, 64 * MIB, 2, stream);
                gpu.expect(kept, 5 * MIB, 1, stream);
                [kept, block]
                    .into_iter()
                    .for_each(|block| bench.free(block));
                bench.finish();
            }
        }
    }
}

#[test]
fn memory_taken_ahead_is_there_at_once_and_for_every_stream() {
    for expandable in [true, false] {
        let bench = Bench::new(Settings {
            preallocate: (100 * MIB) as usize,
            expandable_segments: expandable,
            ..Settings::default()
        });
        let (device, gpu) = (bench.device(), &bench.gpu);
        assert!((100 * MIB..=104 * MIB).contains(&bench.reserved()));
        assert_eq!(device.figures().counters.all.allocation.allocated, 0);
        let name = if expandable {
            "cuMemCreate"
        } else {
            "cuMemAlloc"
        };
        let calls = bench.calls(name);
        let (one, other) = (gpu.stream(), gpu.stream());
        let first = bench.allocate(60 * MIB, one);
        let second = bench.allocate(40 * MIB, other);
        gpu.fill(first, 60 * MIB, 1, one);
        gpu.fill(second, 40 * MIB, 2, other);
        gpu.expect(first, 60 * MIB, 1, one);
        gpu.expect(second, 40 * MIB, 2, other);
        assert_eq!(bench.calls(name), calls);
        bench.free(first);
        bench.free(second);
        assert_eq!(device.check(), Ok(()));
        gpu.settle();
        device.empty_cache();
        assert_eq!(bench.reserved(), 0);
        bench.finish();
    }
}

#[test]
fn more_than_there_is_taken_ahead_is_nothing() {
    let bench = Bench::new(Settings {
        preallocate: 1 << 45,
        limit: Some((64 * MIB) as usize),
        ..Settings::default()
    });
    assert_eq!(bench.device().figures().reserved_bytes(), 0);
    let block = bench.allocate(MIB, bench.gpu.stream());
    bench.free(block);
    bench.finish();
}
