//! Stream handles: which stream one stands for, default streams, destroyed streams, and threads without a
//! context.

use crate::cross_stream::freed_while_its_stream_works;
use crate::harness::gpu::{Bench, KIB, MIB};
use concertina_engine::settings::Settings;
use std::sync::mpsc::channel;
use std::thread;

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: u64 = 2;

/// The default stream has two handles (`NULL` and `CU_STREAM_LEGACY`) and is one stream.
#[test]
fn stream_handles_of_the_default_stream_are_one_stream() {
    let bench = Bench::new(Settings::default());
    let block = bench.allocate(4 * MIB, 0);
    bench.free(block);
    assert_eq!(bench.allocate(4 * MIB, 1), block);
    assert_eq!(bench.device().record_use(block, 1), Ok(()));
    bench.free(block);
    assert_eq!(bench.device().figures().counters.pending_bytes, 0);
    bench.finish();
}

/// The per-thread default stream has one handle for many streams: memory that one thread freed is
/// not another's until its work is done, and then it is.
#[test]
fn stream_handle_of_the_per_thread_default_stream_differs_by_thread() {
    let bench = Bench::new(Settings::default());
    let (gpu, device, size) = (&bench.gpu, bench.device(), 32 * MIB);
    let mine = bench.allocate(size, PER_THREAD);
    gpu.fill(mine, size, 1, PER_THREAD);
    gpu.synchronize(PER_THREAD);
    let ((go, may_go), (tell, told)) = (channel::<()>(), channel::<()>());
    thread::scope(|scope| {
        scope.spawn(move || {
            let _here = gpu.enter();
            let theirs = device.allocate(size as usize, PER_THREAD).expect("memory");
            gpu.claim(theirs, size, 1);
            let held = gpu.hold(&[PER_THREAD]);
            gpu.fill(theirs, size, 2, PER_THREAD);
            gpu.disown(theirs, size);
            assert_eq!(device.free(theirs, PER_THREAD), Ok(()));
            tell.send(()).expect("a listener");
            may_go.recv().expect("a word");
            held.release();
            tell.send(()).expect("a listener");
        });
        told.recv().expect("a word");
        let other = bench.allocate(size, PER_THREAD);
        // After the other thread's work, be it in the same memory or not.
        gpu.fill(other, size, 3, PER_THREAD);
        go.send(()).expect("a thread");
        told.recv().expect("the end");
        gpu.expect(other, size, 3, PER_THREAD);
        [other, mine]
            .into_iter()
            .for_each(|block| bench.free(block));
    });
    bench.finish();
}

/// The handle of a destroyed stream comes back for another stream (at once, in the simulation)
/// while the old one's work still runs: what the old one freed is not the new one's.
#[test]
fn stream_handle_that_is_reused_is_another_stream() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 16 * MIB);
    for _ in 0..8 {
        let old = gpu.stream();
        let (_, held) = freed_while_its_stream_works(&bench, size, old);
        gpu.destroy(old);
        let new = gpu.stream();
        let other = bench.allocate(size, new);
        gpu.fill(other, size, 2, new);
        assert_eq!(bench.device().check(), Ok(()));
        held.release();
        gpu.expect(other, size, 2, new);
        bench.free(other);
        gpu.destroy(new);
    }
    bench.finish();
}

/// The block's own stream ends first, and so does a stream that holds freed memory.
#[test]
fn stream_destroyed_before_its_blocks_are_freed() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 16 * MIB);
    let (old, other) = (gpu.stream(), gpu.stream());
    let (early, late) = (bench.allocate(size, old), bench.allocate(size, old));
    let separator = bench.allocate(512, other);
    let held = gpu.hold(&[old]);
    [early, late]
        .into_iter()
        .for_each(|block| gpu.fill(block, size, 1, old));
    bench.free(early);
    gpu.destroy(old);
    bench.free(late);
    let block = bench.allocate(size, other);
    gpu.fill(block, size, 2, other);
    assert_eq!(bench.device().check(), Ok(()));
    held.release();
    gpu.expect(block, size, 2, other);
    [block, separator]
        .into_iter()
        .for_each(|block| bench.free(block));
    bench.finish();
}

