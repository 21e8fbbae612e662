//! Out of memory: what is tried before a request fails, the message, and the pool afterwards.

use crate::harness::gpu::{Bench, GIB, MIB};
use crate::limits::limited;
use concertina_engine::settings::Settings;

/// A request that cannot be met costs neither memory nor addresses for good.
#[test]
fn out_of_memory_costs_neither_memory_nor_addresses() {
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

#[test]
fn out_of_memory_message_says_what_was_requested_and_what_there_is() {
    let bench = Bench::new(limited(64 * MIB));
    let (device, stream) = (bench.device(), bench.gpu.stream());
    let block = bench.allocate(32 * MIB, stream);
    let shortage = device.allocate(3 << 30, stream).expect_err("too much");
    let text = shortage.to_string();
    assert!(
        text.starts_with("CUDA out of memory. "),
        "retry helpers look for these words: {text}"
    );
    for part in ["3.00 GiB", "32.00 MiB", "64.00 MiB", "GPU 0", "limit"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    assert!(!text.contains('\n'), "{text}");
    bench.free(block);
    bench.finish();
}

/// A whole limit's worth freed on one stream, with its work still to run, is another stream's
/// before the request fails.
#[test]
fn out_of_memory_only_after_waiting_for_other_streams() {
    let limit = 128 * MIB;
    let bench = Bench::new(limited(limit));
    let (gpu, device) = (&bench.gpu, bench.device());
    gpu.late();
    let (a, b) = (gpu.stream(), gpu.stream());
    let blocks: Vec<u64> = (0..16).map(|_| bench.allocate(8 * MIB, a)).collect();
    for (turn, block) in blocks.iter().enumerate() {
        gpu.fill(*block, 8 * MIB, 1, a);
        if turn % 3 == 0 {
            assert_eq!(device.record_use(*block, b), Ok(()));
        }
        bench.free(*block);
    }
    let whole = bench.allocate(limit, b);
    gpu.fill(whole, limit, 2, b);
    gpu.expect(whole, limit, 2, b);
    bench.free(whole);
    bench.finish();
}

mod sim_only {
    use crate::harness::gpu::config_with_memory;
    use crate::harness::gpu::{Bench, GIB, MIB};
    use concertina_engine::driver::sys::CUresult;
    use concertina_engine::settings::Settings;

    /// What the message for a request of 10 MiB advises on a full device of which every other MiB is
    /// free.
    fn advice(memory: u64, settings: Settings) -> Option<String> {
        let name = "out_of_memory_message_advises_what_helps";
        let bench = Bench::simulated(name, config_with_memory(memory), settings)?;
        let (device, stream) = (bench.device(), bench.gpu.stream());
        let mut blocks = Vec::new();
        while let Ok(block) = device.allocate(MIB as usize, stream) {
            blocks.push(bench.adopt(block, MIB, stream));
        }
        let (free, live): (Vec<u64>, Vec<u64>) = blocks
            .into_iter()
            .partition(|it| (it / MIB).is_multiple_of(2));
        free.into_iter().for_each(|block| bench.free(block));
        let shortage = device
            .allocate(10 << 20, stream)
            .expect_err("the pieces are too small");
        live.into_iter().for_each(|block| bench.free(block));
        bench.finish();
        Some(shortage.to_string())
    }

    #[test]
    fn out_of_memory_message_advises_what_helps() {
        for (part, settings) in [
            ("too small to be joined", Settings::default()),
            (
                "expandable_segments:False",
                Settings {
                    expandable_segments: false,
                    ..Settings::default()
                },
            ),
            (
                "chunk_size_mb:2",
                Settings {
                    chunk_size: 32 << 20,
                    ..Settings::default()
                },
            ),
        ] {
            if let Some(text) = advice(128 * MIB, settings) {
                assert!(text.contains(part), "{part} is not in: {text}");
            }
        }
    }

    #[test]
    fn out_of_memory_leaves_the_pool_usable() {
        let name = "out_of_memory_leaves_the_pool_usable";
        let Some(bench) = Bench::simulated(name, config_with_memory(GIB), Settings::default())
        else {
            return;
        };
        let (device, stream) = (bench.device(), bench.gpu.stream());
        let half = bench.allocate(GIB / 2, stream);
        let shortage = device.allocate(GIB as usize, stream).expect_err("too much");
        assert_eq!(shortage.limit, None);
        assert_eq!(shortage.memory.map(|(_, total)| total), Some(GIB));
        let other = bench.allocate(GIB / 2, stream);
        assert!(device.allocate(1, stream).is_err());
        [half, other]
            .into_iter()
            .for_each(|block| bench.free(block));
        let whole = bench.allocate(GIB, stream);
        bench.free(whole);
        bench.finish();
    }

    /// When memory runs out, the memory of released pools returns to the driver as well.
    #[test]
    fn out_of_memory_frees_released_private_pools() {
        let name = "out_of_memory_frees_released_private_pools";
        let Some(bench) = Bench::simulated(name, config_with_memory(GIB), Settings::default())
        else {
            return;
        };
        let stream = bench.gpu.stream();
        let block =
            crate::private_pools::with_pool(&bench, (1, 0), || bench.allocate(GIB / 2, stream));
        bench.device().release_pool((1, 0));
        bench.free(block);
        let whole = bench.allocate(GIB, stream);
        bench.free(whole);
        bench.finish();
    }

    /// As in a process whose address space is limited.
    #[test]
    fn out_of_addresses_a_smaller_reservation_is_tried() {
        let name = "out_of_addresses_a_smaller_reservation_is_tried";
        let Some(bench) = Bench::simulated(name, config_with_memory(GIB), Settings::default())
        else {
            return;
        };
        let (machine, stream) = (bench.machine(), bench.gpu.stream());
        for nth in 1..=2 {
            machine.fail(
                "cuMemAddressReserve",
                nth,
                CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            );
        }
        let whole = bench.allocate(GIB, stream);
        assert_eq!(bench.calls("cuMemAddressReserve"), 3);
        bench.free(whole);
        bench.finish();
    }
}
