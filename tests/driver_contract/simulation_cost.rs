//! The simulation's own cost: replay measures an allocator on this GPU, so it must be small.

use super::*;
use std::time::Instant;

/// With 40,000 chunks mapped, a chunk more costs what the first did. The bounds are wide: other
/// tests run beside this one, unoptimised. `--nocapture` shows the figures.
#[test]
fn simulation_cost_of_mapping_is_constant() {
    for checks in [false, true] {
        let _rig = Rig::new(Config {
            checks,
            ..Config::default()
        });
        let address = reserve(80 << 30);
        let mut spent = Vec::new();
        for round in 0..40 {
            let start = Instant::now();
            for place in round * 1000..(round + 1) * 1000 {
                let handle = create(CHUNK);
                ok(map(address + place * CHUNK, CHUNK, handle));
                ok(open(address + place * CHUNK, CHUNK));
                release(handle);
            }
            spent.push(start.elapsed());
        }
        println!(
            "checks {checks}: {:?} a chunk at first, {:?} at last",
            spent[0] / 1000,
            spent[39] / 1000
        );
        let fastest = spent.iter().min().unwrap();
        assert!(fastest.as_micros() < 1000 * 20, "{fastest:?}");
        // The fastest of some: others may have the processor for a while.
        let (early, late) = (spent[..10].iter().min(), spent[30..].iter().min());
        assert!(*late.unwrap() < *early.unwrap() * 20, "{spent:?}");
        let start = Instant::now();
        for place in 0..40_000 {
            ok(unmap(address + place * CHUNK, CHUNK));
        }
        println!("unmap {:?}", start.elapsed() / 40_000);
    }
}

/// What a fast path of an allocator calls most.
#[test]
fn simulation_cost_of_events_is_small() {
    for checks in [false, true] {
        let _rig = Rig::new(Config {
            checks,
            ..Config::default()
        });
        let (a, event) = (stream(), event());
        let start = Instant::now();
        for _ in 0..10_000 {
            record(event, a);
            ok(query(event));
        }
        println!(
            "checks {checks}: record and query {:?}",
            start.elapsed() / 10_000
        );
        assert!(start.elapsed().as_millis() < 500);
    }
}

#[test]
fn simulation_cost_of_an_idle_tick_is_small() {
    let rig = Rig::new(Config::default());
    rig.machine.set_pace(Pace::Late(1_000_000));
    let a = stream();
    for _ in 0..10_000 {
        record(recorded(a), a);
    }
    let start = Instant::now();
    for _ in 0..10_000 {
        rig.machine.tick();
    }
    println!("tick {:?}", start.elapsed() / 10_000);
    assert!(start.elapsed().as_millis() < 500);
    ok(synchronise());
    // Large fills cost the checks no more than small ones, where nothing is executed.
    let address = mapped(16 << 30);
    let start = Instant::now();
    for turn in 0..1000 {
        ok(fill(address + turn * 4096, 0, (8 << 30) - turn * 4096, a));
    }
    println!("checked fill of 8 GiB {:?}", start.elapsed() / 1000);
    assert!(start.elapsed().as_millis() < 1000);
}
