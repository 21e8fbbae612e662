//! The stream cache: blocks of exact sizes are freed and allocated again without the pool. None is lost or
//! handed out twice, whichever thread frees.

use crate::harness::accounts::identities;
use crate::harness::gpu::{Bench, KIB, MIB, on_card};
use crate::harness::random::Random;
use concertina_engine::device::UnknownPointer;
use concertina_engine::settings::Settings;
use std::collections::BTreeMap;
use std::sync::mpsc::Sender;

/// Blocks in use, by address: none may overlap another.
#[derive(Default)]
struct Live(BTreeMap<u64, u64>);

impl Live {
    fn add(&mut self, address: u64, size: u64) {
        let before = self.0.range(..=address).next_back();
        assert!(before.is_none_or(|(start, size)| start + size <= address));
        let after = self.0.range(address..).next();
        assert!(after.is_none_or(|(start, _)| address + size <= *start));
        self.0.insert(address, size);
    }
}

#[test]
fn stream_cache_under_changing_sizes_and_streams() {
    let bench = Bench::new(Settings::default());
    let (device, streams) = (bench.device(), [bench.gpu.stream(), bench.gpu.stream()]);
    let (mut live, mut random) = (Live::default(), Random::new(7));
    let mut live_blocks: Vec<(u64, u64)> = Vec::new();
    let mut count = 0;
    for phase in 0..if on_card() { 8 } else { 60 } {
        let stream = streams[random.below(2) as usize];
        for _ in 0..200 {
            // In turns: one size only; a few sizes; random sizes.
            let size = match phase % 3 {
                0 => 64 * KIB,
                1 => (1 + random.below(3)) * 100 * KIB,
                _ => random.between(1, MIB),
            };
            let address = device.allocate(size as usize, stream).expect("memory");
            count += 1;
            live.add(address, size);
            if random.once_in(3) {
                live_blocks.push((address, stream));
                if live_blocks.len() > 100 {
                    let at = random.below(live_blocks.len() as u64) as usize;
                    let (address, stream) = live_blocks.swap_remove(at);
                    live.0.remove(&address);
                    assert_eq!(device.free(address, stream), Ok(()));
                }
            } else {
                live.0.remove(&address);
                // The caller may name another stream: that is slower, and has to work.
                let caller = if random.once_in(4) {
                    streams[0]
                } else {
                    stream
                };
                assert_eq!(device.free(address, caller), Ok(()));
                assert_eq!(device.free(address, caller), Err(UnknownPointer), "twice");
            }
        }
        identities(&device.figures());
        let figures = device.figures().counters;
        assert_eq!(figures.all.allocation.allocated, count);
        assert_eq!(figures.all.allocation.current, live_blocks.len() as u64);
        assert_eq!(device.check(), Ok(()));
    }
    for (address, stream) in live_blocks {
        assert_eq!(device.free(address, stream), Ok(()));
    }
    bench.finish();
}

#[test]
fn stream_cache_blocks_are_unknown_to_address_lookup() {
    let bench = Bench::new(Settings::default());
    let (device, stream) = (bench.device(), bench.gpu.stream());
    for size in [64 * KIB, MIB / 2] {
        for _ in 0..50 {
            let address = device.allocate(size as usize, stream).expect("memory");
            for byte in [address, address + 1] {
                assert_eq!(device.find(byte).map(|it| it.start), Some(address));
            }
            assert!(device.is_allocated(address));
            assert_eq!(device.free(address, stream), Ok(()));
            assert_eq!(device.find(address), None);
            assert_eq!(device.find(address + 1), None);
            assert!(!device.is_allocated(address));
            assert_eq!(
                device.free_after_all_streams(address),
                Err(UnknownPointer),
                "twice"
            );
        }
    }
    bench.finish();
}

#[test]
fn stream_cache_shared_by_threads_of_one_stream() {
    let bench = Bench::new(Settings::default());
    let stream = bench.gpu.stream();
    let turns = if on_card() { 300 } else { 3000 };
    let (gpu, device) = (&bench.gpu, bench.device());
    let work = |seed, to_free: &Sender<u64>| {
        let mut random = Random::new(seed);
        for turn in 0..turns {
            let size = match turn / 200 % 2 {
                0 => 64 * KIB,
                _ => random.between(1, MIB),
            };
            let address = device.allocate(size as usize, stream).expect("memory");
            // Each block has one owner, which the simulated GPU checks.
            gpu.claim(address, size, seed + 1);
            gpu.disown(address, size);
            match random.below(3) {
                0 => to_free.send(address).expect("a receiver"),
                _ => assert_eq!(device.free(address, stream), Ok(())),
            }
        }
    };
    gpu.on_threads(work, |address| {
        assert_eq!(device.free(address, stream), Ok(()))
    });
    identities(&bench.device().figures());
    let figures = bench.device().figures().counters;
    assert_eq!(figures.all.allocation.allocated, 4 * turns);
    assert_eq!(figures.all.allocation.current, 0);
    bench.finish();
}
