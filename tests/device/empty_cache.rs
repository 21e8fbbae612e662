//! `empty_cache`, and the return of idle memory to the driver without waiting.

use crate::harness::gpu::{Bench, MIB};
use concertina_engine::settings::Settings;

/// Memory that cudaFree freed is idle, and returns to the driver whatever still runs. Memory that a stream's
/// work may still use stays.
#[test]
fn empty_cache_of_idle_memory_does_not_wait_for_running_work() {
    let bench = Bench::new(Settings::default());
    let (gpu, device) = (&bench.gpu, bench.device());
    let stream = gpu.stream();
    let fill_up = || {
        let blocks = (0..20).map(|_| device.allocate_unordered(20 << 20));
        let blocks: Vec<u64> = blocks.map(|it| it.expect("memory")).collect();
        for block in blocks {
            assert_eq!(device.free_completed(block), Ok(()));
        }
        assert!(bench.reserved() >= 400 * MIB);
    };
    let used = bench.allocate(4 * MIB, stream);
    fill_up();
    let held = gpu.hold(&[stream]);
    gpu.fill(used, 4 * MIB, 7, stream);
    bench.free(used);
    device.release_idle();
    let reserved = bench.reserved();
    assert!((4 * MIB..40 * MIB).contains(&reserved), "{reserved}");
    assert_eq!(bench.calls("cuCtxSynchronize"), 0);
    held.let_go(stream);
    gpu.settle();
    device.release_idle();
    assert_eq!(bench.reserved(), 0);
    fill_up();
    device.empty_cache();
    assert_eq!(bench.reserved(), 0);
    assert_eq!(
        bench.calls("cuCtxSynchronize"),
        0,
        "there was nothing to wait for"
    );
    assert_eq!(device.check(), Ok(()));
    bench.finish();
}

#[test]
fn empty_cache_frees_whole_free_chunks_only() {
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

/// Work on freed memory still runs, on its own and on other streams: memory returns to the driver after it.
#[test]
fn empty_cache_waits_for_running_work() {
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
