//! Cross-stream reuse: a stream takes memory that another has freed, and waits on the GPU for the work that
//! had been submitted when it was freed, and for no more: work that is submitted afterwards may itself wait
//! for the waiting stream, as a receive that is posted first waits for a send.

use crate::harness::gpu::{Bench, Held, KIB, MIB};
use crate::record_stream::overlap;
use concertina_engine::settings::Settings;

/// A block that was filled with ones and freed on a stream whose work is held back.
pub fn freed_while_its_stream_works(bench: &Bench, size: u64, stream: u64) -> (u64, Held) {
    let block = bench.allocate(size, stream);
    let held = bench.gpu.hold(&[stream]);
    bench.gpu.fill(block, size, 1, stream);
    bench.free(block);
    (block, held)
}

/// Rather than grow, the pool gives one stream what another freed, and makes it wait on the GPU; the host
/// does not wait.
#[test]
fn cross_stream_reuse_waits_on_the_gpu_for_the_stream_that_freed() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 32 * MIB);
    let (a, b) = (gpu.stream(), gpu.stream());
    let (first, held) = freed_while_its_stream_works(&bench, size, a);
    let reserved = bench.reserved();
    let second = bench.allocate(size, b);
    assert!(overlap(first, second, size));
    assert_eq!(bench.reserved(), reserved);
    assert_eq!(bench.calls("cuStreamWaitEvent"), 1);
    gpu.fill(second, size, 2, b);
    // What the stream waits for already, it need not be made to wait for again.
    bench.free(second);
    let second = bench.allocate(size, b);
    gpu.fill(second, size, 3, b);
    assert_eq!(bench.calls("cuStreamWaitEvent"), 1);
    assert_eq!(bench.device().check(), Ok(()));
    held.release();
    gpu.expect(second, size, 3, b);
    bench.free(second);
    bench.finish();
}

/// With `stream_waits:False` memory is reused only once the work is done.
#[test]
fn cross_stream_reuse_with_stream_waits_off() {
    let bench = Bench::new(Settings {
        stream_waits: false,
        ..Settings::default()
    });
    let (gpu, size) = (&bench.gpu, 32 * MIB);
    let (a, b) = (gpu.stream(), gpu.stream());
    let (first, held) = freed_while_its_stream_works(&bench, size, a);
    let second = bench.allocate(size, b);
    assert!(!overlap(first, second, size));
    gpu.fill(second, size, 2, b);
    gpu.synchronize(b);
    held.release();
    let third = bench.allocate(size, b);
    assert_eq!(third, first);
    assert_eq!(bench.calls("cuStreamWaitEvent"), 0);
    gpu.expect(second, size, 2, b);
    bench.free(second);
    bench.free(third);
    bench.finish();
}

/// Free blocks of several streams, each too small, are remapped as one, after a wait for all of them.
#[test]
fn cross_stream_reuse_remaps_chunks_of_several_streams() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 16 * MIB);
    let streams: [u64; 4] = std::array::from_fn(|_| gpu.stream());
    let wanting = gpu.stream();
    let (mut blocks, mut walls) = (Vec::new(), Vec::new());
    for stream in streams {
        blocks.push(bench.allocate(size, stream));
        walls.push(bench.allocate(2 * MIB, stream));
    }
    let held = gpu.hold(&streams);
    for (block, stream) in blocks.into_iter().zip(streams) {
        gpu.fill(block, size, 1, stream);
        bench.free(block);
    }
    let reserved = bench.reserved();
    let whole = bench.allocate(4 * size, wanting);
    assert_eq!(bench.reserved(), reserved);
    gpu.fill(whole, 4 * size, 2, wanting);
    assert_eq!(bench.device().check(), Ok(()));
    held.release();
    gpu.expect(whole, 4 * size, 2, wanting);
    walls.push(whole);
    walls.into_iter().for_each(|block| bench.free(block));
    bench.finish();
}

#[test]
fn cross_stream_reuse_of_completed_memory_needs_no_wait() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 32 * MIB);
    let (a, b) = (gpu.stream(), gpu.stream());
    let first = bench.allocate(size, a);
    gpu.fill(first, size, 1, a);
    gpu.synchronize(a);
    bench.free(first);
    let second = bench.allocate(size, b);
    assert_eq!(second, first);
    assert_eq!(bench.calls("cuStreamWaitEvent"), 0);
    bench.free(second);
    bench.finish();
}

