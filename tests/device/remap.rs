//! Remap: chunks of scattered free blocks are mapped again as one contiguous range.

use crate::harness::gpu::{Bench, KIB, MIB, every_other, rounded};
use concertina_engine::settings::Settings;

/// 64 blocks of 4 MiB, every other one freed, and a request for half of what is free: chunks are
/// remapped as one contiguous range, while the work on the freed blocks still runs, and
/// nothing waits. What other blocks hold stays as it was.
#[test]
fn remap_makes_scattered_free_blocks_one_contiguous_range() {
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
        let remapped = bench.allocate(wanted, stream);
        gpu.fill(remapped, rounded(wanted), 0xabcd, stream);
        let after = bench.device().figures();
        held.release();
        assert!(after.counters.stitches > 0, "no chunk was remapped");
        assert!(
            after.reserved_bytes() <= before.reserved_bytes() + 6 * MIB,
            "it grew instead"
        );
        assert_eq!(after.counters.syncs, before.counters.syncs);
        assert_eq!(bench.device().check(), Ok(()));

        gpu.expect(remapped, rounded(wanted), 0xabcd, stream);
        for (turn, block) in blocks.iter().enumerate().filter(|(turn, _)| turn % 2 == 1) {
            gpu.expect(*block, size, turn as u32, stream);
        }
        // Conversely, writes to the other blocks do not show in the remapped chunks.
        for block in blocks.iter().skip(1).step_by(2) {
            gpu.fill(*block, size, 0x5555, stream);
        }
        // Each part has its own number, so none stands for another.
        let step = 128 * KIB;
        for at in (0..rounded(wanted)).step_by(step as usize) {
            gpu.fill(remapped + at, 4, (at / step) as u32, stream);
        }
        let all = gpu.read(remapped, rounded(wanted), stream);
        for (at, word) in all.iter().enumerate() {
            let at = at as u64 * 4;
            let expected = if at.is_multiple_of(step) {
                (at / step) as u32
            } else {
                0xabcd
            };
            assert_eq!(*word, expected, "{at} bytes into the range");
        }
        for block in blocks.iter().skip(1).step_by(2).chain([&remapped]) {
            bench.free(*block);
        }
        bench.finish();
    }
}

/// The remapped chunks of a large block have two addresses for a while, the old one and
/// the new. Words written through either are read through the other, with nothing but the stream's order
/// between: remapping under running work relies on that.
#[test]
fn remap_old_and_new_address_show_the_same_bytes() {
    let chunk = 2 * MIB;
    let bench = Bench::new(Settings {
        chunk_size: chunk as usize,
        ..Settings::default()
    });
    let (gpu, stream) = (&bench.gpu, bench.gpu.stream());
    let blocks: Vec<u64> = (0..64).map(|_| bench.allocate(chunk, stream)).collect();
    let (freed, live) = every_other(&blocks);
    let size = freed.len() as u64 * chunk;
    // On a card nothing can be copied out while the stream is held.
    let (through_new, through_old) = (bench.allocate(size, stream), bench.allocate(size, stream));
    let before = bench.device().figures().counters;
    // Work is held from here on, so that the remap overtakes it.
    let held = gpu.hold(&[stream]);
    for (turn, old) in freed.iter().enumerate() {
        gpu.fill(*old, chunk, 1 + turn as u32, stream);
        bench.free(*old);
    }
    let large = bench.allocate(size, stream);
    let after = bench.device().figures().counters;
    let remapped = (after.stitches - before.stitches) as usize;
    assert!(
        remapped >= freed.len() / 2,
        "only {remapped} chunks were remapped"
    );
    assert_eq!(
        after.stale - before.stale,
        remapped as u64,
        "an old mapping was unmapped"
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
    assert_eq!(pairs, remapped, "chunks read at both addresses");
    live.iter().for_each(|block| bench.free(*block));
    for block in [large, through_new, through_old] {
        bench.free(block);
    }
    bench.finish();
}

/// Far more chunks are remapped than old mappings may stay, while work under them still runs: they stay
/// mapped, nothing waits, and they are unmapped afterwards.
#[test]
fn remap_keeps_old_mappings_while_work_under_them_runs() {
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
    assert!(figures.counters.stitches >= 500, "chunks were not remapped");
    assert_eq!(figures.counters.syncs, 0);
    assert_eq!(bench.calls("cuMemUnmap"), 0, "unmapped under running work");
    for at in (0..1100 * MIB).step_by(4 * size as usize) {
        gpu.fill(large + at, 512, (at / size) as u32, stream);
    }
    held.release();
    for at in (0..1100 * MIB).step_by(4 * size as usize) {
        gpu.expect(large + at, 512, (at / size) as u32, stream);
    }
    let mut separators: Vec<u64> = blocks.iter().copied().step_by(20).collect();
    for (turn, block) in separators.iter().enumerate() {
        gpu.expect(*block, 512, 20 * turn as u32, stream);
    }
    // In each round the large block is remapped from the free blocks between new separators.
    let mut large = large;
    for round in 0..20 {
        bench.free(large);
        separators
            .drain(..)
            .for_each(|separator| bench.free(separator));
        let blocks: Vec<u64> = (0..550).map(|_| bench.allocate(size, stream)).collect();
        for (turn, block) in blocks.into_iter().enumerate() {
            match turn % 20 {
                0 => separators.push(block),
                _ => bench.free(block),
            }
        }
        large = bench.allocate(1100 * MIB, stream);
        gpu.fill(large, 1100 * MIB, round, stream);
    }
    assert!(bench.calls("cuMemUnmap") > 0, "old mappings pile up");
    gpu.expect(large, 1100 * MIB, 19, stream);
    separators
        .into_iter()
        .chain([large])
        .for_each(|block| bench.free(block));
    bench.finish();
}

#[test]
fn remap_chunks_again_and_again() {
    let bench = Bench::new(Settings {
        chunk_size: 2 << 20,
        ..Settings::default()
    });
    let (gpu, stream) = (&bench.gpu, bench.gpu.stream());
    let mut separators: Vec<u64> = Vec::new();
    for turn in 0..40u64 {
        // Each turn leaves small blocks that separate the free blocks.
        let blocks: Vec<u64> = (0..16)
            .map(|_| bench.allocate(6 * MIB - 512, stream))
            .collect();
        separators.extend((0..4).map(|_| bench.allocate(512, stream)));
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
    separators
        .iter()
        .for_each(|separator| bench.free(*separator));
    bench.finish();
}
