//! Captures: no call that the library makes breaks one, whether it begins with a private pool, without one,
//! or where the library cannot see it.

use crate::harness::gpu::Bench;
use crate::private_pools::{SIZE, begin, with_pool};
use concertina_engine::settings::Settings;

#[test]
fn capture_keeps_what_it_frees_of_a_released_pool_for_its_replays() {
    let bench = Bench::new(Settings::default());
    let stream = bench.gpu.stream();
    let [used, live] = with_pool(&bench, (1, 0), || {
        [(); 2].map(|()| bench.allocate(SIZE, stream))
    });
    bench.device().release_pool((1, 0));
    // The graph uses the block, and then it is freed. Until its stream allocates there is no telling
    // whether it is captured, and it is taken to be.
    begin(&bench, (2, 0), Some(stream));
    bench.free(used);
    let result = bench.allocate(SIZE, stream);
    bench.device().end_pool((2, 0));
    bench.free(live);
    // The release of another pool, and growth, do not take the block from the graph.
    with_pool(&bench, (3, 0), || {
        let block = bench.allocate(SIZE, stream);
        bench.free(block);
    });
    bench.device().release_pool((3, 0));
    let other = bench.allocate(4 * SIZE, stream);
    assert_eq!(bench.reserved(), 7 * SIZE, "2 stay, 1 and 4 are in use");
    bench.free(other);
    bench.device().empty_cache();
    assert_eq!(bench.reserved(), SIZE, "emptying the cache gives it back");
    bench.free(result);
    bench.device().release_pool((2, 0));
    bench.finish();
}

mod sim_only {
    use crate::harness::gpu::{Bench, GIB, MIB};
    use crate::harness::random::Random;
    use crate::limit_never_exceeded::sim_only::limited;
    use crate::private_pools::begin;
    use concertina_engine::device::captures;
    use concertina_engine::settings::Settings;
    use concertina_sim::{Config, Pace};
    use std::process::Command;

    /// Runs the test of this name in a process that is told to expect captures which the library cannot see:
    /// a process says so once, for good. True in that process.
    fn in_a_process_of_its_own(name: &str) -> bool {
        const UNSEEN: &str = "CONCERTINA_TEST_UNSEEN";
        if std::env::var_os(UNSEEN).is_some() {
            captures::expect_unannounced();
            return true;
        }
        let test = std::env::current_exe().expect("a test has a path");
        let arguments = ["--exact", name];
        let mut command = Command::new(test);
        let output = command.args(arguments).env(UNSEEN, "1").output();
        let output = output.expect("the test runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}"
        );
        false
    }

    /// All of the device's memory is freed on a stream that is destroyed; waiting for it must not need
    /// memory.
    #[test]
    fn capture_that_cannot_be_seen_a_full_device_is_waited_for_without_memory() {
        let name = "captures::sim_only::capture_that_cannot_be_seen_a_full_device_is_waited_for_without_memory";
        if !in_a_process_of_its_own(name) {
            return;
        }
        let config = Config {
            memory: GIB,
            ..Config::default()
        };
        let bench = Bench::simulated("unseen", config, Settings::default()).expect("a GPU");
        let (gpu, a, c) = (&bench.gpu, bench.gpu.stream(), bench.gpu.stream());
        let blocks: Vec<u64> = (0..64).map(|_| bench.allocate(16 * MIB, a)).collect();
        blocks.iter().for_each(|block| gpu.fill(*block, MIB, 1, a));
        gpu.destroy(a);
        blocks.into_iter().for_each(|block| bench.free(block));
        let block = bench.allocate(512 * MIB, c);
        bench.free(block);
        bench.finish();
    }

    /// In a capture, unordered memory comes from free and idle memory, without a driver call.
    #[test]
    fn capture_cuda_malloc_gets_idle_memory_without_a_driver_call() {
        let name = "capture_cuda_malloc_gets_idle_memory_without_a_driver_call";
        let Some(bench) = limited(name, 64 * MIB) else {
            return;
        };
        let (device, machine, stream) = (bench.device(), bench.machine(), bench.gpu.stream());
        let ordered = bench.allocate(20 * MIB, stream);
        let unordered = device.allocate_unordered(40 << 20).expect("memory");
        bench.gpu.late();
        bench.gpu.fill(ordered, 20 * MIB, 1, stream);
        bench.free(ordered);
        assert_eq!(device.free_completed(unordered), Ok(()));
        machine.set_capturing(stream as _, true);
        let before = bench.all_calls();
        let block = device.allocate_completed(30 << 20).expect("idle memory");
        assert!((unordered..unordered + 40 * MIB).contains(&block));
        // The stream's own memory is not idle, and what remains is too small.
        assert_eq!(device.allocate_completed(15 << 20), None);
        assert_eq!(bench.all_calls(), before);
        machine.set_capturing(stream as _, false);
        assert_eq!(device.free_completed(block), Ok(()));
        bench.end();
    }

