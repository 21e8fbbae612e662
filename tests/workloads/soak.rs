//! Soak: over ten million events of changing programs, the bookkeeping of the pool is bounded and does not
//! grow.

use crate::programs;
use crate::random::Random;
use crate::replay::Replay;
use crate::script::Script;
use concertina_engine::device::PoolRoute;
use concertina_engine::settings::Settings;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

/// The system's allocator, which counts what this thread holds.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does it all.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.set(HELD.get() + layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        HELD.set(HELD.get() - layout.size() as isize);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(address, layout) };
    }
}

/// Resources that the pool holds, and by how much their maximum may rise from the first half of the cycles to
/// the second. The first three follow the programs, the others would add up over time.
const KINDS: [(&str, f64); 6] = [
    ("old mappings", 1.5),
    ("mappings", 1.5),
    ("chunks", 1.5),
    ("bytes of addresses", 1.25),
    ("events", 1.25),
    // Of the simulated GPU, too.
    ("bytes of bookkeeping", 1.25),
];

type Resources = [u64; KINDS.len()];

/// `heap`: the bytes of host memory that this thread holds for the pool.
fn resources(replay: &Replay, heap: u64) -> Resources {
    let (machine, figures) = (&replay.machine, replay.device().figures());
    [
        figures.counters.stale,
        machine.mappings() as u64,
        machine.handles() as u64,
        figures.addresses,
        machine.calls("cuEventCreate") - machine.calls("cuEventDestroy_v2"),
        heap + figures.node_bytes as u64,
    ]
}

fn raise(most: &mut Resources, resources: Resources) {
    most.iter_mut()
        .zip(resources)
        .for_each(|(most, resources)| *most = resources.max(*most));
}

/// The events of all cycles together.
const EVENTS: usize = 10_000_000;

/// How many blocks stay.
const STAY: usize = 200;

/// A cycle is a new program of each kind. Streams are destroyed with each program and their handles are
/// reused; some programs have a private pool; now and then the cache is emptied, or idle memory is purged.
/// Some blocks stay live over many programs.
#[test]
fn soak_host_memory_and_addresses_are_bounded_and_flat() {
    let programs: &[fn(&mut Random) -> Script] = &[
        programs::training,
        programs::pipeline,
        programs::serving,
        programs::anything,
        programs::two_models,
        programs::small,
        programs::serving_small,
    ];
    let mut random = Random::new(0);
    let before = HELD.get();
    let mut replay = Replay::with_settings(Settings::default(), 256 << 30, 20);
    let mut stay: Vec<(u64, u64)> = Vec::with_capacity(STAY);
    let (mut events, mut cycles): (usize, Vec<Resources>) = (0, Vec::with_capacity(1000));
    while events < EVENTS {
        let mut most = Resources::default();
        for program in programs {
            let script = program(&mut random);
            events += script.events.len();
            replay.end_streams();
            replay.make_streams(script.streams);
            if random.once_in(4) {
                let pool = (cycles.len() as u64, 1);
                let filter = Box::new(|_| true);
                replay.device().begin_pool(PoolRoute { pool, filter });
                replay.pass(&script);
                replay.device().end_pool(pool);
                replay.device().release_pool(pool);
            }
            let purges = random.once_in(3);
            replay.watched_pass(&script, |replay, count| {
                if count % 1000 == 0 {
                    let resources = resources(replay, 0);
                    assert!(
                        resources[0] <= 2 * (4 * resources[2]).max(256),
                        "{resources:?}"
                    );
                    raise(&mut most, resources);
                    let (device, stream) = (replay.device(), replay.any_stream(&mut random));
                    if stay.len() == STAY {
                        let (address, stream) =
                            stay.swap_remove(random.below(STAY as u64) as usize);
                        assert_eq!(device.free(address, stream), Ok(()));
                    }
                    let size = programs::any_size(&mut random, 1, 64 << 20) as usize;
                    match device.allocate(size, stream) {
                        Ok(address) => stay.push((address, stream)),
                        Err(shortage) => panic!("{shortage}"),
                    }
                }
                if purges && count % 2000 == 0 {
                    let now = Duration::from_secs(count as u64);
                    while replay.device().purge_idle(now, Duration::from_secs(8000)) {}
                }
            });
            drop(script);
            if random.once_in(10) {
                replay.device().empty_cache();
            }
            let heap = (HELD.get() - before) as u64;
            raise(&mut most, resources(&replay, heap));
        }
        println!("{events} events: {most:?}");
        cycles.push(most);
    }
    let (first, second) = cycles.split_at(cycles.len() / 2);
    let [first, second] = [first, second].map(|half| {
        let mut most = Resources::default();
        half.iter()
            .for_each(|resources| raise(&mut most, *resources));
        most
    });
    for (((name, rise), first), second) in KINDS.into_iter().zip(first).zip(second) {
        assert!(
            second as f64 <= first as f64 * rise,
            "{name}: up to {first} in the first half, {second} in the second"
        );
    }
    for (address, stream) in stay {
        assert_eq!(replay.device().free(address, stream), Ok(()));
    }
    replay.end_streams();
    replay.machine.run_all();
    replay.device().empty_cache();
    assert_eq!(replay.device().figures().reserved_bytes(), 0);
}
