//! Private pools: those of CUDA graphs, and of `torch.cuda.MemPool`.

use crate::harness::gpu::{Bench, MIB};
use concertina_engine::device::{PoolId, PoolRoute};
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
pub fn begin(bench: &Bench, pool: PoolId, stream: Option<u64>) {
    let filter = move |of| stream.is_none_or(|stream| stream == of);
    bench.device().begin_pool(PoolRoute {
        pool,
        filter: Box::new(filter),
    });
}

fn range(address: u64, size: u64) -> Range<u64> {
    address..address + size
}

fn disjoint(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.end <= b.start || b.end <= a.start
}

pub const SIZE: u64 = 8 * MIB;

#[test]
fn private_pool_does_not_serve_cuda_malloc() {
    let bench = Bench::new(Settings::default());
    let device = bench.device();
    let (tensor, of_libraries) = with_pool(&bench, (1, 0), || {
        let key = device.key(bench.gpu.stream());
        let unordered = device.allocate_unordered(1024).expect("memory");
        let ordered = device.allocate_on_stream(1024, key).expect("memory");
        let relaxed = device.allocate_relaxed(1024).expect("memory");
        (
            bench.allocate(1024, key.handle),
            [unordered, ordered, relaxed],
        )
    });
    let blocks = device.pool_blocks((1, 0)).expect("a pool");
    let in_pool = |address: u64| {
        let mut blocks = blocks.iter().map(|it| range(it.start, it.size));
        blocks.any(|block| block.contains(&address))
    };
    assert!(in_pool(tensor));
    assert!(!of_libraries.into_iter().any(in_pool), "{of_libraries:?}");
    bench.free(tensor);
    for address in of_libraries {
        device.free_completed(address).expect("a block");
    }
    device.release_pool((1, 0));
    bench.finish();
}

#[test]
fn private_pool_memory_serves_that_pool_only() {
    let bench = Bench::new(Settings::default());
    let (gpu, stream) = (&bench.gpu, bench.gpu.stream());
    let shared = bench.allocate(SIZE, stream);
    bench.free(shared);
    let private = with_pool(&bench, (1, 0), || bench.allocate(SIZE, stream));
    assert!(
        disjoint(&range(shared, SIZE), &range(private, SIZE)),
        "it took memory of the shared arena"
    );
    gpu.fill(private, SIZE, 1, stream);
    bench.free(private);
    // Free memory of the private pool does not serve other requests …
    let others: Vec<u64> = (0..4).map(|_| bench.allocate(SIZE, stream)).collect();
    let free = range(private, SIZE);
    assert!(
        others
            .iter()
            .all(|other| disjoint(&range(*other, SIZE), &free))
    );
    // … but is the pool's own, at once.
    let again = with_pool(&bench, (1, 0), || bench.allocate(SIZE, stream));
    assert_eq!(again, private);
    bench.free(again);
    bench.device().empty_cache();
    assert_eq!(
        bench.reserved(),
        4 * SIZE + SIZE,
        "a pool in use holds its memory"
    );
    assert_eq!(bench.device().check(), Ok(()));
    // Begun twice, so released twice.
    bench.device().release_pool((1, 0));
    assert_eq!(bench.reserved(), 5 * SIZE);
    bench.device().release_pool((1, 0));
    assert_eq!(
        bench.reserved(),
        4 * SIZE,
        "released memory returns to the driver"
    );
    others.iter().for_each(|other| bench.free(*other));
    bench.finish();
}

#[test]
fn private_pool_filter_decides_by_stream() {
    let bench = Bench::new(Settings::default());
    let (a, b) = (bench.gpu.stream(), bench.gpu.stream());
    let shared = bench.allocate(SIZE, b);
    bench.free(shared);
    begin(&bench, (0, 5), Some(a));
    let (private, other) = (bench.allocate(SIZE, a), bench.allocate(SIZE, b));
    assert_eq!(other, shared);
    assert!(disjoint(&range(shared, SIZE), &range(private, SIZE)));
    bench.device().end_pool((0, 5));
    let after = bench.allocate(SIZE, a);
    assert!(disjoint(&range(after, SIZE), &range(private, SIZE)));
    [private, other, after]
        .into_iter()
        .for_each(|block| bench.free(block));
    bench.device().release_pool((0, 5));
    bench.finish();
}

#[test]
fn private_pools_two_at_once_and_the_latest_route_wins() {
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
fn private_pool_released_with_live_blocks_ends_with_the_last_of_them() {
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
            .all(|block| disjoint(&range(*block, SIZE), &range(other, SIZE)))
    );
    gpu.fill(other, SIZE, 4, stream);
    for block in &blocks[1..] {
        gpu.expect(*block, SIZE, 3, stream);
        bench.free(*block);
        assert_eq!(bench.device().check(), Ok(()));
    }
    // A free does not wait; the memory returns to the driver at the next call that may.
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
fn private_pools_created_and_released_leak_nothing() {
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
    use crate::harness::gpu::{Bench, GIB, MIB};
    use concertina_engine::driver::sys::CUresult;
    use concertina_engine::settings::Settings;
    use concertina_sim::{Config, Pace};

    /// A mapping that fails may leave a chunk mapped in a pool that is then released; the counters agree.
    #[test]
    fn private_pool_counters_after_a_failed_mapping() {
        let name = "private_pool_counters_after_a_failed_mapping";
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

    /// A pool without a capture (`torch.cuda.use_mem_pool`) may wait and query.
    #[test]
    fn private_pool_that_is_full_waits_outside_a_capture() {
        let name = "private_pool_that_is_full_waits_outside_a_capture";
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
