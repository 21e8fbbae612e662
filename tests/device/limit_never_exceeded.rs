//! A limit is never exceeded, not for a moment: what the simulated GPU counts at every call.

pub mod sim_only {
    use crate::harness::gpu::{Bench, Gpu, MIB, ok};
    use crate::harness::random::Random;
    use concertina_engine::device::{Device, PoolId, PoolRoute, Supplier};
    use concertina_engine::driver::sys::CUresult;
    use concertina_engine::settings::Settings;
    use concertina_sim::Config;
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::thread;

    pub fn limited(name: &str, limit: u64) -> Option<Bench> {
        let settings = Settings {
            limit: Some(limit as usize),
            chunk_size: 2 << 20,
            ..Settings::default()
        };
        Bench::simulated(name, Config::default(), settings)
    }

    /// Allocates from the driver after a pause, in which other threads may allocate.
    struct Slow(Gpu);

    impl Supplier for Slow {
        fn allocate(&self, bytes: u64) -> Option<u64> {
            thread::yield_now();
            let mut address = 0;
            // SAFETY: `address` outlives the call.
            ok(unsafe { (self.0.functions.cuMemAlloc_v2)(&mut address, bytes as usize) });
            Some(address)
        }

        fn free(&self, address: u64) {
            thread::yield_now();
            // SAFETY: allocated above, and not freed.
            ok(unsafe { (self.0.functions.cuMemFree_v2)(address) });
        }
    }

    /// One thread's work: it holds a few blocks of random sizes, and frees the oldest first.
    fn churn(seed: u64, allocate: impl Fn(u64) -> Option<u64>, free: impl Fn(u64, u64)) {
        let mut random = Random::new(seed);
        let mut blocks = VecDeque::new();
        for _ in 0..300 {
            let size = random.between(MIB, 12 * MIB);
            blocks.extend(allocate(size).map(|block| (block, size)));
            while blocks.len() > random.below(5) as usize {
                let (block, size) = blocks.pop_front().expect("a block");
                free(block, size);
            }
        }
        blocks
            .into_iter()
            .for_each(|(block, size)| free(block, size));
    }

    fn allocate_supplied(device: &Device, size: u64, stream: u64) -> Option<u64> {
        loop {
            match device.allocate(size as usize, stream) {
                Ok(block) => return Some(block),
                Err(shortage) => device.supply(shortage).ok()?,
            }
        }
    }

    fn begin(device: &Device, pool: PoolId, stream: u64) {
        device.begin_pool(PoolRoute {
            pool,
            filter: Box::new(move |of| of == stream),
        });
    }

    #[test]
    fn limit_is_never_exceeded_by_threads_that_take_memory_in_every_way() {
        let name = "limit_is_never_exceeded_by_threads_that_take_memory_in_every_way";
        let limit = 64 * MIB;
        let Some(bench) = limited(name, limit) else {
            return;
        };
        let (gpu, device, machine) = (&bench.gpu, bench.device(), bench.machine());
        let source: Arc<dyn Supplier> = Arc::new(Slow(gpu.clone()));
        thread::scope(|scope| {
            for number in 0..8 {
                let source = source.clone();
                scope.spawn(move || {
                    let _here = gpu.enter();
                    let stream = gpu.stream();
                    let pool = (0, 100 + number);
                    let free = |block, _| assert_eq!(device.free(block, stream), Ok(()));
                    match number {
                        0 | 1 => churn(
                            number,
                            |size| device.allocate(size as usize, stream).ok(),
                            free,
                        ),
                        2 | 3 => churn(
                            number,
                            |size| {
                                begin(device, pool, stream);
                                let block = device.allocate(size as usize, stream).ok();
                                device.end_pool(pool);
                                device.release_pool(pool);
                                block
                            },
                            free,
                        ),
                        4..=6 => {
                            device.retain_pool(pool, Some(source));
                            begin(device, pool, stream);
                            churn(
                                number,
                                |size| allocate_supplied(device, size, stream),
                                |block, _| {
                                    assert_eq!(device.free(block, stream), Ok(()));
                                    device.empty_cache();
                                    device.return_supplied();
                                },
                            );
                            device.end_pool(pool);
                            device.release_pool(pool);
                            device.release_pool(pool);
                            device.return_supplied();
                        }
                        _ => churn(
                            number,
                            |size| {
                                let waits = size % 2 == 0;
                                device.reserve_unpooled(size, waits).then(|| {
                                    let mut address = 0;
                                    // SAFETY: `address` outlives the call.
                                    ok(unsafe {
                                        (gpu.functions.cuMemAlloc_v2)(&mut address, size as usize)
                                    });
                                    address
                                })
                            },
                            |block, size| {
                                // SAFETY: allocated above, and not freed.
                                ok(unsafe { (gpu.functions.cuMemFree_v2)(block) });
                                device.release_unpooled(size);
                            },
                        ),
                    }
                });
            }
        });
        let most = machine.most_used(0);
        assert!(
            most <= limit && most > limit / 2,
            "{most} bytes of {limit} were taken"
        );
        device.empty_cache();
        device.return_supplied();
        assert_eq!(device.unpooled_bytes(), 0);
        bench.end();
    }

    /// Cached memory counts in a capture too, in which none can return to the driver.
    #[test]
    fn limit_counts_cached_memory_during_a_capture() {
        let name = "limit_counts_cached_memory_during_a_capture";
        let Some(bench) = limited(name, 64 * MIB) else {
            return;
        };
        let (device, stream) = (bench.device(), bench.gpu.stream());
        let [cached, used] = [40, 8].map(|size| bench.allocate(size * MIB, stream));
        bench.free(cached);
        assert!(device.reserve_unpooled(16 * MIB, false), "it fits");
        assert!(!device.reserve_unpooled(1, false), "48 of 64 MiB are held");
        device.release_unpooled(16 * MIB);
        assert!(
            device.reserve_unpooled(56 * MIB, true),
            "40 MiB return to the driver"
        );
        device.release_unpooled(56 * MIB);
        bench.free(used);
        bench.end();
    }

    /// A chunk that could not be unmapped counts until it is.
    #[test]
    fn limit_counts_a_chunk_until_it_is_unmapped() {
        let name = "limit_counts_a_chunk_until_it_is_unmapped";
        let limit = 64 * MIB;
        let Some(bench) = limited(name, limit) else {
            return;
        };
        let (device, machine, stream) = (bench.device(), bench.machine(), bench.gpu.stream());
        let unknown = CUresult::CUDA_ERROR_UNKNOWN;
        machine.fail_every("cuMemUnmap", unknown);
        for nth in [3, 5, 9] {
            machine.fail("cuMemSetAccess", nth, unknown);
            let block = device.allocate((40 * MIB) as usize, stream);
            block
                .into_iter()
                .for_each(|it| bench.free(bench.adopt(it, 40 * MIB, stream)));
        }
        let mut blocks = Vec::new();
        while let Ok(block) = device.allocate(MIB as usize, stream) {
            blocks.push(bench.adopt(block, MIB, stream));
        }
        assert!(
            machine.most_used(0) <= limit,
            "{} MiB",
            machine.most_used(0) / MIB
        );
        blocks.into_iter().for_each(|block| bench.free(block));
        machine.clear_failures();
        device.empty_cache();
        let whole = bench.allocate(limit, stream);
        bench.free(whole);
        bench.end();
    }
}
