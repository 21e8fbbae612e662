//! Private pools (a CUDA graph's, or a `MemPool` of PyTorch's), and captures.

use crate::gpu::{Bench, MIB};
use concertina_engine::device::PoolId;
use concertina_engine::device::PoolRoute;
use concertina_engine::settings::Settings;
use std::ops::Range;

/// Routes everything that is allocated meanwhile to a private pool.
pub fn with_pool<T>(bench: &Bench, pool: PoolId, body: impl FnOnce() -> T) -> T {
    begin(bench, pool, None);
    let result = body();
    bench.device().end_pool(pool);
    result
}

/// Routes allocations of one stream, or of all, to a private pool.
fn begin(bench: &Bench, pool: PoolId, stream: Option<u64>) {
    let filter = move |of| stream.is_none_or(|stream| stream == of);
    bench.device().begin_pool(PoolRoute {
        pool,
        filter: Box::new(filter),
    });
}

fn range(address: u64, size: u64) -> Range<u64> {
    address..address + size
}

fn apart(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.end <= b.start || b.end <= a.start
}

const SIZE: u64 = 8 * MIB;

#[test]
fn what_asks_for_no_pool_gets_everybodys_memory() {
    let bench = Bench::new(Settings::default());
    let device = bench.device();
    let (tensor, of_libraries) = with_pool(&bench, (1, 0), || {
        let key = device.key(bench.gpu.stream());
        let unordered = device.allocate_unordered(1024).expect("memory");
        let ordered = device.allocate_on_stream(1024, key).expect("memory");
        let aside = device.allocate_relaxed(1024).expect("memory");
        (
            bench.allocate(1024, key.handle),
            [unordered, ordered, aside],
        )
    });
    let blocks = device.pool_blocks((1, 0)).expect("a pool");
    let inside = |address: u64| {
        let mut blocks = blocks.iter().map(|it| range(it.start, it.size));
        blocks.any(|block| block.contains(&address))
    };
    assert!(inside(tensor));
    assert!(!of_libraries.into_iter().any(inside), "{of_libraries:?}");
    bench.free(tensor);
    for address in of_libraries {
        device.free_completed(address).expect("a block");
    }
    device.release_pool((1, 0));
    bench.finish();
}

#[test]
fn a_private_pools_memory_is_shared_with_nobody() {
    let bench = Bench::new(Settings::default());
    let (gpu, stream) = (&bench.gpu, bench.gpu.stream());
    let shared = bench.allocate(SIZE, stream);
    bench.free(shared);
    let private = with_pool(&bench, (1, 0), || bench.allocate(SIZE, stream));
    assert!(
        apart(&range(shared, SIZE), &range(private, SIZE)),
        "it took everybody's memory"
    );
    gpu.fill(private, SIZE, 1, stream);
    bench.free(private);
    // What the private pool has free is not everybody's, not even when memory is asked for …
    let others: Vec<u64> = (0..4).map(|_| bench.allocate(SIZE, stream)).collect();
    let free = range(private, SIZE);
    assert!(
        others
            .iter()
            .all(|other| apart(&range(*other, SIZE), &free))
    );
    // … but is the pool's own, at once.
    let again = with_pool(&bench, (1, 0), || bench.allocate(SIZE, stream));
    assert_eq!(again, private);
    bench.free(again);
    bench.device().empty_cache();
    assert_eq!(
        bench.reserved(),
        4 * SIZE + SIZE,
        "a pool in use keeps its memory"
    );
    assert_eq!(bench.device().check(), Ok(()));
    // Begun twice, so released twice.
    bench.device().release_pool((1, 0));
    assert_eq!(bench.reserved(), 5 * SIZE);
    bench.device().release_pool((1, 0));
    assert_eq!(bench.reserved(), 4 * SIZE, "released memory goes back");
    others.iter().for_each(|other| bench.free(*other));
    bench.finish();
}

#[test]
fn the_filter_decides_stream_by_stream() {
    let bench = Bench::new(Settings::default());
    let (a, b) = (bench.gpu.stream(), bench.gpu.stream());
    let shared = bench.allocate(SIZE, b);
    bench.free(shared);
    begin(&bench, (0, 5), Some(a));
    let (private, other) = (bench.allocate(SIZE, a), bench.allocate(SIZE, b));
    assert_eq!(other, shared);
    assert!(apart(&range(shared, SIZE), &range(private, SIZE)));
    bench.device().end_pool((0, 5));
    let after = bench.allocate(SIZE, a);
    assert!(apart(&range(after, SIZE), &range(private, SIZE)));
    [private, other, after]
        .into_iter()
        .for_each(|block| bench.free(block));
    bench.device().release_pool((0, 5));
    bench.finish();
}

