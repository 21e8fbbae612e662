//! One stream: sizes, reuse, best fit, splitting and coalescing.

use crate::harness::gpu::{Bench, KIB, MIB, rounded};
use concertina_engine::device::UnknownPointer;
use concertina_engine::settings::Settings;

#[test]
fn size_is_rounded_up_to_512_and_aligned() {
    let bench = Bench::new(Settings::default());
    let (gpu, stream) = (&bench.gpu, bench.gpu.stream());
    let powers = (0..=30).map(|power| 1u64 << power);
    let sizes = powers
        .flat_map(|size| [size - 1, size, size + 1])
        .filter(|size| *size > 0);
    for (turn, size) in sizes.enumerate() {
        let address = bench.allocate(size, stream);
        assert_eq!(bench.device().size_of(address), Some(rounded(size)));
        let (word, end) = (turn as u32, address + rounded(size));
        gpu.fill(address, 512, word, stream);
        gpu.fill(end - 512, 512, word, stream);
        gpu.expect(address, 512, word, stream);
        gpu.expect(end - 512, 512, word, stream);
        assert_eq!(bench.device().check(), Ok(()));
        bench.free(address);
        assert_eq!(bench.device().check(), Ok(()));
    }
    bench.finish();
}

#[test]
fn size_mix_does_not_overlap() {
    let bench = Bench::new(Settings::default());
    let (gpu, stream) = (&bench.gpu, bench.gpu.stream());
    let mut blocks: Vec<(u64, u64)> = (0..200u64)
        .map(|turn| {
            let size = 1 + turn * turn * 37 + (turn % 7) * 300 * KIB;
            (bench.allocate(size, stream), rounded(size))
        })
        .collect();
    for (turn, (address, size)) in blocks.iter().enumerate() {
        gpu.fill(*address, *size, turn as u32, stream);
    }
    for (turn, (address, size)) in blocks.iter().enumerate() {
        gpu.expect(*address, *size, turn as u32, stream);
    }
    blocks.sort_unstable();
    assert!(blocks.is_sorted_by(|a, b| a.0 + a.1 <= b.0));
    blocks.iter().for_each(|(address, _)| bench.free(*address));
    bench.finish();
}

#[test]
fn same_stream_reuse_is_immediate_and_calls_no_driver_function() {
    let bench = Bench::new(Settings::default());
    let (gpu, stream) = (&bench.gpu, bench.gpu.stream());
    for size in [1, 4 * KIB, MIB, 3 * MIB, 64 * MIB] {
        let first = bench.allocate(size, stream);
        let held = gpu.hold(&[stream]);
        gpu.fill(first, rounded(size), 1, stream);
        let calls = bench.all_calls();
        for _ in 0..100 {
            bench.free(first);
            assert_eq!(bench.allocate(size, stream), first);
        }
        assert_eq!(bench.all_calls(), calls, "{size}");
        gpu.fill(first, rounded(size), 2, stream);
        held.release();
        gpu.expect(first, rounded(size), 2, stream);
        bench.free(first);
    }
    bench.finish();
}

#[test]
fn best_fit_takes_the_smallest_free_block() {
    let bench = Bench::new(Settings::default());
    let stream = bench.gpu.stream();
    // Free blocks of these sizes, separated by live blocks.
    let sizes = [
        5 * MIB,
        512,
        64 * KIB,
        3 * MIB,
        4 * KIB,
        MIB,
        65 * KIB,
        40 * MIB,
    ];
    let pairs: Vec<(u64, u64, u64)> = sizes
        .iter()
        .map(|size| {
            (
                *size,
                bench.allocate(*size, stream),
                bench.allocate(512, stream),
            )
        })
        .collect();
    let separators = bench.fill_free_blocks(stream);
    pairs
        .iter()
        .for_each(|(_, free_block, _)| bench.free(*free_block));
    let grown = bench.device().figures().counters.growths;
    for wanted in [
        1,
        513,
        4096,
        4097,
        65 * KIB,
        65 * KIB + 1,
        MIB,
        MIB + 1,
        3 * MIB,
        5 * MIB,
    ] {
        let fits = pairs.iter().filter(|(size, ..)| *size >= wanted);
        let (_, best, _) = fits.min_by_key(|(size, ..)| size).expect("a free_block");
        let address = bench.allocate(wanted, stream);
        assert_eq!(address, *best, "for {wanted}");
        bench.free(address);
        assert_eq!(bench.device().check(), Ok(()));
    }
    assert_eq!(bench.device().figures().counters.growths, grown);
    pairs
        .iter()
        .map(|(.., separator)| separator)
        .chain(&separators)
        .for_each(|separator| bench.free(*separator));
    bench.finish();
}

#[test]
fn coalesce_whatever_the_order_of_frees() {
    let bench = Bench::new(Settings::default());
    let stream = bench.gpu.stream();
    let parts = [3 * MIB, 512, 70 * KIB, 9 * MIB];
    let whole: u64 = parts.iter().sum();
    let first = bench.allocate(whole, stream);
    let separators = bench.fill_free_blocks(stream);
    bench.free(first);
    let grown = bench.device().figures().counters.growths;
    for order in permutations(parts.len()) {
        let blocks = parts.map(|size| bench.allocate(size, stream));
        // They are cut off one free block, side by side.
        let expected: Vec<u64> = parts
            .iter()
            .scan(first, |next, size| {
                Some(std::mem::replace(next, *next + size))
            })
            .collect();
        assert_eq!(blocks.as_slice(), expected);
        for block in order {
            bench.free(blocks[block]);
            assert_eq!(bench.device().check(), Ok(()));
        }
        assert_eq!(bench.allocate(whole, stream), first);
        bench.free(first);
    }
    assert_eq!(bench.device().figures().counters.growths, grown);
    separators
        .iter()
        .for_each(|separator| bench.free(*separator));
    bench.finish();
}

fn permutations(count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let shorter = permutations(count - 1);
    let longer = shorter.iter().flat_map(|order| {
        (0..count).map(|at| {
            let mut order = order.clone();
            order.insert(at, count - 1);
            order
        })
    });
    longer.collect()
}

#[test]
fn size_zero_and_sizes_too_large() {
    let bench = Bench::new(Settings::default());
    let (device, stream) = (bench.device(), bench.gpu.stream());
    // C entry points answer 0 bytes themselves; the pool hands out the least there is.
    let empty = bench.allocate(0, stream);
    assert_eq!(device.size_of(empty), Some(512));
    let held = bench.reserved();
    for size in [
        1 << 45,
        1 << 46,
        (1 << 46) + 1,
        1 << 60,
        usize::MAX - 511,
        usize::MAX,
    ] {
        assert!(device.allocate(size, stream).is_err(), "{size}");
        assert_eq!(device.check(), Ok(()));
    }
    assert_eq!(bench.reserved(), held);
    assert_eq!(device.size_of(empty + 512), None);
    assert_eq!(device.free(empty + 512, stream), Err(UnknownPointer));
    assert_eq!(device.free(0, stream), Err(UnknownPointer));
    assert_eq!(device.record_use(empty + 512, stream), Err(UnknownPointer));
    bench.free(empty);
    assert_eq!(
        device.free(empty, stream),
        Err(UnknownPointer),
        "freed twice"
    );
    bench.finish();
}