    /// A capture on a stream as PyTorch makes it: the pool begins, then the capture.
    /// `pressure` limits memory so that requests fail. Nothing that breaks a capture may be called,
    /// which the machine reports.
    fn capture(name: &str, settings: Settings, pressure: bool, seed: u64) {
        let config = Config {
            memory: GIB,
            ..Config::default()
        };
        let Some(bench) = Bench::simulated(name, config, settings) else {
            return;
        };
        let (gpu, device, machine) = (&bench.gpu, bench.device(), bench.machine());
        machine.set_pace(Pace::Random(seed));
        let mut random = Random::new(seed);
        let (a, b, c) = (gpu.stream(), gpu.stream(), gpu.stream());
        // PyTorch's own streams are permanent: the driver is not asked whether they are captured.
        if seed.is_multiple_of(2) {
            device.add_permanent_stream(a);
        }
        // Freed memory of all streams, and uses that are not over.
        for stream in [a, b, c] {
            let block = bench.allocate(20 * MIB, stream);
            gpu.fill(block, 20 * MIB, 1, stream);
            assert_eq!(device.record_use(block, b), Ok(()));
            bench.free(block);
        }
        let other = bench.allocate(30 * MIB, b);
        begin(&bench, (1, 0), Some(a));
        machine.set_capturing(a as _, true);
        if pressure {
            device.set_limit(Some(200 * MIB));
        }
        let mut live = Vec::new();
        let mut refused = 0;
        for _ in 0..150 {
            let stream = if random.once_in(4) { b } else { a };
            match random.below(10) {
                0..5 => {
                    let size = random.between(1, 40 * MIB);
                    match device.allocate(size as usize, stream) {
                        Ok(address) => live.push(bench.adopt(address, size, stream)),
                        Err(_) => refused += 1,
                    }
                }
                5..8 if !live.is_empty() => {
                    let block = live.swap_remove(random.below(live.len() as u64) as usize);
                    if random.once_in(3) {
                        assert_eq!(device.record_use(block, c), Ok(()));
                    }
                    bench.free(block);
                }
                8 if random.once_in(4) => device.empty_cache(),
                8 if random.once_in(4) => device.release_idle(),
                _ => {}
            }
            assert_eq!(device.check(), Ok(()));
        }
        assert_eq!(machine.violations(), Vec::<String>::new());
        assert!(!pressure || refused > 0, "memory never ran out");
        machine.set_capturing(a as _, false);
        device.end_pool((1, 0));
        live.into_iter()
            .chain([other])
            .for_each(|block| bench.free(block));
        device.release_pool((1, 0));
        device.set_limit(None);
        bench.finish();
    }

    #[test]
    fn capture_is_not_broken() {
        for seed in 0..10 {
            capture("capture_is_not_broken", Settings::default(), false, seed);
        }
    }

    #[test]
    fn capture_is_not_broken_when_memory_runs_out() {
        let name = "capture_is_not_broken_when_memory_runs_out";
        for seed in 0..10 {
            capture(name, Settings::default(), true, seed);
        }
    }

    /// A program that captures without a private pool does not announce it; the stream's status tells.
    #[test]
    fn capture_without_a_private_pool_is_not_broken() {
        [false, true].into_iter().for_each(capture_without_pool);
    }

    fn capture_without_pool(permanent: bool) {
        let name = "capture_without_a_private_pool_is_not_broken";
        let settings = Settings {
            limit: Some(1 << 30),
            ..Settings::default()
        };
        let Some(bench) = Bench::simulated(name, Config::default(), settings) else {
            return;
        };
        bench.machine().set_pace(Pace::Held);
        let (a, b) = (bench.gpu.stream(), bench.gpu.stream());
        if permanent {
            bench.device().add_permanent_stream(b);
        }
        let others: Vec<u64> = (0..40).map(|_| bench.allocate(16 * MIB, a)).collect();
        for block in others {
            bench.gpu.fill(block, 16 * MIB, 1, a);
            bench.free(block);
        }
        // A miss leaves a pending event, which must not be queried during the capture.
        let eager = bench.allocate(100 * MIB, b);
        bench.machine().set_capturing(b as _, true);
        let held: Vec<u64> = (0..100)
            .map_while(|_| bench.device().allocate(10 << 20, b).ok())
            .collect();
        assert!(held.len() < 100, "memory did not run out");
        bench.machine().set_capturing(b as _, false);
        assert_eq!(bench.machine().violations(), [""; 0]);
        for block in held {
            assert_eq!(bench.device().free(block, b), Ok(()));
        }
        bench.free(eager);
        bench.finish();
    }

    /// With plain segments a capture cannot grow, but must not be broken.
    #[test]
    fn capture_is_not_broken_with_expandable_segments_off() {
        let name = "capture_is_not_broken_with_expandable_segments_off";
        for seed in 0..10 {
            let settings = Settings {
                expandable_segments: false,
                ..Settings::default()
            };
            capture(name, settings, seed % 2 == 1, seed);
        }
    }
}
