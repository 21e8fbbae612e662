//! `free:relaxed`: cudaFree returns at once, and a block is reused only after all work that was submitted
//! before, whichever threads free.

use crate::harness::accounts::identities;
use crate::harness::gpu::{Bench, KIB, MIB, on_card};
use crate::harness::random::Random;
use concertina_engine::device::{Call, Device, UnknownPointer};
use concertina_engine::settings::{Free, Settings};
use std::sync::mpsc::Sender;
use std::thread;

pub fn bench() -> Bench {
    Bench::new(Settings {
        free: Free::Relaxed,
        ..Settings::default()
    })
}

fn live(device: &Device) -> u64 {
    device.usage().live
}

/// Reclaims deferred blocks, and ends the test.
pub fn finish(bench: &Bench) {
    bench.gpu.settle();
    let device = bench.device();
    device.reclaim_relaxed();
    assert_eq!(live(device), 0);
    identities(&device.figures());
    assert_eq!(device.check(), Ok(()));
    bench.finish();
}

#[test]
fn free_relaxed_block_is_reused_once_earlier_work_is_done() {
    let bench = bench();
    let (gpu, device) = (&bench.gpu, bench.device());
    let (one, other) = (gpu.stream(), gpu.stream());
    // More than share one event.
    for size in [64 * KIB, MIB] {
        let held = gpu.hold(&[one]);
        let mut late = Vec::new();
        for turn in 0..300 {
            let block = device.allocate_relaxed(size as usize).expect("memory");
            assert!(!late.contains(&block), "work may use it, in turn {turn}");
            gpu.fill(block, size, turn, one);
            assert_eq!(device.free_relaxed(block), Ok(()));
            late.push(block);
        }
        assert_eq!(live(device), 0);
        drop(held);
        gpu.settle();
        let again: Vec<u64> = (0..200)
            .map(|_| device.allocate_relaxed(size as usize).expect("memory"))
            .collect();
        assert!(again.iter().filter(|block| late.contains(block)).count() > 100);
        assert_eq!(live(device), 200 * size);
        for (turn, block) in again.iter().enumerate() {
            gpu.fill(*block, size, turn as u32, other);
        }
        for (turn, block) in again.iter().enumerate() {
            gpu.expect(*block, size, turn as u32, other);
            assert_eq!(device.free_relaxed(*block), Ok(()));
        }
    }
    finish(&bench);
}

#[test]
fn free_relaxed_records_one_event_for_many_large_blocks() {
    let bench = bench();
    let device = bench.device();
    // How many bytes one thread frees before it records an event; only the first size divides it.
    let share = (device.total_bytes() / 256).max(32 * MIB);
    for size in [share / 8, share / 19 * 2, share / 33 * 2] {
        let size = size / MIB * MIB;
        let (pairs, batch) = (50 * share / size, share / size);
        let recorded = || {
            let calls = device.figures().calls;
            let record = calls.iter().find(|(call, _)| *call == Call::Record);
            record.map_or(0, |(_, figures)| figures.count)
        };
        let before = recorded();
        for _ in 0..pairs {
            let block = device.allocate_relaxed(size as usize).expect("memory");
            assert_eq!(device.free_relaxed(block), Ok(()));
        }
        let records = recorded() - before;
        assert!(
            records <= pairs / batch + 2,
            "{records} events for {pairs} blocks of {size} bytes"
        );
    }
    finish(&bench);
}

#[test]
fn free_relaxed_block_is_unknown_at_once() {
    let bench = bench();
    let device = bench.device();
    let size = 64 * KIB;
    // At first from the pool, then from the thread's magazine.
    for _ in 0..3 {
        let blocks: Vec<u64> = (0..200)
            .map(|_| device.allocate_relaxed(size as usize).expect("memory"))
            .collect();
        for block in &blocks {
            assert!(device.is_allocated(*block));
            assert_eq!(device.find(block + 1).map(|it| it.start), Some(*block));
            assert_eq!(device.free_relaxed(*block), Ok(()));
            assert!(!device.is_allocated(*block));
            assert_eq!(device.find(*block), None);
            assert_eq!(device.find(block + 1), None);
            for _ in 0..2 {
                assert_eq!(device.free_relaxed(*block), Err(UnknownPointer), "twice");
                assert_eq!(
                    device.free_after_all_streams(*block),
                    Err(UnknownPointer),
                    "twice"
                );
            }
            thread::scope(|scope| {
                let again = scope.spawn(|| device.free_relaxed(*block)).join();
                assert_eq!(again.expect("no panic"), Err(UnknownPointer), "twice");
            });
        }
        assert_eq!(live(device), 0);
    }
    // A block of a thread's magazine is freed by another function.
    let block = device.allocate_relaxed(size as usize).expect("memory");
    assert_eq!(device.free_completed(block), Ok(()));
    assert_eq!(device.free_relaxed(block), Err(UnknownPointer));
    let block = device.allocate_relaxed(size as usize).expect("memory");
    assert_eq!(device.free_after_all_streams(block), Ok(()));
    assert_eq!(device.free_relaxed(block), Err(UnknownPointer));
    finish(&bench);
}

