//! Cross-stream reuse: a stream waits only for work that had been submitted when the memory was freed, on the
//! streams that used it. What is submitted later may itself wait for the waiting stream, as a receive that
//! is posted first waits for what has yet to be sent.

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

    /// Two neighbours are freed, with work between: who needs one of them waits for that one's.
    #[test]
    fn cross_stream_reuse_of_joined_memory_waits_for_the_part_that_is_taken() {
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

    /// A block that another stream used waits for that one, and not for what its own stream does later.
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

    /// Chunks of a stream's free memory are mapped elsewhere for a request of its own, which leaves a part of
    /// them over: another stream that gets that part waits for what used the chunks before.
    #[test]
    fn cross_stream_reuse_of_moved_memory_waits_for_what_used_it_before_it_moved() {
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
    fn cross_stream_reuse_waits_for_a_stream_of_another_device_that_was_recorded_before_a_wait() {
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
