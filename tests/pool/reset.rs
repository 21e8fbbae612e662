//! A device that starts over, since its context ends: nothing of before is left, and nothing of before is
//! had again.

use crate::gpu::{Bench, MIB};
use concertina_engine::runtime::UnknownPointer;
use concertina_engine::runtime::settings::Settings;

#[test]
fn no_block_is_left_whether_cached_or_not() {
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
            device.start_over(false);
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
