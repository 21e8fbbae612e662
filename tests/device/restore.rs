//! Restore: a private pool returns to an earlier state, as PyTorch's checkpoints of CUDA graph trees do.

use crate::harness::gpu::{Bench, KIB, MIB, on_card};
use crate::harness::random::Random;
use crate::private_pools::with_pool;
use concertina_engine::core::BlockInfo;
use concertina_engine::device::{NotRestored, PoolId, PoolRoute};
use concertina_engine::settings::Settings;

const POOL: PoolId = (1, 0);

/// Restores the pool, and allocates the blocks of the state in their order.
fn restore_and_allocate(bench: &Bench, blocks: &[BlockInfo]) -> Result<(), NotRestored> {
    let device = bench.device();
    let route = PoolRoute {
        pool: POOL,
        filter: Box::new(|_| true),
    };
    device.restore_pool(route, blocks)?;
    for block in blocks {
        // On whichever stream.
        let address = device.allocate(block.requested as usize, 0);
        assert_eq!(address.unwrap(), block.start);
        bench.adopt(block.start, block.requested, block.stream.handle);
    }
    device.end_pool(POOL);
    Ok(())
}

fn sorted(mut blocks: Vec<BlockInfo>) -> Vec<BlockInfo> {
    blocks.sort_by_key(|block| block.start);
    blocks
}

fn random_states(settings: Settings, seed: u64) {
    let bench = Bench::new(settings);
    let (device, gpu) = (bench.device(), &bench.gpu);
    let streams = [gpu.stream(), gpu.stream()];
    let mut random = Random::new(seed);
    let mut churn = |live: &mut Vec<u64>, turns: u64| {
        for _ in 0..turns {
            if random.once_in(3) && !live.is_empty() {
                bench.free(live.swap_remove(random.below(live.len() as u64) as usize));
                continue;
            }
            let stream = streams[random.below(2) as usize];
            let size = match random.below(3) {
                0 => random.between(1, 4 * KIB),
                1 => random.between(1, MIB),
                _ => random.between(1, 6 * MIB),
            };
            live.push(bench.allocate(size, stream));
        }
    };
    let mut live = Vec::new();
    with_pool(&bench, POOL, || churn(&mut live, 60));
    let others = (0..8).map(|_| bench.allocate(3 * MIB, streams[0]));
    let others: Vec<u64> = others.collect();
    for turn in 0..if on_card() { 2 } else { 8 } {
        let state = device.pool_blocks(POOL).unwrap();
        assert_eq!(state.len(), live.len());
        for (word, block) in (turn << 16..).zip(&state) {
            gpu.fill(block.start, block.size, word, block.stream.handle);
        }
        gpu.settle();
        let allocated = device.figures().counters.all.allocated_bytes.current;
        // A different course: some blocks are freed, others allocated and freed.
        with_pool(&bench, POOL, || churn(&mut live, 40));
        live.drain(..).for_each(|block| bench.free(block));
        assert_eq!(restore_and_allocate(&bench, &state), Ok(()));
        assert_eq!(device.check(), Ok(()));
        assert_eq!(
            sorted(device.pool_blocks(POOL).unwrap()),
            sorted(state.clone())
        );
        let counters = device.figures().counters;
        assert_eq!(counters.all.allocated_bytes.current, allocated);
        live.extend(state.iter().map(|it| it.start));
        // Further allocations do not overlap them.
        for block in &state {
            gpu.fill(block.start, block.size, 7, block.stream.handle);
        }
        let beside = with_pool(&bench, POOL, || {
            [(); 10].map(|()| bench.allocate(MIB / 2, streams[1]))
        });
        beside
            .iter()
            .for_each(|block| gpu.fill(*block, MIB / 2, 8, streams[1]));
        for block in &state {
            gpu.expect(block.start, block.size, 7, block.stream.handle);
        }
        beside.into_iter().for_each(|block| bench.free(block));
    }
    live.into_iter().for_each(|block| bench.free(block));
    others.into_iter().for_each(|block| bench.free(block));
    while device.pool_users(POOL) > 0 {
        device.release_pool(POOL);
    }
    bench.finish();
}

