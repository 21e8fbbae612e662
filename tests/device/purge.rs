//! Purge: memory that has been free for a while returns to the driver. The tests say what time it is.

use crate::harness::gpu::{Bench, MIB, every_other};
use crate::private_pools::with_pool;
use concertina_engine::settings::Settings;
use std::time::Duration;

/// How long memory may be idle here, in seconds.
const TIMEOUT: u64 = 100;

/// How often the timer runs, in seconds.
const INTERVAL: u64 = 25;

/// What the timer's thread does, at a time in seconds.
fn purge_at(bench: &Bench, now: u64) {
    let (now, timeout) = (Duration::from_secs(now), Duration::from_secs(TIMEOUT));
    while bench.device().purge_idle(now, timeout) {}
    assert_eq!(bench.device().check(), Ok(()));
}

/// The same at each interval from `from` to `to`, with `meanwhile` after each.
fn purge_from(bench: &Bench, from: u64, to: u64, mut meanwhile: impl FnMut()) {
    for now in (from..to).step_by(INTERVAL as usize) {
        purge_at(bench, now);
        meanwhile();
    }
}

/// Allocates `count` blocks of 20 MiB, and frees them.
fn peak(bench: &Bench, count: usize, stream: u64) {
    let blocks: Vec<u64> = (0..count)
        .map(|_| bench.allocate(20 * MIB, stream))
        .collect();
    blocks.iter().for_each(|block| {
        bench.gpu.fill(*block, 512, 1, stream);
        bench.free(*block);
    });
    bench.gpu.settle();
}

#[test]
fn purge_returns_idle_memory_after_the_timeout_and_no_earlier() {
    for chunk in [0, 2 * MIB, 64 * MIB] {
        let bench = Bench::new(Settings {
            chunk_size: chunk as usize,
            ..Settings::default()
        });
        let stream = bench.gpu.stream();
        peak(&bench, 50, stream);
        let held = bench.reserved();
        purge_from(&bench, 0, TIMEOUT, || ());
        assert_eq!(bench.reserved(), held, "purged too early");
        let before = bench.gpu.free_bytes();
        purge_from(&bench, TIMEOUT, 2 * TIMEOUT, || ());
        assert_eq!(bench.reserved(), 0, "not purged");
        // A card may have other users.
        let more = bench.gpu.free_bytes().saturating_sub(before);
        assert!(more >= held / 10 * 9, "the device has {more} bytes more");
        // The pool works as before.
        peak(&bench, 50, stream);
        assert_eq!(bench.reserved(), held);
        bench.finish();
    }
}

#[test]
fn purge_spares_memory_that_is_used_now_and_then() {
    let bench = Bench::new(Settings::default());
    let stream = bench.gpu.stream();
    peak(&bench, 50, stream);
    let live = bench.allocate(MIB, stream);
    // Larger than a chunk, so that it takes several, and different ones at times.
    let use_some = || {
        for size in [30 * MIB, 5 * MIB] {
            let block = bench.allocate(size, stream);
            bench.gpu.fill(block, size, 2, stream);
            bench.free(block);
        }
        bench.gpu.settle();
    };
    purge_from(&bench, 0, 4 * TIMEOUT, use_some);
    let (held, created) = (bench.reserved(), bench.calls("cuMemCreate"));
    assert!(held < 80 * MIB, "{held} bytes are reserved");
    purge_from(&bench, 4 * TIMEOUT, 12 * TIMEOUT, use_some);
    assert_eq!(bench.reserved(), held);
    assert_eq!(
        bench.calls("cuMemCreate"),
        created,
        "memory in use was purged"
    );
    bench.free(live);
    bench.finish();
}

/// Purged chunks serve any request that they could have served before.
#[test]
fn purged_memory_is_reused_on_a_miss() {
    let bench = Bench::new(Settings {
        chunk_size: 2 << 20,
        ..Settings::default()
    });
    let (a, b) = (bench.gpu.stream(), bench.gpu.stream());
    let walls: Vec<u64> = (0..20)
        .map(|turn| bench.allocate([9 * MIB, 700 << 10][turn % 2], a))
        .collect();
    let (free, walls) = every_other(&walls);
    free.iter().for_each(|block| bench.free(*block));
    bench.gpu.settle();
    let held = bench.reserved();
    // At the second time the device is known to be idle, and the chunks leave the free lists.
    purge_at(&bench, 0);
    purge_at(&bench, TIMEOUT - 1);
    let small = bench.allocate(512, b);
    let middle = bench.allocate(8 * MIB, b);
    assert_eq!(bench.reserved(), held);
    // No free block is large enough, so chunks are remapped.
    let large = bench.allocate(30 * MIB, b);
    assert!(bench.device().figures().counters.stitches > 0);
    assert_eq!(bench.reserved(), held);
    for (block, size) in [(small, 512), (middle, 8 * MIB), (large, 30 * MIB)] {
        bench.gpu.fill(block, size, 3, b);
        bench.free(block);
    }
    walls.iter().for_each(|block| bench.free(*block));
    bench.finish();
}