/// A library may record streams in PyTorch on memory that is not PyTorch's.
#[test]
fn record_stream_on_cuda_malloc_memory_keeps_it_allocated() {
    for free in [Free::Strict, Free::Relaxed] {
        let bench = Bench::new(Settings {
            free,
            ..Settings::default()
        });
        let (device, stream) = (bench.device(), bench.gpu.stream());
        let take = || match free {
            Free::Strict => device.allocate_unordered(64 << 10),
            Free::Relaxed => device.allocate_relaxed(64 << 10),
        };
        for _ in 0..3 {
            let block = take().expect("memory");
            assert_eq!(device.record_use(block, stream), Ok(()));
            assert!(device.is_allocated(block));
            assert_eq!(device.find(block).map(|it| it.start), Some(block));
            let freed = match free {
                Free::Strict => device.free_completed(block),
                Free::Relaxed => device.free_relaxed(block),
            };
            assert_eq!(freed, Ok(()));
            assert!(!device.is_allocated(block));
            assert_eq!(device.record_use(block, stream), Err(UnknownPointer));
        }
        finish(&bench);
    }
}

#[test]
fn free_relaxed_memory_is_waited_for_under_a_limit() {
    let bench = Bench::new(Settings {
        free: Free::Relaxed,
        limit: Some(64 << 20),
        ..Settings::default()
    });
    let device = bench.device();
    for size in [MIB, 16 * MIB, 4 * MIB, 64 * MIB, 512 * KIB] {
        let count = 64 * MIB / size;
        for _ in 0..3 {
            let blocks: Vec<u64> = (0..count)
                .map(|_| device.allocate_relaxed(size as usize).expect("memory"))
                .collect();
            for block in blocks {
                assert_eq!(device.free_relaxed(block), Ok(()));
            }
        }
    }
    // A stream may have all of it, too.
    assert!(device.reclaim_relaxed());
    let stream = bench.gpu.stream();
    let block = device.allocate(64 << 20, stream).expect("memory");
    assert_eq!(device.free(block, stream), Ok(()));
    finish(&bench);
}

#[test]
fn free_relaxed_from_many_threads_while_counters_are_read() {
    let bench = bench();
    let turns = if on_card() { 300 } else { 4000 };
    let (gpu, device) = (&bench.gpu, bench.device());
    let work = |seed, to_free: &Sender<u64>| {
        let mut random = Random::new(seed);
        let mut live_blocks = Vec::new();
        for turn in 0..turns {
            let size = match turn / 500 % 3 {
                0 => 64 * KIB,
                1 => (1 + random.below(40)) * 4 * KIB,
                _ => random.between(1, 2 * MIB),
            };
            let block = device.allocate_relaxed(size as usize).expect("memory");
            // Each block has one owner, which the simulated GPU checks.
            gpu.claim(block, size, seed + 1);
            gpu.disown(block, size);
            match random.below(8) {
                0 => to_free.send(block).expect("a receiver"),
                1 => live_blocks.push(block),
                2 if !live_blocks.is_empty() => {
                    let at = random.below(live_blocks.len() as u64) as usize;
                    assert_eq!(device.free_relaxed(live_blocks.swap_remove(at)), Ok(()));
                    assert_eq!(device.free_relaxed(block), Ok(()));
                }
                _ => assert_eq!(device.free_relaxed(block), Ok(())),
            }
            if random.once_in(200) {
                identities(&device.figures());
            }
        }
        for block in live_blocks {
            assert_eq!(device.free_relaxed(block), Ok(()));
        }
    };
    gpu.on_threads(work, |block| assert_eq!(device.free_relaxed(block), Ok(())));
    let figures = bench.device().figures().of_cuda;
    assert_eq!(figures.all.allocation.allocated, 4 * turns);
    finish(&bench);
}

#[test]
fn relaxed_free_accounts_rounded_sizes() {
    let text = "roundup_power2_divisions:4";
    let lookup = |name: &str| (name == "PYTORCH_CUDA_ALLOC_CONF").then(|| text.to_string());
    let (settings, complaints) = Settings::from_lookup(lookup);
    assert!(complaints.is_empty());
    let bench = Bench::new(Settings {
        free: Free::Relaxed,
        ..settings
    });
    let (gpu, device) = (&bench.gpu, bench.device());
    // Just above a power of two: a quarter more is handed out.
    let size = (MIB + 512) as usize;
    let bytes = device.block_size(size);
    assert_eq!(bytes, MIB + MIB / 4);
    // More than a magazine batches, so that some go to the depot.
    for turn in 1..=3 {
        let blocks = (0..200).map(|_| device.allocate_relaxed(size).expect("memory"));
        let blocks: Vec<u64> = blocks.collect();
        assert_eq!(live(device), 200 * bytes, "turn {turn}");
        let allocated = device.figures().of_cuda.all.allocated_bytes;
        assert_eq!(allocated.allocated, turn * 200 * bytes);
        for block in blocks {
            assert_eq!(device.size_of(block), Some(bytes));
            assert_eq!(device.free_relaxed(block), Ok(()));
        }
        assert_eq!(live(device), 0, "turn {turn}");
        gpu.settle();
    }
    finish(&bench);
}

mod sim_only {
    use super::*;
    use crate::harness::gpu::{GIB, config_with_memory};

    /// With caching off, too, relaxed frees are waited for rather than that a request fails.
    #[test]
    fn free_relaxed_is_reclaimed_for_a_request_without_caching() {
        let settings = Settings {
            free: Free::Relaxed,
            ..Settings::default()
        };
        let name = "free_relaxed_is_reclaimed_for_a_request_without_caching";
        let Some(bench) = Bench::simulated(name, config_with_memory(GIB), settings) else {
            return;
        };
        let device = bench.device();
        let block = device.allocate_relaxed((700 * MIB) as usize);
        assert_eq!(device.free_relaxed(block.expect("memory")), Ok(()));
        device.set_uncached(true);
        let other = device.allocate((600 * MIB) as usize, 0);
        assert_eq!(
            device.free(other.expect("memory of the relaxed free"), 0),
            Ok(())
        );
        device.set_uncached(false);
        bench.finish();
    }
}