#[test]
fn two_pools_at_once_keep_apart_and_the_latest_route_wins() {
    let bench = Bench::new(Settings::default());
    let (gpu, a, b) = (&bench.gpu, bench.gpu.stream(), bench.gpu.stream());
    begin(&bench, (1, 0), Some(a));
    begin(&bench, (2, 0), Some(b));
    let (first, second) = (bench.allocate(SIZE, a), bench.allocate(SIZE, b));
    gpu.fill(first, SIZE, 1, a);
    gpu.fill(second, SIZE, 2, b);
    bench.free(first);
    begin(&bench, (2, 0), Some(a));
    let third = bench.allocate(SIZE, a);
    assert_ne!(third, first, "the latest route of a stream counts");
    bench.device().end_pool((2, 0));
    let fourth = bench.allocate(SIZE, a);
    assert_eq!(fourth, first, "an earlier one counts again when it ends");
    gpu.fill(third, SIZE, 3, a);
    gpu.expect(second, SIZE, 2, b);
    bench.device().end_pool((2, 0));
    bench.device().end_pool((1, 0));
    [second, third, fourth]
        .into_iter()
        .for_each(|block| bench.free(block));
    assert_eq!(bench.device().check(), Ok(()));
    [(1, 0), (2, 0), (2, 0)]
        .into_iter()
        .for_each(|pool| bench.device().release_pool(pool));
    assert_eq!(bench.reserved(), 0);
    bench.finish();
}

#[test]
fn a_pool_released_with_live_blocks_goes_with_the_last_of_them() {
    let bench = Bench::new(Settings::default());
    let (gpu, stream) = (&bench.gpu, bench.gpu.stream());
    let blocks = with_pool(&bench, (3, 0), || {
        [(); 4].map(|()| bench.allocate(SIZE, stream))
    });
    blocks
        .iter()
        .for_each(|block| gpu.fill(*block, SIZE, 3, stream));
    bench.free(blocks[0]);
    bench.device().release_pool((3, 0));
    assert!(bench.reserved() >= 3 * SIZE);
    // The name is free for another pool, which is not that one.
    let other = with_pool(&bench, (3, 0), || bench.allocate(SIZE, stream));
    assert!(
        blocks[1..]
            .iter()
            .all(|block| apart(&range(*block, SIZE), &range(other, SIZE)))
    );
    gpu.fill(other, SIZE, 4, stream);
    for block in &blocks[1..] {
        gpu.expect(*block, SIZE, 3, stream);
        bench.free(*block);
        assert_eq!(bench.device().check(), Ok(()));
    }
    // A free waits for nothing; what became free goes back at the next call that may wait.
    bench.device().empty_cache();
    assert_eq!(
        bench.reserved(),
        SIZE,
        "the old pool's memory went back after its last block"
    );
    bench.free(other);
    bench.device().release_pool((3, 0));
    bench.finish();
}