#[test]
fn purge_spares_memory_of_running_work() {
    let bench = Bench::new(Settings::default());
    let (gpu, stream) = (&bench.gpu, bench.gpu.stream());
    let block = bench.allocate(40 * MIB, stream);
    let held = gpu.hold(&[stream]);
    gpu.fill(block, 40 * MIB, 7, stream);
    bench.free(block);
    purge_from(&bench, 0, 5 * TIMEOUT, || ());
    assert_eq!(bench.reserved(), 40 * MIB);
    held.release();
    purge_from(&bench, 5 * TIMEOUT, 7 * TIMEOUT, || ());
    assert_eq!(bench.reserved(), 0);
    bench.finish();
}

#[test]
fn purge_spares_private_pools_and_waits_while_one_is_filled() {
    let bench = Bench::new(Settings::default());
    let stream = bench.gpu.stream();
    peak(&bench, 10, stream);
    let held = bench.reserved();
    with_pool(&bench, (1, 0), || {
        // No allocation yet, so that a capture may have begun.
        purge_from(&bench, 0, 5 * TIMEOUT, || ());
        assert_eq!(bench.reserved(), held);
        let block = bench.allocate(6 * MIB, stream);
        bench.free(block);
    });
    purge_from(&bench, 5 * TIMEOUT, 10 * TIMEOUT, || ());
    assert_eq!(bench.reserved(), 6 * MIB, "the private pool's");
    bench.device().release_pool((1, 0));
    bench.finish();
}

#[test]
fn purge_spares_segments_with_expandable_segments_off() {
    let bench = Bench::new(Settings {
        expandable_segments: false,
        ..Settings::default()
    });
    let stream = bench.gpu.stream();
    peak(&bench, 4, stream);
    let held = bench.reserved();
    purge_from(&bench, 0, 5 * TIMEOUT, || ());
    assert_eq!(bench.reserved(), held);
    bench.finish();
}

mod sim_only {
    use super::{INTERVAL, TIMEOUT, peak, purge_from};
    use crate::harness::gpu::{Bench, MIB};
    use concertina_engine::driver::sys::{CUresult, CUstream};
    use concertina_engine::settings::Settings;
    use concertina_sim::Config;

    /// The simulated machine calls whatever would break a capture a violation, on any thread.
    #[test]
    fn purge_breaks_no_capture() {
        let Some(bench) = Bench::simulated(
            "purge_breaks_no_capture",
            Config::default(),
            Settings::default(),
        ) else {
            return;
        };
        let machine = bench.machine();
        let stream = bench.gpu.stream();
        // A capture that a query of the default stream reveals.
        let mut blocking: CUstream = std::ptr::null_mut();
        // SAFETY: the output is a local.
        unsafe { (bench.gpu.functions.cuStreamCreate)(&mut blocking, 0) };
        peak(&bench, 10, stream);
        let held = bench.reserved();
        machine.set_capturing(blocking, true);
        purge_from(&bench, 0, 5 * TIMEOUT, || ());
        machine.set_capturing(blocking, false);
        assert_eq!(bench.reserved(), held);
        purge_from(&bench, 5 * TIMEOUT, 7 * TIMEOUT, || ());
        assert_eq!(bench.reserved(), 0);
        // A capture of any other stream, while memory is requested now and then.
        machine.set_capturing(stream as CUstream, true);
        purge_from(&bench, 7 * TIMEOUT, 11 * TIMEOUT, || {
            let blocks = [3 * MIB, 50 * MIB].map(|size| bench.allocate(size, stream));
            for block in blocks {
                bench.free(block);
            }
        });
        machine.set_capturing(stream as CUstream, false);
        assert_eq!(machine.violations(), Vec::<String>::new());
        purge_from(&bench, 11 * TIMEOUT, 13 * TIMEOUT, || ());
        assert_eq!(bench.reserved(), 0);
        bench.finish();
    }

    /// A release that the driver refuses is tried again, and nothing is lost meanwhile.
    #[test]
    fn purge_survives_driver_failures() {
        for call in ["cuMemUnmap", "cuMemRelease", "cuCtxRecordEvent"] {
            let Some(bench) = Bench::simulated(
                "purge_survives_driver_failures",
                Config::default(),
                Settings::default(),
            ) else {
                return;
            };
            let stream = bench.gpu.stream();
            peak(&bench, 10, stream);
            let machine = bench.machine();
            machine.fail_every(call, CUresult::CUDA_ERROR_UNKNOWN);
            purge_from(&bench, 0, 3 * TIMEOUT, || ());
            machine.clear_failures();
            let block = bench.allocate(150 * MIB, stream);
            bench.free(block);
            purge_from(&bench, 3 * TIMEOUT, 5 * TIMEOUT + INTERVAL, || ());
            assert_eq!(bench.reserved(), 0, "{call}");
            bench.finish();
        }
    }
}
