//! `cudaDeviceReset` and the end of a context: no block survives, and none is handed out again.

use crate::harness::gpu::{Bench, MIB};
use concertina_engine::device::UnknownPointer;
use concertina_engine::settings::{Free, Settings};
use std::collections::HashSet;
use std::hint::spin_loop;
use std::sync::Barrier;
use std::thread;

#[test]
fn device_reset_leaves_no_block() {
    for caching in [true, false] {
        let size = 4 * MIB;
        let bench = Bench::new(Settings {
            limit: Some(6 << 20),
            ..Settings::default()
        });
        let device = bench.device();
        for _ in 0..3 {
            device.set_uncached(!caching);
            let block = bench.allocate(size, 0);
            bench.forget(block);
            // Whether it is cached now does not matter, but whether it was.
            device.set_uncached(caching);
            device.reset(false);
            assert_eq!(device.size_of(block), None);
            assert_eq!(device.free(block, 0), Err(UnknownPointer));
            assert_eq!(device.record_use(block, 0), Err(UnknownPointer));
        }
        device.set_uncached(false);
        // All that the limit allows.
        bench.free(bench.allocate(size, 0));
        bench.finish();
    }
}

/// Threads free while the device is reset: blocks in a thread's magazine or a stream cache end with the
/// others, and are not handed out again.
#[test]
fn device_reset_while_threads_free() {
    // More than share one event; as many as a stream cache takes.
    for (free, count) in [(Free::Relaxed, 200), (Free::Strict, 8)] {
        let bench = Bench::new(Settings {
            free,
            ..Settings::default()
        });
        let device = bench.device();
        let barrier = Barrier::new(3);
        let work = || {
            let _here = bench.gpu.enter();
            let stream = bench.gpu.stream();
            let take = |count| -> Vec<u64> {
                let one = |_| match free {
                    Free::Relaxed => device.allocate_relaxed(4096).expect("memory"),
                    Free::Strict => device.allocate(4096, stream).expect("memory"),
                };
                (0..count).map(one).collect()
            };
            let free_block = |block| match free {
                Free::Relaxed => device.free_relaxed(block),
                Free::Strict => device.free(block, stream),
            };
            let (mut had, mut refused) = (Vec::new(), 0);
            for _ in 0..10 {
                // Opens the stream's stream cache.
                let pairs = (0..20).filter(|_| free_block(take(1)[0]).is_err());
                refused += pairs.count();
                let blocks = take(count);
                barrier.wait();
                for block in blocks {
                    // The device may have started over by now, and not know it.
                    let _ = free_block(block);
                    (0..5000).for_each(|_| spin_loop());
                }
                barrier.wait();
                let blocks = take(count);
                had.push(blocks.clone());
                barrier.wait();
                let unknown = blocks.into_iter().filter(|it| free_block(*it).is_err());
                refused += unknown.count();
            }
            assert_eq!(refused, 0, "blocks that are in use");
            had
        };
        let had = thread::scope(|scope| {
            let threads = [(); 2].map(|()| scope.spawn(work));
            for _ in 0..10 {
                // To go through them takes a while.
                for _ in 0..20_000 {
                    device.allocate(512, 0).expect("memory");
                }
                barrier.wait();
                device.reset(false);
                barrier.wait();
                barrier.wait();
            }
            threads.map(|thread| thread.join().expect("a thread"))
        });
        for (one, other) in had[0].iter().zip(&had[1]) {
            let all: HashSet<&u64> = one.iter().chain(other).collect();
            assert_eq!(all.len(), 2 * count);
        }
        device.reset(false);
        assert_eq!(device.check(), Ok(()));
        bench.finish();
    }
}
