//! One stream: sizes, reuse, fit, splitting and joining, and free memory made contiguous.

use crate::harness::gpu::{Bench, GIB, KIB, MIB, every_other, rounded};
use concertina_engine::device::UnknownPointer;
use concertina_engine::settings::Settings;

#[test]
fn any_size_is_rounded_up_to_512_and_aligned() {
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
fn many_sizes_live_at_once_do_not_overlap() {
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
fn a_freed_block_is_reused_at_once_on_its_stream_without_a_driver_call() {
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
fn the_smallest_hole_that_fits_is_taken() {
    let bench = Bench::new(Settings::default());
    let stream = bench.gpu.stream();
    // Free blocks of these sizes, kept apart by blocks that live.
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
    let walls = bench.fill_holes(stream);
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
        .map(|(.., wall)| wall)
        .chain(&walls)
        .for_each(|wall| bench.free(*wall));
    bench.finish();
}

#[test]
fn blocks_split_and_join_whatever_the_order_of_freeing() {
    let bench = Bench::new(Settings::default());
    let stream = bench.gpu.stream();
    let parts = [3 * MIB, 512, 70 * KIB, 9 * MIB];
    let whole: u64 = parts.iter().sum();
    let first = bench.allocate(whole, stream);
    let walls = bench.fill_holes(stream);
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
    walls.iter().for_each(|wall| bench.free(*wall));
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

/// 64 blocks of 4 MiB, every other one freed, and a request for half of what is free: chunks are
/// moved to where it gets one contiguous range, while the work on the freed blocks still runs, and
/// nothing waits. What other blocks hold stays as it was.
#[test]
fn holes_that_lie_apart_become_one_contiguous_range() {
    for chunk in [2 * MIB, 4 * MIB] {
        let settings = Settings {
            chunk_size: chunk as usize,
            ..Settings::default()
        };
        let bench = Bench::new(settings);
        let (gpu, stream) = (&bench.gpu, bench.gpu.stream());
        let size = 4 * MIB;
        let blocks: Vec<u64> = (0..64).map(|_| bench.allocate(size, stream)).collect();
        for (turn, block) in blocks.iter().enumerate() {
            gpu.fill(*block, size, turn as u32, stream);
        }
        let before = bench.device().figures();
        let held = gpu.hold(&[stream]);
        for (turn, block) in blocks.iter().enumerate().filter(|(turn, _)| turn % 2 == 0) {
            gpu.fill(*block, size, 1000 + turn as u32, stream);
            bench.free(*block);
        }
        let wanted = 64 * MIB + 512;
        let stitched = bench.allocate(wanted, stream);
        gpu.fill(stitched, rounded(wanted), 0xabcd, stream);
        let after = bench.device().figures();
        held.release();
        assert!(after.counters.stitches > 0, "no chunk was moved");
        assert!(
            after.reserved_bytes() <= before.reserved_bytes() + 6 * MIB,
            "it grew instead"
        );
        assert_eq!(after.counters.syncs, before.counters.syncs);
        assert_eq!(bench.device().check(), Ok(()));

        gpu.expect(stitched, rounded(wanted), 0xabcd, stream);
        for (turn, block) in blocks.iter().enumerate().filter(|(turn, _)| turn % 2 == 1) {
            gpu.expect(*block, size, turn as u32, stream);
        }
        // The other way round: what is written to the others does not show in the moved chunks.
        for block in blocks.iter().skip(1).step_by(2) {
            gpu.fill(*block, size, 0x5555, stream);
        }
        // Each part has its own number, so none stands for another.
        let step = 128 * KIB;
        for at in (0..rounded(wanted)).step_by(step as usize) {
            gpu.fill(stitched + at, 4, (at / step) as u32, stream);
        }
        let all = gpu.read(stitched, rounded(wanted), stream);
        for (at, word) in all.iter().enumerate() {
            let at = at as u64 * 4;
            let expected = if at.is_multiple_of(step) {
                (at / step) as u32
            } else {
                0xabcd
            };
            assert_eq!(*word, expected, "{at} bytes into the range");
        }
        for block in blocks.iter().skip(1).step_by(2).chain([&stitched]) {
            bench.free(*block);
        }
        bench.finish();
    }
}

/// The chunks that a large block is put together from have two addresses for a while, the old one and
/// the new. Words written through either are read through the other, with nothing but the stream's order
/// between: that is what moving chunks under running work rests on.
#[test]
fn what_is_written_at_one_address_is_read_at_the_other() {
    let chunk = 2 * MIB;
    let bench = Bench::new(Settings {
        chunk_size: chunk as usize,
        ..Settings::default()
    });
    let (gpu, stream) = (&bench.gpu, bench.gpu.stream());
    let blocks: Vec<u64> = (0..64).map(|_| bench.allocate(chunk, stream)).collect();
    let (freed, kept) = every_other(&blocks);
    let size = freed.len() as u64 * chunk;
    // On a card nothing can be copied out while the stream is held.
    let (through_new, through_old) = (bench.allocate(size, stream), bench.allocate(size, stream));
    let before = bench.device().figures().counters;
    // Late from here on, so that the moving overtakes the work.
    let held = gpu.hold(&[stream]);
    for (turn, old) in freed.iter().enumerate() {
        gpu.fill(*old, chunk, 1 + turn as u32, stream);
        bench.free(*old);
    }
    let large = bench.allocate(size, stream);
    let after = bench.device().figures().counters;
    let moved = (after.stitches - before.stitches) as usize;
    assert!(moved >= freed.len() / 2, "only {moved} chunks were moved");
    assert_eq!(
        after.stale - before.stale,
        moved as u64,
        "an old mapping was taken down"
    );
    if let Some(machine) = gpu.machine() {
        // What the test does at the old addresses no program may.
        machine.unclaimed_ok(true);
    }
    gpu.copy(through_new, large, size, stream);
    let parts = (0..size).step_by(chunk as usize);
    for (turn, at) in parts.clone().enumerate() {
        gpu.fill(large + at, chunk, 1001 + turn as u32, stream);
    }
    for (at, old) in parts.zip(&freed) {
        gpu.copy(through_old + at, *old, chunk, stream);
    }
    held.release();

    let through_new_words = gpu.read(through_new, size, stream);
    let through_old_words = gpu.read(through_old, size, stream);
    let words = (chunk / 4) as usize;
    let mut pairs = 0;
    for (turn, new) in through_new_words.chunks(words).enumerate() {
        // What was created for the rest has no old address, and anything may stand in it.
        let was = |old: &usize| new.iter().all(|word| *word == *old as u32);
        let Some(old) = (1..=freed.len()).find(was) else {
            continue;
        };
        pairs += 1;
        let old = &through_old_words[(old - 1) * words..old * words];
        let expected = 1001 + turn as u32;
        assert!(
            old.iter().all(|word| *word == expected),
            "{} stands at the old address instead of {expected}",
            old[0]
        );
    }
    assert_eq!(pairs, moved, "chunks read at both addresses");
    kept.iter().for_each(|block| bench.free(*block));
    for block in [large, through_new, through_old] {
        bench.free(block);
    }
    bench.finish();
}

/// Far more chunks are moved than old mappings are kept, while the work under them still runs:
/// they stay up, nothing waits, and they come down later.
#[test]
fn old_mappings_stay_while_work_under_them_runs() {
    let settings = Settings {
        chunk_size: 2 << 20,
        ..Settings::default()
    };
    let bench = Bench::new(settings);
    let (gpu, device, stream) = (&bench.gpu, bench.device(), bench.gpu.stream());
    let size = 2 * MIB;
    let blocks: Vec<u64> = (0..900).map(|_| bench.allocate(size, stream)).collect();
    let held = gpu.hold(&[stream]);
    for (turn, block) in blocks.iter().enumerate() {
        // A card's stream takes about a thousand items; one more would wait for the held ones.
        if turn % 4 == 0 {
            gpu.fill(*block, 512, turn as u32, stream);
        }
        if turn % 20 != 0 {
            bench.free(*block);
        }
    }
    let large = bench.allocate(1100 * MIB, stream);
    let figures = device.figures();
    assert!(figures.counters.stitches >= 500, "chunks were not moved");
    assert_eq!(figures.counters.syncs, 0);
    assert_eq!(bench.calls("cuMemUnmap"), 0, "unmapped under running work");
    for at in (0..1100 * MIB).step_by(4 * size as usize) {
        gpu.fill(large + at, 512, (at / size) as u32, stream);
    }
    held.release();
    for at in (0..1100 * MIB).step_by(4 * size as usize) {
        gpu.expect(large + at, 512, (at / size) as u32, stream);
    }
    let mut walls: Vec<u64> = blocks.iter().copied().step_by(20).collect();
    for (turn, block) in walls.iter().enumerate() {
        gpu.expect(*block, 512, 20 * turn as u32, stream);
    }
    // In each round the large block is put together from what lies between new walls.
    let mut large = large;
    for round in 0..20 {
        bench.free(large);
        walls.drain(..).for_each(|wall| bench.free(wall));
        let blocks: Vec<u64> = (0..550).map(|_| bench.allocate(size, stream)).collect();
        for (turn, block) in blocks.into_iter().enumerate() {
            match turn % 20 {
                0 => walls.push(block),
                _ => bench.free(block),
            }
        }
        large = bench.allocate(1100 * MIB, stream);
        gpu.fill(large, 1100 * MIB, round, stream);
    }
    assert!(bench.calls("cuMemUnmap") > 0, "old mappings pile up");
    gpu.expect(large, 1100 * MIB, 19, stream);
    walls
        .into_iter()
        .chain([large])
        .for_each(|block| bench.free(block));
    bench.finish();
}

#[test]
fn moved_chunks_move_again_and_again() {
    let bench = Bench::new(Settings {
        chunk_size: 2 << 20,
        ..Settings::default()
    });
    let (gpu, stream) = (&bench.gpu, bench.gpu.stream());
    let mut walls: Vec<u64> = Vec::new();
    for turn in 0..40u64 {
        // Each turn leaves small blocks behind that keep all free blocks apart.
        let blocks: Vec<u64> = (0..16)
            .map(|_| bench.allocate(6 * MIB - 512, stream))
            .collect();
        walls.extend((0..4).map(|_| bench.allocate(512, stream)));
        blocks
            .iter()
            .for_each(|block| gpu.fill(*block, 6 * MIB - 512, turn as u32, stream));
        blocks.iter().for_each(|block| bench.free(*block));
        let large = bench.allocate(80 * MIB + turn * 512, stream);
        gpu.fill(large, 80 * MIB, 7, stream);
        bench.free(large);
        assert_eq!(bench.device().check(), Ok(()));
    }
    assert!(
        bench.reserved() <= 128 * MIB,
        "{} bytes are held",
        bench.reserved()
    );
    walls.iter().for_each(|wall| bench.free(*wall));
    bench.finish();
}

#[test]
fn nothing_and_too_much() {
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

/// A request that cannot be met costs neither memory nor addresses for good.
#[test]
fn what_is_refused_leaves_nothing_behind() {
    let bench = Bench::new(Settings {
        limit: Some(GIB as usize),
        ..Settings::default()
    });
    let stream = bench.gpu.stream();
    let block = bench.allocate(MIB, stream);
    let before = bench.device().figures();
    for size in [2 * GIB, 200 * GIB, 20 << 40] {
        assert!(bench.device().allocate(size as usize, stream).is_err());
    }
    let after = bench.device().figures();
    assert_eq!(after.addresses, before.addresses, "addresses");
    assert!(after.reserved_bytes() <= before.reserved_bytes());
    bench.free(block);
    bench.finish();
}