#[test]
fn restore_returns_a_private_pool_to_an_earlier_state() {
    for seed in 0..if on_card() { 1 } else { 6 } {
        random_states(Settings::default(), seed);
    }
}

#[test]
fn restore_with_expandable_segments_off() {
    for seed in 0..if on_card() { 1 } else { 6 } {
        let settings = Settings {
            expandable_segments: false,
            ..Settings::default()
        };
        random_states(settings, seed);
    }
}

/// A block of the earlier state that another stream still uses is waited for.
#[test]
fn restore_waits_for_other_streams() {
    let bench = Bench::new(Settings::default());
    let (device, a, b) = (bench.device(), bench.gpu.stream(), bench.gpu.stream());
    let block = with_pool(&bench, POOL, || bench.allocate(MIB, a));
    let state = device.pool_blocks(POOL).unwrap();
    bench.gpu.late();
    bench.gpu.fill(block, MIB, 1, b);
    assert_eq!(device.record_use(block, b), Ok(()));
    bench.free(block);
    assert_eq!(device.pool_blocks(POOL), Some(Vec::new()));
    assert_eq!(restore_and_allocate(&bench, &state), Ok(()));
    bench.gpu.fill(block, MIB, 2, a);
    bench.gpu.expect(block, MIB, 2, a);
    bench.free(block);
    device.release_pool(POOL);
    bench.finish();
}

#[test]
fn restore_that_is_refused_changes_nothing() {
    let bench = Bench::new(Settings::default());
    let (device, stream) = (bench.device(), bench.gpu.stream());
    let [first, second] = with_pool(&bench, POOL, || {
        [(); 2].map(|()| bench.allocate(MIB, stream))
    });
    let other = bench.allocate(MIB, stream);
    let state = sorted(device.pool_blocks(POOL).unwrap());
    bench.free(first);
    let taken = Err(NotRestored::Taken(second));
    assert_eq!(restore_and_allocate(&bench, &state), taken, "in use");
    bench.free(second);
    let at_address = |start| BlockInfo { start, ..state[0] };
    for start in [other, other + MIB, 0, u64::MAX - 511] {
        let blocks = [state[1], at_address(start)];
        assert_eq!(
            restore_and_allocate(&bench, &blocks),
            Err(NotRestored::Taken(start))
        );
    }
    let twice = [state[0], at_address(state[0].start + 512)];
    let overlapping = Err(NotRestored::Taken(twice[1].start));
    assert_eq!(restore_and_allocate(&bench, &twice), overlapping);
    assert_eq!(device.pool_blocks(POOL), Some(Vec::new()));
    assert_eq!(device.check(), Ok(()));
    assert_eq!(device.pool_blocks((9, 9)), None);
    bench.free(other);
    device.release_pool(POOL);
    assert_eq!(
        restore_and_allocate(&bench, &state),
        Err(NotRestored::NoPool)
    );
    bench.finish();
}

mod sim_only {
    use super::{POOL, restore_and_allocate};
    use crate::harness::gpu::{Bench, MIB, ok};
    use crate::private_pools::with_pool;
    use concertina_engine::settings::Settings;
    use concertina_sim::Config;
    use std::ptr;

    /// While a blocking stream is captured, the default stream cannot be queried.
    #[test]
    fn restore_beside_a_capture_returns_the_default_streams_blocks() {
        let name = "restore_beside_a_capture_returns_the_default_streams_blocks";
        let Some(bench) = Bench::simulated(name, Config::default(), Settings::default()) else {
            return;
        };
        let block = with_pool(&bench, POOL, || bench.allocate(MIB, 0));
        let state = bench.device().pool_blocks(POOL).unwrap();
        bench.free(block);
        let mut captured = ptr::null_mut();
        // SAFETY: `captured` outlives the call; without a flag the stream waits for the default one.
        ok(unsafe { (bench.gpu.functions.cuStreamCreate)(&mut captured, 0) });
        bench.machine().set_capturing(captured as _, true);
        assert_eq!(restore_and_allocate(&bench, &state), Ok(()));
        bench.machine().set_capturing(captured as _, false);
        bench.free(block);
        bench.gpu.destroy(captured as u64);
        bench.device().release_pool(POOL);
        bench.finish();
    }
}
