//! Driver failures in private pools: each call fails at each of its uses.

mod sim_only {
    use crate::harness::gpu::{Bench, GIB, MIB};
    use crate::private_pools::with_pool;
    use concertina_engine::core::BlockInfo;
    use concertina_engine::device::{Device, PoolId, PoolRoute, Supplier};
    use concertina_engine::driver::sys::CUresult;
    use concertina_engine::settings::Settings;
    use concertina_sim::{Config, Pace};
    use std::collections::BTreeMap;
    use std::sync::{Arc, Mutex};

    /// Every driver function with which a pool creates, maps, waits for and releases memory.
    const FUNCTIONS: [&str; 18] = [
        "cuMemCreate",
        "cuMemRelease",
        "cuMemAddressReserve",
        "cuMemAddressFree",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuMemGetInfo_v2",
        "cuStreamIsCapturing",
        "cuStreamGetId",
        "cuStreamWaitEvent",
        "cuEventCreate",
        "cuEventQuery",
        "cuCtxRecordEvent",
        "cuCtxSynchronize",
        "cuEventSynchronize",
    ];

    const STATUSES: [CUresult; 2] = [
        CUresult::CUDA_ERROR_UNKNOWN,
        CUresult::CUDA_ERROR_OUT_OF_MEMORY,
    ];

    /// Work with private pools, which has to survive failures.
    type Job = fn(&Bench);

    /// Allocates as far as the driver, made to fail, lets it.
    fn try_allocate(bench: &Bench, size: u64, stream: u64) -> Option<u64> {
        let address = bench.device().allocate(size as usize, stream).ok()?;
        let block = bench.adopt(address, size, stream);
        bench.gpu.fill(block, size.min(MIB), 1, stream);
        Some(block)
    }

    fn route(device: &Device, pool: PoolId) {
        device.begin_pool(PoolRoute {
            pool,
            filter: Box::new(|_| true),
        });
    }

    /// Pools grow, are released before and after their blocks are freed, and are replaced by others; other
    /// streams use some blocks, and some are freed during a capture.
    fn pools_close(bench: &Bench) {
        let (device, machine) = (bench.device(), bench.machine());
        let [a, b] = [(); 2].map(|()| bench.gpu.stream());
        for turn in 0..3 {
            let mut blocks: Vec<u64> = [(1, a), (5, b), (40, a), (70, b)]
                .into_iter()
                .filter_map(|(size, stream)| {
                    with_pool(bench, (1, turn), || try_allocate(bench, size * MIB, stream))
                })
                .collect();
            let of_shared_arena = try_allocate(bench, 30 * MIB, b);
            if let Some(shared) = blocks.first() {
                assert_eq!(device.record_use(*shared, b), Ok(()));
                let _ = device.ipc_block(*shared);
            }
            if let Some(block) = blocks.pop() {
                bench.free(block);
            }
            // The routes' uses of the pool end first, the program's last.
            (0..3).for_each(|_| device.release_pool((1, turn)));
            machine.tick();
            if turn == 1 {
                route(device, (2, 0));
                machine.set_capturing(a as _, true);
                if let Some(block) = blocks.pop() {
                    bench.free(block);
                }
                let captured = try_allocate(bench, 3 * MIB, a);
                machine.set_capturing(a as _, false);
                device.end_pool((2, 0));
                blocks.extend(captured);
                device.release_pool((2, 0));
            }
            device.release_pool((1, turn));
            blocks
                .into_iter()
                .chain(of_shared_arena)
                .for_each(|block| bench.free(block));
            // A miss also frees released pools.
            let large = try_allocate(bench, 150 * MIB, a);
            large.into_iter().for_each(|block| bench.free(block));
            assert_eq!(device.check(), Ok(()));
        }
    }

    /// A pool is restored to an earlier state, twice, with blocks that other streams still use.
    fn a_pool_is_restored(bench: &Bench) {
        let (device, pool) = (bench.device(), (7, 0));
        let [a, b] = [(); 2].map(|()| bench.gpu.stream());
        device.retain_pool(pool, None);
        let mut live: Vec<u64> = with_pool(bench, pool, || {
            [(2, a), (9, b), (30, a)]
                .into_iter()
                .filter_map(|(size, stream)| try_allocate(bench, size * MIB, stream))
                .collect()
        });
        device.release_pool(pool);
        let state: Vec<BlockInfo> = device.pool_blocks(pool).unwrap_or_default();
        for _ in 0..2 {
            if let Some(block) = live.first() {
                assert_eq!(device.record_use(*block, b), Ok(()));
            }
            live.drain(..).for_each(|block| bench.free(block));
            let other = with_pool(bench, pool, || try_allocate(bench, 4 * MIB, b));
            device.release_pool(pool);
            other.into_iter().for_each(|block| bench.free(block));
            let back = PoolRoute {
                pool,
                filter: Box::new(|_| true),
            };
            if device.restore_pool(back, &state).is_ok() {
                for block in &state {
                    let address = device.allocate(block.requested as usize, 0);
                    assert_eq!(address.expect("what is restored"), block.start);
                    live.push(bench.adopt(block.start, block.requested, block.stream.handle));
                }
                device.end_pool(pool);
            }
            assert_eq!(device.check(), Ok(()));
        }
        device.release_pool(pool);
        live.into_iter().for_each(|block| bench.free(block));
    }

    /// Supplies what the driver has, and takes back until that takes it.
    struct Source {
        gpu: crate::harness::gpu::Gpu,
        out: Mutex<BTreeMap<u64, u64>>,
    }

