//! Remap under a limit, where the pool cannot grow.

use crate::harness::gpu::{Bench, GIB, MIB, every_other};
use crate::limits::limited;
use concertina_engine::settings::Settings;

#[test]
fn remap_under_a_limit_joins_the_chunks_of_a_freed_large_block() {
    let bench = Bench::new(limited(10 * GIB));
    let stream = bench.gpu.stream();
    for (large, size, wanted) in [(&[9900][..], 8, 3000), (&[5000, 4900], 6, 3600)] {
        let blocks: Vec<u64> = large
            .iter()
            .map(|mib| bench.allocate(mib * MIB, stream))
            .collect();
        blocks.into_iter().for_each(|block| bench.free(block));
        // Every other one of the next blocks is freed: more than is requested, in pieces.
        let blocks: Vec<u64> = (0..9600 / size)
            .map(|_| bench.allocate(size * MIB, stream))
            .collect();
        let (stay, go) = every_other(&blocks);
        go.into_iter().for_each(|block| bench.free(block));
        let whole = bench.allocate(wanted * MIB, stream);
        bench.free(whole);
        stay.into_iter().for_each(|block| bench.free(block));
        bench.device().empty_cache();
    }
    bench.finish();
}

/// So many chunks are remapped that old mappings are unmapped, beside other free blocks of the same stream:
/// those are not lost to other streams.
#[test]
fn remap_under_a_limit_loses_no_free_block_when_old_mappings_are_unmapped() {
    let limit = 1180 * MIB;
    let settings = Settings {
        chunk_size: 2 << 20,
        ..limited(limit)
    };
    let bench = Bench::new(settings);
    let (gpu, device) = (&bench.gpu, bench.device());
    let (a, b) = (gpu.stream(), gpu.stream());
    let blocks: Vec<u64> = (0..590).map(|_| bench.allocate(2 * MIB, a)).collect();
    for (turn, block) in blocks.iter().enumerate() {
        if turn % 20 != 0 {
            bench.free(*block);
        }
    }
    gpu.synchronize(a);
    let large = bench.allocate(700 * MIB, a);
    assert!(device.figures().counters.stitches > 0);
    // More than 400 MiB are free and idle; the other stream is seen for the first time.
    let other = bench.allocate(300 * MIB, b);
    gpu.fill(other, 300 * MIB, 1, b);
    device.empty_cache();
    assert!(
        bench.reserved() <= 1062 * MIB,
        "{} bytes are held",
        bench.reserved()
    );
    let walls = blocks.iter().step_by(20).copied();
    walls
        .chain([large, other])
        .for_each(|block| bench.free(block));
    bench.finish();
}
