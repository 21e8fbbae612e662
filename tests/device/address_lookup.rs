//! Address look-up: the block, private pool or segment that an address belongs to.

use crate::harness::gpu::{Bench, MIB};
use crate::private_pools::with_pool;
use concertina_engine::settings::Settings;

#[test]
fn address_lookup_finds_the_allocated_block() {
    let bench = Bench::new(Settings::default());
    let (device, stream) = (bench.device(), bench.gpu.stream());
    let (one, two) = (
        bench.allocate(5 * MIB, stream),
        bench.allocate(1000, stream),
    );
    for (block, size) in [(one, 5 * MIB), (two, 1000)] {
        for offset in [0, 1, size - 1] {
            let found = device.allocation(block + offset).expect("an allocation");
            assert_eq!((found.found.start, found.found.requested), (block, size));
            assert!(!found.private && !found.plain);
        }
        assert_eq!(
            device.base_of(block),
            Some((block, size.next_multiple_of(512)))
        );
        assert_eq!(device.base_of(block + 512), None);
    }
    bench.free(one);
    assert_eq!(device.allocation(one), None);
    assert_eq!(device.allocation(one + MIB), None);
    bench.free(two);
    bench.finish();
}

/// A captured graph goes on using blocks that were freed during its capture.
#[test]
fn address_lookup_in_a_private_pool_finds_its_contiguous_memory() {
    let bench = Bench::new(Settings::default());
    let (device, stream) = (bench.device(), bench.gpu.stream());
    let (freed, live) = with_pool(&bench, (1, 0), || {
        let freed = bench.allocate(9 * MIB, stream);
        let live = bench.allocate(30 * MIB, stream);
        bench.free(freed);
        (freed, live)
    });
    let whole = device.allocation(live).expect("an allocation");
    assert!(whole.private && !whole.plain);
    let (start, end) = (whole.found.start, whole.found.start + whole.found.size);
    for address in [freed, freed + 9 * MIB - 1, live + 7, live + 30 * MIB - 1] {
        assert!((start..end).contains(&address));
        assert_eq!(device.allocation(address), Some(whole));
    }
    assert_eq!(device.base_of(live), Some((start, end - start)));
    assert_eq!(device.base_of(freed), None);
    // IPC shares the same range for any address in it.
    for address in [freed, live + MIB] {
        let shared = device.ipc_block_of_tensor(address).expect("memory");
        assert_eq!((shared.start, shared.offset), (start, 0));
    }
    bench.free(live);
    device.release_pool((1, 0));
    bench.finish();
}

#[test]
fn address_lookup_in_a_cuda_malloc_segment_finds_the_segment() {
    let bench = Bench::new(Settings {
        expandable_segments: false,
        ..Settings::default()
    });
    let (device, stream) = (bench.device(), bench.gpu.stream());
    let (one, two) = (bench.allocate(1000, stream), bench.allocate(2000, stream));
    assert!(
        device
            .allocation(two + 5)
            .is_some_and(|it| it.plain && it.found.start == two)
    );
    let start = one.min(two);
    assert_eq!(device.base_of(one), Some((start, 2 * MIB)));
    assert_eq!(device.base_of(two), Some((start, 2 * MIB)));
    bench.free(one);
    bench.free(two);
    bench.finish();
}
