//! Many private pools at once, as in a program that captures a CUDA graph for each of its shapes.

use crate::harness::gpu::{Bench, GIB, MIB};
use crate::harness::random::Random;
use crate::private_pools::with_pool;
use concertina_engine::settings::Settings;

/// A pool reserves few addresses at first, and more as it grows; its memory stays close to what is live.
#[test]
fn private_pool_grows_beyond_its_first_addresses() {
    let bench = Bench::new(Settings::default());
    let (device, stream) = (bench.device(), bench.gpu.stream());
    for seed in 0..4 {
        let mut random = Random::new(seed);
        let before = device.figures().addresses;
        let blocks = with_pool(&bench, (1, 0), || {
            let mut live = 0;
            let mut blocks = Vec::new();
            while live < 4 * GIB {
                let size = match random.below(3) {
                    0 => random.between(512, MIB),
                    1 => random.between(MIB, 20 * MIB),
                    _ => random.between(MIB, 300 * MIB),
                };
                live += size;
                blocks.push(bench.allocate(size, stream));
            }
            assert!(
                bench.reserved() <= live + live / 20,
                "{} MiB are held for {}",
                bench.reserved() / MIB,
                live / MIB
            );
            blocks
        });
        assert_eq!(device.check(), Ok(()));
        let addresses = device.figures().addresses - before;
        assert!(addresses <= 16 * GIB, "{} GiB", addresses / GIB);
        for block in blocks {
            bench.gpu.fill(block, 512, 1, stream);
            bench.free(block);
        }
        device.release_pool((1, 0));
        assert_eq!(bench.reserved(), 0);
        assert_eq!(device.figures().addresses, before);
    }
    bench.finish();
}

mod sim_only {
    use crate::harness::gpu::{Bench, GIB, KIB, MIB};
    use crate::private_pools::with_pool;
    use concertina_engine::settings::Settings;
    use concertina_sim::Config;

    /// A device of this size, in a process with this many bytes of addresses to reserve.
    fn machine(memory: u64, addresses: u64) -> Config {
        Config {
            memory,
            addresses,
            ..Config::default()
        }
    }

    const TIB: u64 = 1 << 40;

    #[test]
    fn many_private_pools_take_memory_and_addresses_in_proportion() {
        let name = "many_private_pools_take_memory_and_addresses_in_proportion";
        let pools = 10_000;
        // The shared arena reserves 2 TiB of them.
        let config = machine(141 * GIB, 4 * TIB);
        let Some(bench) = Bench::simulated(name, config, Settings::default()) else {
            return;
        };
        let (device, stream) = (bench.device(), bench.gpu.stream());
        let of_shared_arena = bench.allocate(4 * KIB, stream);
        let (held, addresses) = (bench.reserved(), device.figures().addresses);
        let blocks: Vec<u64> = (0..pools)
            .map(|number| {
                // As `torch.cuda.graph` does before each capture.
                device.empty_cache();
                with_pool(&bench, (number + 1, 0), || {
                    let temporary = bench.allocate(4 * KIB, stream);
                    let block = bench.allocate(4 * KIB, stream);
                    bench.free(temporary);
                    block
                })
            })
            .collect();
        assert_eq!(bench.reserved() - held, pools * 2 * MIB);
        let taken = bench.machine().reserved_addresses();
        assert_eq!(taken, device.figures().addresses);
        assert!(
            taken - addresses <= pools * 64 * MIB,
            "{} GiB of addresses",
            (taken - addresses) / GIB
        );
        // Half of the pools go before their blocks do.
        for (number, block) in blocks.into_iter().enumerate() {
            let pool = (number as u64 + 1, 0);
            if number % 2 == 0 {
                device.release_pool(pool);
                bench.free(block);
            } else {
                bench.free(block);
                device.release_pool(pool);
            }
        }
        device.empty_cache();
        assert_eq!(bench.reserved(), held);
        assert_eq!(device.figures().addresses, addresses);
        bench.free(of_shared_arena);
        bench.finish();
    }

    /// Where a process has hardly any addresses left, a pool gets by with what it needs.
    #[test]
    fn private_pool_gets_by_with_the_addresses_that_there_are() {
        let name = "private_pool_gets_by_with_the_addresses_that_there_are";
        let config = machine(GIB, 52 * MIB);
        let Some(bench) = Bench::simulated(name, config, Settings::default()) else {
            return;
        };
        let stream = bench.gpu.stream();
        for pool in 1..=2 {
            let block = with_pool(&bench, (pool, 0), || bench.allocate(18 * MIB, stream));
            bench.gpu.fill(block, 18 * MIB, 1, stream);
            bench.free(block);
        }
        for pool in 1..=2 {
            bench.device().release_pool((pool, 0));
        }
        assert_eq!(bench.machine().reserved_addresses(), 0);
        bench.finish();
    }
}
