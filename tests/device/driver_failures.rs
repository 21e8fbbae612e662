//! Driver failures: each driver call that a pool makes fails, once, for good or at random.

mod sim_only {
    use crate::harness::gpu::config_with_memory;
    use crate::harness::gpu::{Bench, GIB, MIB};
    use crate::harness::random::Random;
    use crate::harness::random_program::{Plan, Runner, Seed};
    use concertina_engine::driver::sys::CUresult;
    use concertina_engine::settings::Settings;
    use concertina_sim::Pace;

    /// The calls that a pool makes, made to fail.
    const CALLS: [&str; 9] = [
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
        let Some(bench) = Bench::simulated("survive", config_with_memory(GIB), settings) else {
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
    fn driver_failure_of_any_one_call() {
        for name in CALLS {
            for nth in 1..=40 {
                survive(nth, true, &[(name, Some(nth), ERRORS[nth as usize % 3])]);
            }
        }
    }

    #[test]
    fn driver_failure_of_any_one_call_with_expandable_segments_off() {
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
    fn driver_failure_of_any_call_for_good() {
        for name in CALLS {
            for seed in 0..4 {
                survive(seed, true, &[(name, None, ERRORS[seed as usize % 3])]);
            }
        }
    }

    /// What is to be undone fails as well.
    #[test]
    fn driver_failure_while_another_is_undone() {
        for nth in 1..=40 {
            let access = ("cuMemSetAccess", Some(nth), ERRORS[0]);
            for undo in ["cuMemUnmap", "cuMemRelease"] {
                survive(nth, true, &[access, (undo, None, ERRORS[1])]);
                survive(nth, true, &[access, (undo, Some(1), ERRORS[1])]);
            }
        }
    }

    #[test]
    fn driver_failures_at_random() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let failures: Vec<_> = (0..random.between(2, 12))
                .map(|_| {
                    let name = CALLS[random.below(CALLS.len() as u64) as usize];
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
    fn driver_failure_half_way_through_a_request_wastes_no_chunks() {
        for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess"] {
            for nth in 1..=16 {
                let settings = Settings {
                    chunk_size: 2 << 20,
                    ..Settings::default()
                };
                let Some(bench) = Bench::simulated(call, config_with_memory(GIB), settings) else {
                    return;
                };
                let (gpu, stream) = (&bench.gpu, bench.gpu.stream());
                let live = bench.allocate(5 * MIB, stream);
                gpu.fill(live, 5 * MIB, 1, stream);
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
                gpu.expect(live, 5 * MIB, 1, stream);
                [live, block]
                    .into_iter()
                    .for_each(|block| bench.free(block));
                bench.finish();
            }
        }
    }
}