    impl Supplier for Source {
        fn allocate(&self, bytes: u64) -> Option<u64> {
            let mut address = 0;
            // SAFETY: `address` outlives the call.
            let status =
                unsafe { (self.gpu.functions.cuMemAlloc_v2)(&mut address, bytes as usize) };
            (status == 0).then(|| {
                self.out.lock().expect("no panic").insert(address, bytes);
                address
            })
        }
        fn free(&self, address: u64) {
            let known = self.out.lock().expect("no panic").remove(&address);
            assert!(known.is_some(), "{address:#x} is not out");
            // SAFETY: allocated above, and not freed. A failure on demand happens once.
            while unsafe { (self.gpu.functions.cuMemFree_v2)(address) } != 0 {}
        }
    }

    /// Two pools of supplied memory, one of which goes before its blocks.
    fn pools_are_supplied(bench: &Bench) {
        let device = bench.device();
        let [a, b] = [(); 2].map(|()| bench.gpu.stream());
        let source = Arc::new(Source {
            gpu: bench.gpu.clone(),
            out: Mutex::default(),
        });
        for number in 0..2 {
            let pool = (0, 20 + number);
            device.retain_pool(pool, Some(source.clone()));
            let mut blocks = Vec::new();
            for (size, stream) in [(MIB, a), (15 * MIB, b), (3 * MIB, a)] {
                route(device, pool);
                loop {
                    match device.allocate(size as usize, stream) {
                        Ok(address) => {
                            blocks.push(bench.adopt(address, size, stream));
                            bench.gpu.fill(address, size, 2, stream);
                            break;
                        }
                        Err(shortage) => {
                            if device.supply(shortage).is_err() {
                                break;
                            }
                        }
                    }
                }
                device.end_pool(pool);
                device.release_pool(pool);
            }
            if number == 0 {
                device.release_pool(pool);
            }
            blocks.into_iter().for_each(|block| bench.free(block));
            if number == 1 {
                device.release_pool(pool);
            }
            device.return_supplied();
            assert_eq!(device.check(), Ok(()));
        }
        device.empty_cache();
        device.empty_cache();
        device.return_supplied();
        assert_eq!(source.out.lock().expect("no panic").len(), 0);
    }

    fn survive(job: Job, expandable: bool, failures: &[(&str, u64, CUresult)]) -> Vec<u64> {
        let settings = Settings {
            expandable_segments: expandable,
            chunk_size: 2 << 20,
            ..Settings::default()
        };
        let config = Config {
            memory: GIB,
            ..Config::default()
        };
        let Some(bench) = Bench::simulated("faults", config, settings) else {
            return Vec::new();
        };
        let machine = bench.machine();
        machine.set_pace(Pace::Late(5));
        let before = FUNCTIONS.map(|name| machine.calls(name));
        for (name, nth, status) in failures {
            machine.fail(name, *nth, *status);
        }
        job(&bench);
        let after = FUNCTIONS.map(|name| machine.calls(name));
        machine.clear_failures();
        machine.set_pace(Pace::Immediate);
        bench.end();
        before.iter().zip(after).map(|(a, b)| b - a).collect()
    }

    /// A release that failed is tried again, and may fail again.
    const RELEASING: [&str; 5] = [
        "cuMemRelease",
        "cuMemAddressFree",
        "cuMemUnmap",
        "cuMemFree_v2",
        "cuCtxSynchronize",
    ];

    /// Each function fails at each of its uses.
    fn sweep(job: Job) {
        for expandable in [true, false] {
            let uses = survive(job, expandable, &[]);
            for (name, uses) in FUNCTIONS.into_iter().zip(uses) {
                for nth in 1..=uses {
                    let status = STATUSES[nth as usize % 2];
                    survive(job, expandable, &[(name, nth, status)]);
                    if RELEASING.contains(&name) {
                        let twice = [(name, nth, status), (name, nth + 1, status)];
                        survive(job, expandable, &twice);
                    }
                }
            }
        }
    }

    #[test]
    fn driver_failure_while_private_pools_are_released() {
        sweep(pools_close);
    }

    #[test]
    fn driver_failure_while_a_private_pool_is_restored() {
        sweep(a_pool_is_restored);
    }

    #[test]
    fn driver_failure_in_private_pools_with_a_supplier() {
        sweep(pools_are_supplied);
    }

    /// A mapping fails, and undoing it fails too.
    #[test]
    fn driver_failure_while_private_pools_undo_a_mapping() {
        for job in [pools_close as Job, a_pool_is_restored] {
            for nth in 1..=60 {
                for undo in ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"] {
                    for undone in 1..=3 {
                        let access = ("cuMemSetAccess", nth, STATUSES[nth as usize % 2]);
                        survive(job, true, &[access, (undo, undone, STATUSES[0])]);
                    }
                }
            }
        }
    }

    #[test]
    fn driver_failure_of_unmapping_a_released_pool_is_retried() {
        let name = "driver_failure_of_unmapping_a_released_pool_is_retried";
        for call in ["cuMemUnmap", "cuMemRelease", "cuCtxSynchronize"] {
            let Some(bench) = Bench::simulated(name, Config::default(), Settings::default()) else {
                return;
            };
            let (device, stream) = (bench.device(), bench.gpu.stream());
            let block = with_pool(&bench, (1, 0), || bench.allocate(64 * MIB, stream));
            bench.free(block);
            bench.machine().fail(call, 1, CUresult::CUDA_ERROR_UNKNOWN);
            device.release_pool((1, 0));
            device.empty_cache();
            assert_eq!(bench.reserved(), 0, "{call}");
            assert_eq!(bench.machine().used(0), 0, "{call}");
            assert_eq!(bench.machine().reserved_addresses(), 0, "{call}");
            bench.end();
        }
    }
}
