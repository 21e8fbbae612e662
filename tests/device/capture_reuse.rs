//! Reuse within a capture of blocks that several of its streams use (`graph_capture_record_stream_reuse`).

mod sim_only {
    use crate::harness::gpu::{Bench, GIB, KIB, ok};
    use crate::harness::random::Random;
    use concertina_engine::device::PoolRoute;
    use concertina_engine::driver::sys::{CUgraph, CUgraphExec, CUstream, CUstreamCaptureMode};
    use concertina_engine::settings::Settings;
    use concertina_sim::{
        Config, Pace, cuGraphDestroy, cuGraphExecDestroy, cuGraphInstantiateWithFlags,
        cuGraphLaunch, cuStreamBeginCapture_v2, cuStreamEndCapture,
    };
    use std::ptr::null_mut;

    const SIZE: u64 = 64 * KIB;

    const QUERIES: [&str; 2] = ["cuStreamGetCaptureInfo_v3", "cuGraphNodeGetDependencies_v2"];

    fn settings(reuse: bool) -> Settings {
        Settings {
            graph_capture_record_stream_reuse: reuse,
            ..Settings::default()
        }
    }

    fn simulated(name: &str, reuse: bool) -> Option<Bench> {
        let config = Config {
            memory: GIB,
            ..Config::default()
        };
        Bench::simulated(name, config, settings(reuse))
    }