/// Streams that come and go leave nothing behind, be their memory small or large next to what is
/// held.
#[test]
fn streams_created_and_destroyed_leak_nothing() {
    for size in [4 * KIB, 300 * KIB, 5 * MIB] {
        let bench = Bench::new(Settings::default());
        let gpu = &bench.gpu;
        let live = bench.allocate(64 * MIB, gpu.stream());
        let mut early = 0;
        for turn in 0..1000 {
            let stream = gpu.stream();
            let block = bench.allocate(size, stream);
            gpu.fill(block, 512, turn, stream);
            gpu.synchronize(stream);
            bench.free(block);
            gpu.destroy(stream);
            if turn == 50 {
                early = bench.reserved();
            }
        }
        assert_eq!(bench.device().check(), Ok(()));
        let late = bench.reserved();
        assert!(
            late <= early + 2 * size.max(4 * MIB),
            "{size}: {early} bytes grew to {late}"
        );
        bench.free(live);
        bench.finish();
    }
}

/// A thread with no context of its own allocates and frees on a stream that another made.
#[test]
fn thread_without_a_context_allocates_and_frees() {
    let bench = Bench::new(Settings::default());
    let (gpu, device, size) = (&bench.gpu, bench.device(), 16 * MIB);
    let stream = gpu.stream();
    let block = bench.allocate(size, stream);
    bench.free(block);
    let reserved = bench.reserved();
    thread::scope(|scope| {
        scope.spawn(|| {
            let _bound = gpu.bind();
            for _ in 0..3 {
                let again = device.allocate(size as usize, stream).expect("memory");
                assert_eq!(again, block, "it is the same stream");
                assert_eq!(device.free(again, stream), Ok(()));
                device.empty_cache();
                let anew = device.allocate(size as usize, stream).expect("memory");
                assert_eq!(device.free(anew, stream), Ok(()));
            }
        });
    });
    assert_eq!(bench.reserved(), reserved);
    bench.finish();
}

mod sim_only {
    use super::PER_THREAD;
    use crate::harness::gpu::Bench;
    use concertina_engine::settings::Settings;
    use concertina_sim::Config;
    use std::thread;

    /// The driver is asked for the id of a stream's handle, which may have been reused; for a stream that is
    /// never destroyed only once. Such a stream is not queried while it is captured, which could break the
    /// capture.
    #[test]
    fn stream_handle_of_a_permanent_stream_is_looked_up_once() {
        let name = "stream_handle_of_a_permanent_stream_is_looked_up_once";
        let Some(bench) = Bench::simulated(name, Config::default(), Settings::default()) else {
            return;
        };
        let (device, machine) = (bench.device(), bench.machine());
        let [permanent, other] = [bench.gpu.stream(), bench.gpu.stream()];
        let queries = |stream| {
            let calls = || ["cuStreamGetId", "cuStreamIsCapturing"].map(|name| machine.calls(name));
            let before = calls();
            bench.free(bench.allocate(512, stream));
            let after = calls();
            (after[0] - before[0], after[1] - before[1])
        };
        bench.free(bench.allocate(512, permanent));
        let key = device.key(permanent);
        assert_eq!(queries(permanent), (1, 1));
        device.add_permanent_stream(permanent);
        assert_eq!(queries(permanent), (0, 0));
        assert_eq!((queries(other).0, queries(0).0), (1, 0));
        let block = bench.allocate(512, other);
        let before = machine.calls("cuStreamGetCtx");
        assert_eq!(device.record_use(block, permanent), Ok(()));
        assert_eq!(machine.calls("cuStreamGetCtx"), before);
        bench.free(block);
        // What it had before is its own still.
        assert_eq!(device.key(permanent), key);
        // No stream outlives its context, and another may get the handle.
        device.reset(false);
        assert_eq!(queries(permanent).0, 1);
        device.add_permanent_stream(permanent);
        assert_eq!(queries(permanent), (0, 0));
        // The default streams are no such thing.
        device.add_permanent_stream(0);
        device.add_permanent_stream(PER_THREAD);
        let in_other_thread = thread::scope(|scope| scope.spawn(|| device.key(PER_THREAD)).join());
        assert_ne!(Some(device.key(PER_THREAD)), in_other_thread.ok());
        bench.finish();
    }
}
