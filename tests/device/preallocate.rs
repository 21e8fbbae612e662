//! `preallocate`: memory that is reserved at the start.

use crate::harness::gpu::{Bench, MIB};
use concertina_engine::settings::Settings;

#[test]
fn preallocate_reserves_memory_for_every_stream() {
    for expandable in [true, false] {
        let bench = Bench::new(Settings {
            preallocate: (100 * MIB) as usize,
            expandable_segments: expandable,
            ..Settings::default()
        });
        let (device, gpu) = (bench.device(), &bench.gpu);
        assert!((100 * MIB..=104 * MIB).contains(&bench.reserved()));
        assert_eq!(device.figures().counters.all.allocation.allocated, 0);
        let name = if expandable {
            "cuMemCreate"
        } else {
            "cuMemAlloc"
        };
        let calls = bench.calls(name);
        let (one, other) = (gpu.stream(), gpu.stream());
        let first = bench.allocate(60 * MIB, one);
        let second = bench.allocate(40 * MIB, other);
        gpu.fill(first, 60 * MIB, 1, one);
        gpu.fill(second, 40 * MIB, 2, other);
        gpu.expect(first, 60 * MIB, 1, one);
        gpu.expect(second, 40 * MIB, 2, other);
        assert_eq!(bench.calls(name), calls);
        bench.free(first);
        bench.free(second);
        assert_eq!(device.check(), Ok(()));
        gpu.settle();
        device.empty_cache();
        assert_eq!(bench.reserved(), 0);
        bench.finish();
    }
}

#[test]
fn preallocate_beyond_the_limit_reserves_nothing() {
    let bench = Bench::new(Settings {
        preallocate: 1 << 45,
        limit: Some((64 * MIB) as usize),
        ..Settings::default()
    });
    assert_eq!(bench.device().figures().reserved_bytes(), 0);
    let block = bench.allocate(MIB, bench.gpu.stream());
    bench.free(block);
    bench.finish();
}