    /// A capture with a private pool, and streams that may take part.
    struct Capture<'a> {
        bench: &'a Bench,
        streams: Vec<u64>,
        pool: (u64, u64),
    }

    impl<'a> Capture<'a> {
        /// As PyTorch does it: the pool begins, then the capture, on the first of these streams.
        fn begin(bench: &'a Bench, streams: &[u64], pool: (u64, u64)) -> Capture<'a> {
            bench.device().begin_pool(PoolRoute {
                pool,
                filter: Box::new(|_| true),
            });
            let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
            // SAFETY: a stream that lives.
            ok(unsafe { cuStreamBeginCapture_v2(streams[0] as CUstream, mode) });
            Capture {
                bench,
                streams: streams.to_vec(),
                pool,
            }
        }
        fn allocate(&self, on: usize) -> u64 {
            let block = self
                .bench
                .device()
                .allocate(SIZE as usize, self.streams[on]);
            block.unwrap_or_else(|shortage| panic!("{shortage}"))
        }
        fn free(&self, block: u64, on: usize) {
            let freed = self.bench.device().free(block, self.streams[on]);
            assert_eq!(freed, Ok(()));
        }
        fn uses(&self, block: u64, on: usize) {
            self.bench.gpu.fill(block, SIZE, 1, self.streams[on]);
        }
        fn copy(&self, to: u64, from: u64, on: usize) {
            self.bench.gpu.copy(to, from, SIZE, self.streams[on]);
        }
        fn record(&self, block: u64, on: usize) {
            let recorded = self.bench.device().record_use(block, self.streams[on]);
            assert_eq!(recorded, Ok(()));
        }
        /// What stream `second` does from now on comes after what `first` has done.
        fn join(&self, first: usize, second: usize) {
            assert!(
                self.bench
                    .gpu
                    .order(self.streams[first], self.streams[second])
            );
        }
        fn end(self) -> CUgraph {
            let mut graph = null_mut();
            // SAFETY: writes a local.
            ok(unsafe { cuStreamEndCapture(self.streams[0] as CUstream, &mut graph) });
            self.bench.device().end_pool(self.pool);
            graph
        }
    }

    /// Runs a graph a few times, and ends it.
    fn launch(bench: &Bench, graph: CUgraph, stream: u64) {
        let mut executable: CUgraphExec = null_mut();
        // SAFETY: writes a local; handles that are not used again after they are destroyed.
        unsafe {
            ok(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
            for _ in 0..3 {
                ok(cuGraphLaunch(executable, stream as CUstream));
            }
            bench.gpu.synchronize(stream);
            ok(cuGraphExecDestroy(executable));
            ok(cuGraphDestroy(graph));
        }
    }

    fn queries(bench: &Bench) -> u64 {
        QUERIES.iter().map(|name| bench.machine().calls(name)).sum()
    }

    #[test]
    fn capture_reuse_once_the_other_stream_is_joined() {
        for (reuse, permanent) in [(true, false), (true, true), (false, false), (false, true)] {
            let name = "capture_reuse_once_the_other_stream_is_joined";
            let Some(bench) = simulated(name, reuse) else {
                return;
            };
            let streams = [(); 2].map(|()| bench.gpu.stream());
            if permanent {
                // Like PyTorch's own streams: the driver is not asked whether they are captured.
                for stream in streams {
                    bench.device().add_permanent_stream(stream);
                }
            }
            let capture = Capture::begin(&bench, &streams, (1, 0));
            let (sink, data) = (capture.allocate(0), capture.allocate(0));
            capture.uses(data, 0);
            capture.join(0, 1);
            let beside = capture.allocate(1);
            capture.uses(data, 1);
            capture.record(data, 1);
            capture.free(data, 0);
            let before = capture.allocate(0);
            assert_ne!(before, data, "the other branch may still use it");
            capture.join(1, 0);
            capture.uses(sink, 0);
            let after = capture.allocate(0);
            assert_eq!(after == data, reuse, "the other branch comes before");
            assert_eq!(queries(&bench) > 0, reuse, "no queries without the setting");
            capture.uses(after, 0);
            let graph = capture.end();
            launch(&bench, graph, streams[0]);
            for (block, on) in [(sink, 0), (beside, 1), (before, 0), (after, 0)] {
                assert_eq!(bench.device().free(block, streams[on]), Ok(()));
            }
            bench.device().release_pool((1, 0));
            bench.finish();
        }
    }

    #[test]
    fn capture_reuse_only_when_all_streams_are_joined() {
        let name = "capture_reuse_only_when_all_streams_are_joined";
        let Some(bench) = simulated(name, true) else {
            return;
        };
        let streams = [(); 4].map(|()| bench.gpu.stream());
        let capture = Capture::begin(&bench, &streams, (1, 0));
        let (data, sink) = (capture.allocate(0), capture.allocate(0));
        capture.uses(data, 0);
        for other in 1..4 {
            capture.join(0, other);
            let copy = capture.allocate(other);
            capture.copy(copy, data, other);
            capture.record(data, other);
            capture.free(copy, other);
        }
        capture.free(data, 0);
        capture.join(1, 0);
        capture.uses(sink, 0);
        capture.join(3, 2);
        let mut held = vec![capture.allocate(0)];
        assert_ne!(held[0], data);
        // Of the other two one is enough: it has joined the third.
        capture.join(2, 0);
        held.push(capture.allocate(0));
        assert_eq!(held[1], data);
        capture.uses(data, 0);
        let graph = capture.end();
        launch(&bench, graph, streams[0]);
        for block in held.into_iter().chain([sink]) {
            assert_eq!(bench.device().free(block, streams[0]), Ok(()));
        }
        bench.device().release_pool((1, 0));
        bench.finish();
    }

    /// Work after a block is freed is no use of it: a join of the earlier work is enough.
    #[test]
    fn capture_reuse_ignores_work_after_the_free() {
        let Some(bench) = simulated("capture_reuse_ignores_work_after_the_free", true) else {
            return;
        };
        let streams = [(); 2].map(|()| bench.gpu.stream());
        let capture = Capture::begin(&bench, &streams, (1, 0));
        let data = capture.allocate(0);
        capture.uses(data, 0);
        capture.join(0, 1);
        capture.uses(data, 1);
        capture.record(data, 1);
        capture.free(data, 0);
        capture.join(1, 0);
        let other = capture.allocate(1);
        capture.uses(other, 1);
        let again = capture.allocate(0);
        assert_eq!(again, data);
        capture.uses(again, 0);
        capture.join(1, 0);
        let graph = capture.end();
        launch(&bench, graph, streams[0]);
        for (block, on) in [(again, 0), (other, 1)] {
            assert_eq!(bench.device().free(block, streams[on]), Ok(()));
        }
        bench.device().release_pool((1, 0));
        bench.finish();
    }

    /// A graph says nothing of uncaptured work, nor of another graph's.
    #[test]
    fn capture_reuse_of_a_block_that_uncaptured_work_used_waits_for_the_captures_end() {
        let name = "capture_reuse_of_a_block_that_uncaptured_work_used_waits_for_the_captures_end";
        for case in 0..5 {
            let Some(bench) = simulated(name, true) else {
                return;
            };
            let streams = [(); 3].map(|()| bench.gpu.stream());
            let mut first = None;
            if case == 1 {
                // It was used in an earlier capture.
                let capture = Capture::begin(&bench, &streams, (1, 0));
                let data = capture.allocate(0);
                capture.join(0, 1);
                capture.record(data, 1);
                capture.join(1, 0);
                first = Some((data, capture.end()));
            }
            let capture = Capture::begin(&bench, &streams, (1, 0));
            let data = first.map_or_else(|| capture.allocate(0), |(data, _)| data);
            if case == 2 {
                // A stream uses it that is not captured.
                capture.record(data, 2);
            }
            if case == 4 {
                // Another does that joins the capture afterwards.
                capture.join(0, 1);
                capture.record(data, 1);
                capture.record(data, 2);
                capture.join(0, 2);
                capture.join(2, 0);
            }
            capture.join(0, 1);
            capture.uses(data, 1);
            capture.record(data, 1);
            if case == 3 {
                capture.record(data, 2);
            }
            capture.free(data, 0);
            capture.join(1, 0);
            let next = capture.allocate(0);
            assert_eq!(next == data, case == 0, "case {case}");
            let pending = bench.device().figures().counters.pending_bytes;
            assert_eq!(pending > 0, case > 0, "case {case}");
            let graph = capture.end();
            launch(&bench, graph, streams[0]);
            if let Some((_, graph)) = first {
                launch(&bench, graph, streams[0]);
            }
            assert_eq!(bench.device().free(next, streams[0]), Ok(()));
            bench.device().empty_cache();
            bench.device().release_pool((1, 0));
            if case == 1 {
                bench.device().release_pool((1, 0));
            }
            bench.finish();
        }
    }

    /// What is known of one capture does not apply to the next one, and blocks that it left deferred are
    /// freed after it.
    #[test]
    fn capture_reuse_state_ends_with_the_capture() {
        let Some(bench) = simulated("capture_reuse_state_ends_with_the_capture", true) else {
            return;
        };
        let streams = [(); 2].map(|()| bench.gpu.stream());
        let left: Vec<u64> = (0..3)
            .map(|_| {
                let capture = Capture::begin(&bench, &streams, (1, 0));
                let data = capture.allocate(0);
                capture.join(0, 1);
                capture.uses(data, 1);
                capture.record(data, 1);
                capture.free(data, 0);
                let next = capture.allocate(0);
                assert_ne!(next, data);
                capture.free(next, 0);
                capture.join(1, 0);
                let graph = capture.end();
                launch(&bench, graph, streams[0]);
                data
            })
            .collect();
        assert_eq!(bench.device().check(), Ok(()));
        assert_ne!(left[0], left[1], "nothing was polled in between");
        (0..3).for_each(|_| bench.device().release_pool((1, 0)));
        bench.finish();
    }

    /// While another capture goes on, nothing says that one has ended but the next one's number.
    #[test]
    fn capture_reuse_beside_another_capture() {
        let name = "capture_reuse_beside_another_capture";
        let Some(bench) = simulated(name, true) else {
            return;
        };
        let streams = [(); 3].map(|()| bench.gpu.stream());
        let beside = Capture::begin(&bench, &streams[2..], (2, 0));
        let other = beside.allocate(0);
        let first = Capture::begin(&bench, &streams[..2], (1, 0));
        let data = first.allocate(0);
        first.join(0, 1);
        first.record(data, 1);
        first.free(data, 0);
        first.join(1, 0);
        let graph = first.end();
        let second = Capture::begin(&bench, &streams[..2], (1, 0));
        let next = second.allocate(0);
        assert_ne!(next, data);
        let graphs = [graph, second.end(), beside.end()];
        for graph in graphs {
            launch(&bench, graph, streams[0]);
        }
        for (block, on) in [(other, 2), (next, 0)] {
            assert_eq!(bench.device().free(block, streams[on]), Ok(()));
        }
        [(1, 0), (1, 0), (2, 0)]
            .into_iter()
            .for_each(|pool| bench.device().release_pool(pool));
        bench.finish();
    }

    /// Random captures on several streams: whatever is allocated is written by its own stream and used by
    /// others, which a race of any two at a launch would tell.
    #[test]
    fn capture_reuse_in_random_captures_never_races() {
        let mut reused = 0;
        for seed in 0..60 {
            let name = "capture_reuse_in_random_captures_never_races";
            let Some(bench) = simulated(name, true) else {
                return;
            };
            let mut random = Random::new(seed);
            let streams: Vec<u64> = (0..2 + random.below(4))
                .map(|_| bench.gpu.stream())
                .collect();
            let capture = Capture::begin(&bench, &streams, (1, 0));
            let mut part = vec![false; streams.len()];
            part[0] = true;
            let mut live: Vec<(u64, usize)> = Vec::new();
            let mut shared: Vec<u64> = Vec::new();
            for _ in 0..200 {
                let on = random.below(streams.len() as u64) as usize;
                let other = random.below(streams.len() as u64) as usize;
                match random.below(8) {
                    0..2 if part[on] => {
                        let block = capture.allocate(on);
                        assert!(
                            live.iter().all(|(it, _)| *it != block),
                            "allocated out twice"
                        );
                        reused += u64::from(shared.contains(&block));
                        capture.uses(block, on);
                        live.push((block, on));
                    }
                    2..4 if part[on] && on != other => {
                        capture.join(on, other);
                        part[other] = true;
                    }
                    4..6 if !live.is_empty() => {
                        // Whoever uses a block of another's comes after what wrote it.
                        let (block, owner) = live[random.below(live.len() as u64) as usize];
                        if owner != on {
                            capture.join(owner, on);
                            part[on] = true;
                            bench.gpu.fill(block, SIZE, 2, streams[on]);
                            capture.record(block, on);
                            // And nobody else uses it meanwhile.
                            capture.join(on, owner);
                            shared.push(block);
                            if random.once_in(2) {
                                live.retain(|(it, _)| *it != block);
                                capture.free(block, owner);
                            }
                        }
                    }
                    6 if !live.is_empty() => {
                        // It is read by another, which nobody joins: nobody may have it then.
                        let at = random.below(live.len() as u64) as usize;
                        let (block, owner) = live[at];
                        if owner != on {
                            capture.join(owner, on);
                            part[on] = true;
                            bench.gpu.fill(block, SIZE, 3, streams[on]);
                            capture.record(block, on);
                            live.swap_remove(at);
                            shared.push(block);
                            capture.free(block, owner);
                        }
                    }
                    _ => {}
                }
                assert_eq!(bench.device().check(), Ok(()));
            }
            for other in (1..streams.len()).filter(|it| part[*it]) {
                capture.join(other, 0);
            }
            let graph = capture.end();
            assert_eq!(bench.machine().violations(), [""; 0]);
            bench.machine().set_pace(Pace::Random(seed));
            launch(&bench, graph, streams[0]);
            assert_eq!(bench.machine().violations(), [""; 0], "seed {seed}");
            for (block, on) in live {
                assert_eq!(bench.device().free(block, streams[on]), Ok(()));
            }
            bench.device().release_pool((1, 0));
            bench.finish();
        }
        assert!(reused > 100, "{reused} blocks came back in their capture");
    }
}
