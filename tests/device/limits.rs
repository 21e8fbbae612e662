//! Limits: `limit`, `per_process_memory_fraction`, and changes of them.

use crate::harness::gpu::{Bench, GIB, MIB};
use concertina_engine::settings::Settings;

pub fn limited(bytes: u64) -> Settings {
    Settings {
        limit: Some(bytes as usize),
        ..Settings::default()
    }
}

#[test]
fn limit_can_be_used_up_and_no_more() {
    let limit = 256 * MIB;
    let bench = Bench::new(limited(limit));
    let (gpu, device, stream) = (&bench.gpu, bench.device(), bench.gpu.stream());
    assert_eq!(device.limit(), Some(limit));
    for _ in 0..2 {
        let blocks: Vec<u64> = (0..32).map(|_| bench.allocate(8 * MIB, stream)).collect();
        assert_eq!(bench.reserved(), limit);
        for size in [1, 8 * MIB, limit, 10 * GIB] {
            let shortage = device
                .allocate(size as usize, stream)
                .expect_err("a full device");
            assert_eq!(shortage.shortage.asked, size);
            assert_eq!(shortage.limit, Some(limit));
        }
        assert_eq!(device.check(), Ok(()));
        // The pool is as good as before: one block less is one block more.
        bench.free(blocks[7]);
        let again = bench.allocate(8 * MIB, stream);
        gpu.fill(again, 8 * MIB, 1, stream);
        bench.free(again);
        blocks
            .iter()
            .filter(|block| **block != blocks[7])
            .for_each(|block| bench.free(*block));
        // All of it in one piece, wherever its chunks lie.
        let whole = bench.allocate(limit, stream);
        gpu.fill(whole, limit, 2, stream);
        gpu.expect(whole, limit, 2, stream);
        bench.free(whole);
        assert_eq!(bench.reserved(), limit);
    }
    bench.finish();
}

#[test]
fn limit_can_be_lowered_and_lifted() {
    let bench = Bench::new(limited(GIB));
    let (device, stream) = (bench.device(), bench.gpu.stream());
    let block = bench.allocate(128 * MIB, stream);
    device.set_limit(Some(64 * MIB));
    // What is held beyond it stays, and what is free within it can still be had.
    assert_eq!(bench.reserved(), 128 * MIB);
    assert!(device.allocate(MIB as usize, stream).is_err());
    bench.free(block);
    let small = bench.allocate(100 * MIB, stream);
    bench.free(small);
    device.empty_cache();
    assert_eq!(bench.reserved(), 0);
    assert!(device.allocate(65 << 20, stream).is_err());
    let fits = bench.allocate(64 * MIB, stream);
    device.set_limit(Some(GIB));
    let more = bench.allocate(65 * MIB, stream);
    [fits, more].into_iter().for_each(|block| bench.free(block));

    device.set_memory_fraction(0.01);
    let share = (device.total_bytes() as f64 * 0.01) as u64;
    assert_eq!(device.limit(), Some(share));
    assert!(device.allocate(share as usize + (2 << 20), stream).is_err());
    device.set_memory_fraction(1.0);
    assert_eq!(device.limit(), Some(GIB));
    bench.finish();
}

/// The limit that a person sets holds whatever share the program sets.
#[test]
fn limit_of_the_settings_is_not_lifted_by_a_memory_fraction() {
    let settings = Settings {
        limit: Some(64 << 20),
        ..Settings::default()
    };
    let bench = Bench::new(settings);
    let device = bench.device();
    for fraction in [1.0, 0.9] {
        device.set_memory_fraction(fraction);
        assert_eq!(device.limit(), Some(64 * MIB));
        assert_eq!(device.memory_fraction(), fraction);
    }
    let share = 16 * MIB;
    device.set_memory_fraction(share as f64 / device.total_bytes() as f64);
    assert!(device.limit().is_some_and(|limit| limit <= share));
    device.set_memory_fraction(1.0);
    assert_eq!(device.limit(), Some(64 * MIB));
    bench.finish();
}

#[test]
fn limit_by_per_process_memory_fraction() {
    let settings = Settings {
        per_process_memory_fraction: 0.001,
        ..Settings::default()
    };
    let bench = Bench::new(settings);
    let (device, stream) = (bench.device(), bench.gpu.stream());
    let share = (device.total_bytes() as f64 * 0.001) as u64;
    assert_eq!(device.limit(), Some(share));
    assert!(device.allocate(share as usize + 1, stream).is_err());
    let block = bench.allocate(share / (2 * MIB) * (2 * MIB), stream);
    bench.free(block);
    bench.finish();
}
