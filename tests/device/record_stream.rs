//! `record_stream`: a block that other streams use is reused once their work is done.

use crate::harness::gpu::{Bench, Held, KIB, MIB};
use concertina_engine::settings::Settings;
use std::collections::{HashSet, VecDeque};

/// Once this much memory has been in use, the pool rather grows than makes a stream wait.
fn allow_growth(bench: &Bench, bytes: u64) {
    bench.free(bench.allocate(bytes, bench.gpu.stream()));
    bench.device().empty_cache();
}

pub fn overlap(a: u64, b: u64, bytes: u64) -> bool {
    a < b + bytes && b < a + bytes
}

/// A block that another stream used, and which is freed while that stream's work is held back.
fn freed_while_recorded_stream_works(
    bench: &Bench,
    size: u64,
    home: u64,
    user: u64,
) -> (u64, Held) {
    let block = bench.allocate(size, home);
    let held = bench.gpu.hold(&[user]);
    bench.gpu.fill(block, size, 1, user);
    assert_eq!(bench.device().record_use(block, user), Ok(()));
    bench.free(block);
    (block, held)
}

/// Once a recorded use is over, its block is handed out before larger free blocks are split.
#[test]
fn record_stream_block_is_the_next_of_its_size_once_unused() {
    let bench = Bench::new(Settings::default());
    let (size, home) = (4 * KIB, bench.gpu.stream());
    let separator = bench.allocate(size, home);
    let (block, held) = freed_while_recorded_stream_works(&bench, size, home, bench.gpu.stream());
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
    [separator, meanwhile, next]
        .into_iter()
        .for_each(|block| bench.free(block));
    bench.finish();
}

/// Also where other blocks are always deferred.
#[test]
fn record_stream_blocks_are_reused_in_the_order_of_their_frees() {
    for late in [1, 4, 16] {
        let bench = Bench::new(Settings::default());
        let home = bench.gpu.stream();
        // Dropping a hold waits for all of the device's work, which others still hold.
        let (mut uses, mut over) = (VecDeque::new(), Vec::new());
        let mut blocks = HashSet::new();
        // No stream is created while others are held.
        let users: Vec<u64> = (0..200).map(|_| bench.gpu.stream()).collect();
        for user in users {
            let (block, held) = freed_while_recorded_stream_works(&bench, 4 * KIB, home, user);
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

/// However many requests are served while a block is deferred, its event is queried a few times only.
#[test]
fn record_stream_polls_events_seldom() {
    let bench = Bench::new(Settings::default());
    let home = bench.gpu.stream();
    let (_, held) = freed_while_recorded_stream_works(&bench, 512, home, bench.gpu.stream());
    let before = bench.calls("cuEventQuery");
    let blocks: Vec<u64> = (0..1000).map(|_| bench.allocate(512, home)).collect();
    let queries = bench.calls("cuEventQuery") - before;
    assert!((1..=10).contains(&queries), "{queries} queries");
    assert!(bench.calls("cuCtxRecordEvent") <= 2);
    held.release();
    blocks.into_iter().for_each(|block| bench.free(block));
    bench.finish();
}

/// A recorded use is waited for on the GPU where the pool would grow otherwise.
#[test]
fn record_stream_use_is_waited_for_on_the_gpu_before_growing() {
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
fn record_stream_defers_reuse_until_its_work_is_done() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 32 * MIB);
    allow_growth(&bench, 4 * size);
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
fn record_stream_on_several_streams_defers_reuse_for_all() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 8 * MIB);
    allow_growth(&bench, 8 * size);
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

/// The recorded stream's work may still run when its handle is gone.
#[test]
fn record_stream_of_a_destroyed_stream_still_defers_reuse() {
    let bench = Bench::new(Settings::default());
    let (gpu, size) = (&bench.gpu, 16 * MIB);
    allow_growth(&bench, 4 * size);
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

/// A stream of another device uses the block over the peers' link.
#[test]
fn record_stream_of_another_devices_stream_defers_reuse() {
    let name = "record_stream_of_another_devices_stream_defers_reuse";
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

/// The same where the block is freed in no stream's order.
#[test]
fn record_stream_of_another_devices_stream_defers_an_unordered_free() {
    let name = "record_stream_of_another_devices_stream_defers_an_unordered_free";
    let Some(bench) = Bench::with_devices(name, 2, Settings::default()) else {
        return;
    };
    let (gpu, size) = (&bench.gpu, 16 * MIB);
    let (home, other_device) = (gpu.stream(), gpu.stream_on(1));
    let block = bench.allocate(size, home);
    gpu.fill(block, size, 1, home);
    assert!(gpu.order(home, other_device));
    gpu.synchronize(home);
    gpu.late();
    gpu.fill(block, size, 2, other_device);
    assert_eq!(bench.device().record_use(block, other_device), Ok(()));
    bench.forget(block);
    assert_eq!(bench.device().free_after_all_streams(block), Ok(()));
    let other = bench.allocate(size, home);
    gpu.fill(other, size, 3, home);
    gpu.settle();
    gpu.expect(other, size, 3, home);
    bench.free(other);
    bench.finish();
}
