//! Pace: when work runs.

use super::*;
use std::sync::atomic::Ordering::SeqCst;

#[test]
fn pace_immediate_runs_work_at_once() {
    let _rig = Rig::new(Config::default());
    let (a, counter) = (stream(), counter());
    ok(count_up(a, counter));
    assert_eq!(counter.load(SeqCst), 1);
    ok(query(recorded(a)));
}

#[test]
fn pace_held_runs_work_when_told_or_needed() {
    let rig = Rig::held();
    let (a, b, counter) = (stream(), stream(), counter());
    ok(count_up(a, counter));
    ok(count_up(a, counter));
    ok(count_up(b, counter));
    let event = recorded(a);
    for _ in 0..100 {
        not_ready(query(event));
    }
    assert_eq!(counter.load(SeqCst), 0);
    assert!(rig.machine.step(a));
    assert_eq!(counter.load(SeqCst), 1);
    ok(synchronise_stream(a));
    assert_eq!((counter.load(SeqCst), rig.machine.busy_streams()), (2, 1));
    rig.machine.run_all();
    assert_eq!((counter.load(SeqCst), rig.machine.busy_streams()), (3, 0));
    // A change to immediate runs what is left.
    ok(count_up(b, counter));
    rig.machine.set_pace(Pace::Immediate);
    assert_eq!(counter.load(SeqCst), 4);
}

#[test]
fn pace_late_runs_work_after_a_number_of_ticks() {
    let rig = Rig::held();
    let (a, b, counter) = (stream(), stream(), counter());
    ok(count_up(a, counter));
    rig.machine.set_pace(Pace::Late(2));
    rig.machine.tick();
    ok(count_up(b, counter));
    let event = recorded(a);
    not_ready(query(event));
    assert_eq!(counter.load(SeqCst), 0);
    rig.machine.tick();
    assert_eq!(counter.load(SeqCst), 1);
    not_ready(query(event));
    rig.machine.tick();
    assert_eq!(counter.load(SeqCst), 2);
    ok(query(event));
    rig.machine.set_pace(Pace::Late(0));
    ok(count_up(a, counter));
    assert_eq!(counter.load(SeqCst), 3);
}

#[test]
fn pace_late_runs_what_the_work_waits_for() {
    let rig = Rig::held();
    let (a, b, counter) = (stream(), stream(), counter());
    ok(count_up(a, counter));
    rig.machine.set_pace(Pace::Held);
    wait(b, recorded(a));
    rig.machine.set_pace(Pace::Late(1));
    ok(count_up(b, counter));
    rig.machine.tick();
    assert_eq!((counter.load(SeqCst), rig.machine.busy_streams()), (2, 0));
}

#[test]
fn pace_random_runs_work_between_calls_and_repeats_by_seed() {
    let trace = |seed| {
        let rig = Rig::new(Config::default());
        rig.machine.set_pace(Pace::Random(seed));
        let (streams, counter) = ([stream(), stream(), stream()], counter());
        let mut seen = Vec::new();
        for turn in 0..60 {
            ok(count_up(streams[turn % 3], counter));
            seen.push(counter.load(SeqCst));
        }
        let event = recorded(streams[0]);
        // Asking again and again gets there.
        while query(event) != 0 {}
        ok(synchronise());
        assert_eq!(counter.load(SeqCst), 60);
        seen
    };
    assert_eq!(trace(1), trace(1));
    assert_ne!(trace(1), trace(2));
    assert!(trace(3).iter().any(|seen| *seen > 0));
}