#[test]
fn what_a_capture_frees_of_a_released_pool_stays_for_its_replays() {
    let bench = Bench::new(Settings::default());
    let stream = bench.gpu.stream();
    let [used, kept] = with_pool(&bench, (1, 0), || {
        [(); 2].map(|()| bench.allocate(SIZE, stream))
    });
    bench.device().release_pool((1, 0));
    // The graph uses the block, and then it is freed. Until its stream allocates there is no telling
    // whether it is captured, and it is taken to be.
    begin(&bench, (2, 0), Some(stream));
    bench.free(used);
    let result = bench.allocate(SIZE, stream);
    bench.device().end_pool((2, 0));
    bench.free(kept);
    // A later pool goes, and growth looks for memory: neither takes the block from the graph.
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

#[test]
fn pools_that_come_and_go_leave_nothing_behind() {
    let bench = Bench::new(Settings::default());
    let (a, b) = (bench.gpu.stream(), bench.gpu.stream());
    let mut early = 0;
    for turn in 0..100 {
        let pool = (turn, turn);
        let blocks = with_pool(&bench, pool, || [a, b].map(|on| bench.allocate(SIZE, on)));
        bench.free(blocks[0]);
        bench.device().release_pool(pool);
        bench.free(blocks[1]);
        bench.device().empty_cache();
        assert_eq!(bench.reserved(), 0);
        assert_eq!(bench.device().check(), Ok(()));
        if turn == 3 {
            early = bench.device().figures().addresses;
        }
    }
    assert_eq!(bench.device().figures().addresses, early, "addresses");
    bench.finish();
}

mod sim_only {
    use super::{SIZE, begin, with_pool};
    use crate::gpu::{Bench, GIB, MIB};
    use crate::random::Random;
    use concertina_engine::driver::sys::CUresult;
    use concertina_engine::settings::Settings;
    use concertina_sim::{Config, Pace};

    /// A capture on a stream, from torch's point of view: the pool begins, then the capture.
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
        // PyTorch's own are known by their handles, and are not asked whether they are captured.
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
        let outside = bench.allocate(30 * MIB, b);
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
            .chain([outside])
            .for_each(|block| bench.free(block));
        device.release_pool((1, 0));
        device.set_limit(None);
        bench.finish();
    }

    /// A mapping that fails may leave something behind at the addresses of a pool that goes, and the accounts
    /// agree.
    #[test]
    fn a_failed_mapping_in_a_private_pool_is_accounted_for() {
        let name = "a_failed_mapping_in_a_private_pool_is_accounted_for";
        for undoing in [&["cuMemSetAccess"][..], &["cuMemSetAccess", "cuMemUnmap"]] {
            let Some(bench) = Bench::simulated(name, Config::default(), Settings::default()) else {
                return;
            };
            let (device, machine, stream) = (bench.device(), bench.machine(), bench.gpu.stream());
            let first = with_pool(&bench, (1, 0), || {
                let first = bench.allocate(4 * MIB, stream);
                for call in undoing {
                    machine.fail_every(call, CUresult::CUDA_ERROR_UNKNOWN);
                }
                assert!(device.allocate(8 << 20, stream).is_err());
                machine.clear_failures();
                first
            });
            bench.free(first);
            device.release_pool((1, 0));
            assert_eq!(device.check(), Ok(()));
            bench.free(bench.allocate(4 * MIB, stream));
            bench.finish();
        }
    }

    #[test]
    fn nothing_breaks_a_capture() {
        for seed in 0..10 {
            capture("nothing_breaks_a_capture", Settings::default(), false, seed);
        }
    }

    #[test]
    fn nothing_breaks_a_capture_when_memory_runs_out() {
        let name = "nothing_breaks_a_capture_when_memory_runs_out";
        for seed in 0..10 {
            capture(name, Settings::default(), true, seed);
        }
    }

    /// Under PyTorch's plain recipe nobody says that a capture begins; the stream that memory is
    /// wanted on tells.
    #[test]
    fn nothing_breaks_a_capture_that_nobody_announced() {
        [false, true].into_iter().for_each(capture_unannounced);
    }

    fn capture_unannounced(kept: bool) {
        let name = "nothing_breaks_a_capture_that_nobody_announced";
        let settings = Settings {
            limit: Some(1 << 30),
            ..Settings::default()
        };
        let Some(bench) = Bench::simulated(name, Config::default(), settings) else {
            return;
        };
        bench.machine().set_pace(Pace::Held);
        let (a, b) = (bench.gpu.stream(), bench.gpu.stream());
        if kept {
            bench.device().add_permanent_stream(b);
        }
        let others: Vec<u64> = (0..40).map(|_| bench.allocate(16 * MIB, a)).collect();
        for block in others {
            bench.gpu.fill(block, 16 * MIB, 1, a);
            bench.free(block);
        }
        // A miss leaves an event on its way, which the capture must not ask about.
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
    fn nothing_breaks_a_capture_with_plain_segments() {
        let name = "nothing_breaks_a_capture_with_plain_segments";
        for seed in 0..10 {
            let settings = Settings {
                expandable_segments: false,
                ..Settings::default()
            };
            capture(name, settings, seed % 2 == 1, seed);
        }
    }

    /// A pool of its own without a capture (`torch.cuda.use_mem_pool`) may wait and ask.
    #[test]
    fn without_a_capture_a_full_private_pool_waits() {
        let name = "without_a_capture_a_full_private_pool_waits";
        let settings = Settings {
            limit: Some(64 << 20),
            ..Settings::default()
        };
        let config = Config {
            memory: GIB,
            ..Config::default()
        };
        let Some(bench) = Bench::simulated(name, config, settings) else {
            return;
        };
        bench.machine().set_pace(Pace::Held);
        let (a, b) = (bench.gpu.stream(), bench.gpu.stream());
        begin(&bench, (0, 1), None);
        let blocks: Vec<u64> = (0..8).map(|_| bench.allocate(SIZE, a)).collect();
        for block in blocks {
            bench.gpu.fill(block, SIZE, 1, a);
            assert_eq!(bench.device().record_use(block, b), Ok(()));
            bench.free(block);
        }
        let again = bench.allocate(60 * MIB, b);
        bench.gpu.fill(again, 60 * MIB, 2, b);
        bench.free(again);
        bench.device().end_pool((0, 1));
        bench.device().release_pool((0, 1));
        bench.finish();
    }
}
