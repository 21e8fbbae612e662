//! Several streams: who may have freed memory, and when.

use crate::gpu::{Bench, Held, KIB, MIB};
use concertina_engine::settings::Settings;
use concertina_sim::Config;
use std::collections::{HashSet, VecDeque};
use std::sync::mpsc::channel;
use std::thread;

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: u64 = 2;

/// Has so much memory been in use before, the pool rather grows than has a stream wait.
fn room_to_grow(bench: &Bench, bytes: u64) {
    bench.free(bench.allocate(bytes, bench.gpu.stream()));
    bench.device().empty_cache();
}

/// A block that was filled with ones and freed on a stream whose work is held back.
fn freed_behind(bench: &Bench, size: u64, stream: u64) -> (u64, Held) {
    let block = bench.allocate(size, stream);
    let held = bench.gpu.hold(&[stream]);
    bench.gpu.fill(block, size, 1, stream);
    bench.free(block);
    (block, held)
}

fn overlap(a: u64, b: u64, bytes: u64) -> bool {
    a < b + bytes && b < a + bytes
}

/// Rather than hold more memory, one stream takes what another freed, and is made to wait for it on the
/// GPU; the host waits for nothing.
#[test]
fn memory_freed_on_one_stream_goes_to_another_behind_its_work() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 32 * MIB);
    let (a, b) = (gpu.stream(), gpu.stream());
    let (first, held) = freed_behind(&bench, size, a);
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

/// With `stream_waits:False` memory is only had once the work is done.
#[test]
fn nothing_waits_where_the_setting_forbids_it() {
    let bench = Bench::new(Settings {
        stream_waits: false,
        ..Settings::default()
    });
    let (gpu, size) = (&bench.gpu, 32 * MIB);
    let (a, b) = (gpu.stream(), gpu.stream());
    let (first, held) = freed_behind(&bench, size, a);
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

/// The driver is asked which stream a handle means, as it may be another one than before; but of a stream
/// that is never destroyed only once, and not while it is captured, which to ask could end.
#[test]
fn a_stream_that_lasts_is_known_by_its_handle() {
    let name = "a_stream_that_lasts_is_known_by_its_handle";
    let Some(bench) = Bench::simulated(name, Config::default(), Settings::default()) else {
        return;
    };
    let (device, machine) = (bench.device(), bench.machine());
    let [kept, other] = [bench.gpu.stream(), bench.gpu.stream()];
    let asked = |stream| {
        let calls = || ["cuStreamGetId", "cuStreamIsCapturing"].map(|name| machine.calls(name));
        let before = calls();
        bench.free(bench.allocate(512, stream));
        let after = calls();
        (after[0] - before[0], after[1] - before[1])
    };
    bench.free(bench.allocate(512, kept));
    let key = device.key(kept);
    assert_eq!(asked(kept), (1, 1));
    device.add_permanent_stream(kept);
    assert_eq!(asked(kept), (0, 0));
    assert_eq!((asked(other).0, asked(0).0), (1, 0));
    let block = bench.allocate(512, other);
    let before = machine.calls("cuStreamGetCtx");
    assert_eq!(device.record_use(block, kept), Ok(()));
    assert_eq!(machine.calls("cuStreamGetCtx"), before);
    bench.free(block);
    // What it had before is its own still.
    assert_eq!(device.key(kept), key);
    // No stream outlives its context, and another may get the handle.
    device.reset(false);
    assert_eq!(asked(kept).0, 1);
    device.add_permanent_stream(kept);
    assert_eq!(asked(kept), (0, 0));
    // The default streams are no such thing.
    device.add_permanent_stream(0);
    device.add_permanent_stream(PER_THREAD);
    let elsewhere = thread::scope(|scope| scope.spawn(|| device.key(PER_THREAD)).join());
    assert_ne!(Some(device.key(PER_THREAD)), elsewhere.ok());
    bench.finish();
}

/// The free blocks of several streams, each too small, are put together behind a wait for all of them.
#[test]
fn chunks_of_several_streams_make_one_range_behind_their_work() {
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

/// A block that another stream used, and which is freed while that stream's work is held back.
fn freed_while_used(bench: &Bench, size: u64, home: u64, user: u64) -> (u64, Held) {
    let block = bench.allocate(size, home);
    let held = bench.gpu.hold(&[user]);
    bench.gpu.fill(block, size, 1, user);
    assert_eq!(bench.device().record_use(block, user), Ok(()));
    bench.free(block);
    (block, held)
}

/// Once a recorded use is over, its block is handed out before larger free blocks are cut, which nothing but
/// time has called for.
#[test]
fn a_block_that_waited_is_the_next_of_its_size_once_it_is_unused() {
    let bench = Bench::new(Settings::default());
    let (size, home) = (4 * KIB, bench.gpu.stream());
    let wall = bench.allocate(size, home);
    let (block, held) = freed_while_used(&bench, size, home, bench.gpu.stream());
    let meanwhile = bench.allocate(size, home);
    assert_ne!(meanwhile, block);
    held.release();
    let next = bench.allocate(size, home);
    assert_eq!(next, block);
    bench.gpu.fill(next, size, 2, home);
    let hits = bench.device().figures().counters.hits;
    assert_eq!(
        hits, 3,
        "each request was met once, and the first had to grow"
    );
    assert_eq!(bench.device().check(), Ok(()));
    [wall, meanwhile, next]
        .into_iter()
        .for_each(|block| bench.free(block));
    bench.finish();
}

/// Also where there is always another that waits.
#[test]
fn blocks_that_wait_come_back_in_turn() {
    for late in [1, 4, 16] {
        let bench = Bench::new(Settings::default());
        let home = bench.gpu.stream();
        // To drop a hold waits for all of the device's work, which others still hold.
        let (mut uses, mut over) = (VecDeque::new(), Vec::new());
        let mut blocks = HashSet::new();
        // None is made while others are held.
        let users: Vec<u64> = (0..200).map(|_| bench.gpu.stream()).collect();
        for user in users {
            let (block, held) = freed_while_used(&bench, 4 * KIB, home, user);
            blocks.insert(block);
            uses.push_back((held, user));
            if uses.len() > late {
                let first = uses.pop_front();
                over.extend(first.inspect(|(held, user)| held.let_go(*user)));
            }
        }
        let count = blocks.len();
        assert!(count <= 2 * late + 2, "{count} where {late} are used");
        uses.iter().for_each(|(held, user)| held.let_go(*user));
        bench.finish();
    }
}

/// However many requests are met while a block waits, the device is asked a few times only.
#[test]
fn a_device_far_behind_is_asked_seldom() {
    let bench = Bench::new(Settings::default());
    let home = bench.gpu.stream();
    let (_, held) = freed_while_used(&bench, 512, home, bench.gpu.stream());
    let before = bench.calls("cuEventQuery");
    let blocks: Vec<u64> = (0..1000).map(|_| bench.allocate(512, home)).collect();
    let asked = bench.calls("cuEventQuery") - before;
    assert!((1..=10).contains(&asked), "{asked} times");
    assert!(bench.calls("cuCtxRecordEvent") <= 2);
    held.release();
    blocks.into_iter().for_each(|block| bench.free(block));
    bench.finish();
}

/// A use that was recorded is waited for on the GPU too, where memory would grow otherwise.
#[test]
fn a_recorded_use_is_followed_rather_than_grown_past() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 32 * MIB);
    let (home, user) = (gpu.stream(), gpu.stream());
    let block = bench.allocate(size, home);
    let held = gpu.hold(&[user]);
    gpu.fill(block, size, 1, user);
    assert_eq!(bench.device().record_use(block, user), Ok(()));
    bench.free(block);
    let reserved = bench.reserved();
    let other = bench.allocate(size, home);
    assert_eq!(bench.reserved(), reserved);
    gpu.fill(other, size, 2, home);
    assert_eq!(bench.device().check(), Ok(()));
    held.release();
    gpu.expect(other, size, 2, home);
    bench.free(other);
    bench.finish();
}