/// Memory of an idle stream needs no wait: another stream's first request gets it before the pool grows.
#[test]
fn cross_stream_reuse_of_an_idle_streams_memory_before_growing() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 256 * MIB);
    let (a, b) = (gpu.stream(), gpu.stream());
    let first = bench.allocate(size, a);
    gpu.fill(first, 512, 1, a);
    gpu.synchronize(a);
    bench.free(first);
    let reserved = bench.reserved();
    let second = bench.allocate(size, b);
    gpu.fill(second, 512, 2, b);
    assert_eq!(
        bench.reserved(),
        reserved,
        "grew while {size} bytes were free and idle"
    );
    bench.free(second);
    bench.finish();
}

/// A small block that one stream has just freed does not make idle memory beside it unusable for others.
#[test]
fn cross_stream_reuse_of_a_large_idle_free_block_beside_a_small_busy_one() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 256 * MIB);
    let (a, b) = (gpu.stream(), gpu.stream());
    let warm = bench.allocate(512, b);
    let small = bench.allocate(64 * KIB, a);
    let large = bench.allocate(size, b);
    bench.free(large);
    bench.device().empty_cache();
    let large = bench.allocate(size, b);
    let reserved = bench.reserved();
    bench.free(large);
    gpu.settle();
    let held = gpu.hold(&[a]);
    gpu.fill(small, 64 * KIB, 1, a);
    bench.free(small);
    let again = bench.allocate(size, b);
    assert!(
        bench.reserved() <= reserved + 4 * MIB,
        "{} bytes are held",
        bench.reserved()
    );
    held.release();
    [again, warm]
        .into_iter()
        .for_each(|block| bench.free(block));
    bench.finish();
}

mod sim_only {
    use crate::harness::gpu::{Bench, MIB};
    use concertina_engine::settings::Settings;
    use concertina_sim::Config;

    const SIZE: u64 = 64 * MIB;

    fn bench() -> Bench {
        Bench::simulated("cross_stream", Config::default(), Settings::default())
            .expect("the simulated GPU")
    }

    /// All work of these streams runs, as far as it waits for no other's.
    fn run(bench: &Bench, streams: &[u64]) {
        for _ in 0..64 {
            for stream in streams {
                while bench.machine().step(*stream as _) {}
            }
        }
    }

    /// Work of one stream ran though all others that are not named stood still.
    fn assert_runs(bench: &Bench, block: u64, stream: u64, with: &[u64]) {
        let (gpu, word) = (&bench.gpu, 0x1234_5678);
        gpu.fill(block, SIZE, word, stream);
        run(bench, &[with, &[stream]].concat());
        assert!(
            bench.machine().is_done(stream as _),
            "the stream waits for work that it need not wait for"
        );
    }

    #[test]
    fn cross_stream_reuse_of_idle_memory_costs_no_wait() {
        let bench = bench();
        let (gpu, a, r, c) = (
            &bench.gpu,
            bench.gpu.stream(),
            bench.gpu.stream(),
            bench.gpu.stream(),
        );
        let small = bench.allocate(2 * MIB, r);
        let first = bench.allocate(SIZE, a);
        gpu.fill(first, SIZE, 1, a);
        bench.free(first);
        gpu.synchronize(a);
        gpu.late();
        // A receive that ends only once the other stream has sent.
        gpu.fill(small, 2 * MIB, 2, r);
        let reserved = bench.reserved();
        let block = bench.allocate(SIZE, c);
        assert_eq!(bench.reserved(), reserved);
        assert_eq!(bench.calls("cuStreamWaitEvent"), 0);
        assert_runs(&bench, block, c, &[]);
        bench.free(block);
        bench.free(small);
        gpu.settle();
        bench.finish();
    }

    #[test]
    fn cross_stream_reuse_waits_for_no_work_submitted_after_the_free() {
        let bench = bench();
        let (gpu, a, c) = (&bench.gpu, bench.gpu.stream(), bench.gpu.stream());
        let small = bench.allocate(2 * MIB, a);
        let first = bench.allocate(SIZE, a);
        gpu.late();
        gpu.fill(first, SIZE, 1, a);
        bench.free(first);
        // All but the last piece of the stream's work runs.
        let before = bench.machine().queued(a as _);
        gpu.fill(small, 2 * MIB, 2, a);
        let block = bench.allocate(SIZE, c);
        for _ in 0..before {
            assert!(bench.machine().step(a as _));
        }
        assert_runs(&bench, block, c, &[]);
        bench.free(block);
        bench.free(small);
        gpu.settle();
        bench.finish();
    }