#[test]
fn memory_whose_work_is_done_needs_no_wait() {
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

#[test]
fn a_recorded_use_defers_reuse_until_its_work_is_done() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 32 * MIB);
    room_to_grow(&bench, 4 * size);
    let (a, b) = (gpu.stream(), gpu.stream());
    let block = bench.allocate(size, a);
    gpu.fill(block, size, 1, a);
    assert!(gpu.order(a, b));
    gpu.synchronize(a);
    let held = gpu.hold(&[b]);
    gpu.fill(block, size, 2, b);
    // Twice is as good as once, and the own stream needs no record.
    for stream in [b, b, a] {
        assert_eq!(bench.device().record_use(block, stream), Ok(()));
    }
    bench.free(block);
    let figures = bench.device().figures();
    assert_eq!(figures.counters.pending_bytes, size);
    assert_eq!(figures.counters.all.active_bytes.current, size);
    assert_eq!(figures.counters.all.allocated_bytes.current, 0);
    let others = [bench.allocate(size, a), bench.allocate(size, b)];
    assert!(others.iter().all(|other| !overlap(block, *other, size)));
    gpu.fill(others[0], size, 3, a);
    held.release();
    let again = bench.allocate(size, a);
    assert_eq!(again, block, "once the use is over the own stream has it");
    assert_eq!(bench.device().figures().counters.pending_bytes, 0);
    gpu.fill(again, size, 4, a);
    gpu.expect(others[0], size, 3, a);
    others
        .into_iter()
        .chain([again])
        .for_each(|block| bench.free(block));
    bench.finish();
}

#[test]
fn several_recorded_uses_all_defer_reuse() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 8 * MIB);
    room_to_grow(&bench, 8 * size);
    let home = gpu.stream();
    let users: Vec<u64> = (0..4).map(|_| gpu.stream()).collect();
    let block = bench.allocate(size, home);
    let held = gpu.hold(&users);
    for (turn, user) in users.iter().enumerate() {
        gpu.fill(block + turn as u64 * MIB, MIB, turn as u32, *user);
        assert_eq!(bench.device().record_use(block, *user), Ok(()));
    }
    bench.free(block);
    let mut others = Vec::new();
    for user in &users[..3] {
        held.let_go(*user);
        let other = bench.allocate(size, home);
        assert!(!overlap(block, other, size), "a use is not over");
        others.push(other);
    }
    held.release();
    let again = bench.allocate(size, home);
    assert_eq!(again, block);
    gpu.fill(again, size, 9, home);
    others
        .into_iter()
        .chain([again])
        .for_each(|block| bench.free(block));
    bench.finish();
}

/// The default stream has two handles (`NULL` and `CU_STREAM_LEGACY`) and is one stream.
#[test]
fn both_names_of_the_default_stream_are_one_stream() {
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
fn the_per_thread_default_stream_is_another_in_every_thread() {
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
fn a_handle_that_comes_back_is_another_stream() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 16 * MIB);
    for _ in 0..8 {
        let old = gpu.stream();
        let (_, held) = freed_behind(&bench, size, old);
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

/// The recorded stream's work may still run when nobody can ask about it any more.
#[test]
fn a_use_by_a_stream_that_ends_still_defers_reuse() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 16 * MIB);
    room_to_grow(&bench, 4 * size);
    let (home, user) = (gpu.stream(), gpu.stream());
    let block = bench.allocate(size, home);
    let held = gpu.hold(&[user]);
    gpu.fill(block, size, 1, user);
    assert_eq!(bench.device().record_use(block, user), Ok(()));
    gpu.destroy(user);
    bench.free(block);
    let other = bench.allocate(size, home);
    assert!(!overlap(block, other, size));
    gpu.fill(other, size, 2, home);
    assert_eq!(bench.device().check(), Ok(()));
    held.release();
    bench.free(other);
    bench.finish();
}

/// The block's own stream ends first, and so does a stream that holds freed memory.
#[test]
fn blocks_outlive_their_stream() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 16 * MIB);
    let (old, other) = (gpu.stream(), gpu.stream());
    let (early, late) = (bench.allocate(size, old), bench.allocate(size, old));
    let wall = bench.allocate(512, other);
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
    [block, wall]
        .into_iter()
        .for_each(|block| bench.free(block));
    bench.finish();
}

/// Streams that come and go leave nothing behind, be their memory small or large next to what is
/// held.
#[test]
fn a_thousand_streams_leave_memory_flat() {
    for size in [4 * KIB, 300 * KIB, 5 * MIB] {
        let bench = Bench::new(Settings::default());
        let gpu = &bench.gpu;
        let kept = bench.allocate(64 * MIB, gpu.stream());
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
        bench.free(kept);
        bench.finish();
    }
}

/// A stream that is idle has nothing to wait for: the first request of another stream gets its
/// memory before any new.
#[test]
fn an_idle_streams_memory_is_used_before_new_memory() {
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

/// A small block that one stream has just freed beside much idle memory does not take that away
/// from the others.
#[test]
fn a_small_busy_hole_does_not_hide_a_large_idle_one() {
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

/// A stream of another device uses the block over the peers' link.
#[test]
fn a_use_by_another_devices_stream_defers_reuse() {
    let name = "a_use_by_another_devices_stream_defers_reuse";
    let Some(bench) = Bench::with_devices(name, 2, Settings::default()) else {
        return;
    };
    let (gpu, device, size) = (&bench.gpu, bench.device(), 16 * MIB);
    let (home, far) = (gpu.stream(), gpu.stream_on(1));
    device.set_limit(Some(2 * size));
    let block = bench.allocate(size, home);
    gpu.fill(block, size, 1, home);
    gpu.synchronize(home);
    gpu.fill(block, size, 2, far);
    assert_eq!(device.record_use(block, far), Ok(()));
    bench.free(block);
    let other = bench.allocate(size, home);
    gpu.fill(other, size, 3, home);
    let again = bench.allocate(size, home);
    gpu.fill(again, size, 5, home);
    gpu.expect(other, size, 3, home);
    [other, again]
        .into_iter()
        .for_each(|block| bench.free(block));
    bench.finish();
}

/// The same where the block is freed as if any stream might use it.
#[test]
fn a_free_for_later_waits_for_other_devices_too() {
    let name = "a_free_for_later_waits_for_other_devices_too";
    let Some(bench) = Bench::with_devices(name, 2, Settings::default()) else {
        return;
    };
    let (gpu, size) = (&bench.gpu, 16 * MIB);
    let (home, abroad) = (gpu.stream(), gpu.stream_on(1));
    let block = bench.allocate(size, home);
    gpu.fill(block, size, 1, home);
    assert!(gpu.order(home, abroad));
    gpu.synchronize(home);
    gpu.late();
    gpu.fill(block, size, 2, abroad);
    assert_eq!(bench.device().record_use(block, abroad), Ok(()));
    bench.forget(block);
    assert_eq!(bench.device().free_deferred(block), Ok(()));
    let other = bench.allocate(size, home);
    gpu.fill(other, size, 3, home);
    gpu.settle();
    gpu.expect(other, size, 3, home);
    bench.free(other);
    bench.finish();
}

/// A thread with no context of its own allocates and frees on a stream that another made.
#[test]
fn a_thread_without_a_context_is_as_good_as_any() {
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