    /// Two neighbours are freed, with work in between: reuse of the first waits only for work before its
    /// free.
    #[test]
    fn cross_stream_reuse_of_coalesced_memory_waits_for_the_part_that_is_taken() {
        let bench = bench();
        let (gpu, a, c) = (&bench.gpu, bench.gpu.stream(), bench.gpu.stream());
        let small = bench.allocate(2 * MIB, a);
        let both = bench.allocate(2 * SIZE, a);
        bench.free(both);
        let first = bench.allocate(SIZE, a);
        let second = bench.allocate(SIZE, a);
        assert_eq!(first.abs_diff(second), SIZE);
        gpu.late();
        gpu.fill(first, SIZE, 1, a);
        bench.free(first);
        let before = bench.machine().queued(a as _);
        gpu.fill(small, 2 * MIB, 2, a);
        bench.free(second);
        let reserved = bench.reserved();
        let block = bench.allocate(SIZE, c);
        assert_eq!(bench.reserved(), reserved);
        for _ in 0..before {
            assert!(bench.machine().step(a as _));
        }
        assert_runs(&bench, block, c, &[]);
        bench.free(block);
        bench.free(small);
        gpu.settle();
        bench.finish();
    }

    /// Reuse of a block that another stream used waits for that stream, and not for later work of its own.
    #[test]
    fn cross_stream_reuse_of_deferred_memory_waits_for_its_users_alone() {
        let bench = bench();
        let (gpu, a, b, c) = (
            &bench.gpu,
            bench.gpu.stream(),
            bench.gpu.stream(),
            bench.gpu.stream(),
        );
        let (small, other) = (bench.allocate(2 * MIB, a), bench.allocate(2 * MIB, b));
        let first = bench.allocate(SIZE, a);
        gpu.late();
        gpu.fill(first, SIZE, 1, b);
        bench.device().record_use(first, b).expect("a block");
        bench.free(first);
        let before = bench.machine().queued(b as _);
        gpu.fill(small, 2 * MIB, 2, a);
        gpu.fill(other, 2 * MIB, 2, b);
        let reserved = bench.reserved();
        let block = bench.allocate(SIZE, c);
        assert_eq!(bench.reserved(), reserved);
        for _ in 0..before {
            assert!(bench.machine().step(b as _));
        }
        assert_runs(&bench, block, c, &[]);
        bench.free(block);
        bench.free(small);
        bench.free(other);
        gpu.settle();
        bench.finish();
    }

    /// Chunks of a stream's free memory are remapped for a request of its own, which leaves a part of them
    /// over: another stream that gets that part waits for what used the chunks before.
    #[test]
    fn cross_stream_reuse_of_remapped_memory_waits_for_its_earlier_users() {
        let settings = Settings {
            chunk_size: (32 * MIB) as usize,
            ..Settings::default()
        };
        let bench = Bench::simulated("cross_stream", Config::default(), settings)
            .expect("the simulated GPU");
        let (gpu, a, c) = (&bench.gpu, bench.gpu.stream(), bench.gpu.stream());
        let blocks: Vec<u64> = (0..4).map(|_| bench.allocate(32 * MIB, a)).collect();
        gpu.late();
        for block in [blocks[0], blocks[2]] {
            gpu.fill(block, 32 * MIB, 1, a);
            bench.free(block);
        }
        let large = bench.allocate(33 * MIB, a);
        assert!(bench.device().figures().counters.stitches > 0);
        let block = bench.allocate(16 * MIB, c);
        gpu.fill(block, 16 * MIB, 2, c);
        run(&bench, &[c]);
        gpu.settle();
        assert_eq!(bench.machine().violations(), Vec::<String>::new());
        gpu.expect(block, 16 * MIB, 2, c);
        for block in [blocks[1], blocks[3], large, block] {
            bench.free(block);
        }
        gpu.settle();
        bench.finish();
    }

    /// A stream of another device stays recorded on a block when the device is waited for.
    #[test]
    fn cross_stream_reuse_waits_for_a_recorded_stream_of_another_device_after_a_device_synchronize()
    {
        let name = "cross_stream";
        let bench = Bench::with_devices(name, 2, Settings::default()).expect("the simulated GPU");
        let (gpu, a, c) = (&bench.gpu, bench.gpu.stream(), bench.gpu.stream());
        let other = gpu.stream_on(1);
        let first = bench.allocate(SIZE, a);
        bench.device().record_use(first, other).expect("a block");
        let freed = bench.allocate(2 * MIB, a);
        bench.free(freed);
        bench.device().empty_cache();
        gpu.late();
        gpu.fill(first, SIZE, 1, other);
        bench.free(first);
        let second = bench.allocate(SIZE, c);
        gpu.fill(second, SIZE, 2, c);
        run(&bench, &[a, c]);
        gpu.settle();
        assert_eq!(bench.machine().violations(), Vec::<String>::new());
        bench.free(second);
        gpu.settle();
        bench.finish();
    }
}
