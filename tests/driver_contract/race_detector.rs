//! The race detector: which work is ordered and which is not, at every pace.

use super::*;

/// Every pace, so that no verdict depends on when things happen to run.
fn at_every_pace(test: impl Fn(&Rig)) {
    for pace in [Pace::Immediate, Pace::Held, Pace::Random(7), Pace::Late(3)] {
        let rig = Rig::new(Config::default());
        rig.machine.set_pace(pace);
        test(&rig);
        ok(synchronise());
    }
}

#[test]
fn race_detector_finds_reuse_on_another_stream_without_order() {
    at_every_pace(|rig| {
        let (address, a, b) = (mapped(CHUNK), stream(), stream());
        ok(fill(address, 1, 4096, a));
        ok(fill(address + 2048, 2, 4096, b));
        rig.one_violation("unordered reuse: write of 4096 bytes");
    });
}

#[test]
fn race_detector_knows_one_stream_is_ordered() {
    at_every_pace(|_| {
        let (address, a, b) = (mapped(CHUNK), stream(), stream());
        ok(fill(address, 1, 4096, a));
        ok(fill(address, 2, 4096, a));
        ok(fill(address + 4096, 2, 4096, b));
    });
}

#[test]
fn race_detector_knows_events_order() {
    at_every_pace(|_| {
        let (address, a, b, c) = (mapped(CHUNK), stream(), stream(), stream());
        ok(fill(address, 1, 4096, a));
        wait(b, recorded(a));
        // Through a third stream, too.
        wait(c, recorded(b));
        ok(fill(address, 2, 4096, c));
    });
}

#[test]
fn race_detector_knows_an_event_recorded_too_early_does_not_order() {
    at_every_pace(|rig| {
        let (address, a, b) = (mapped(CHUNK), stream(), stream());
        let event = recorded(a);
        ok(fill(address, 1, 4096, a));
        wait(b, event);
        ok(copy(address + 8192, address, 4096, b));
        rig.one_violation("unordered reuse: read");
    });
}

#[test]
fn race_detector_knows_the_host_orders_completed_work() {
    at_every_pace(|rig| {
        let (address, a, b) = (mapped(CHUNK), stream(), stream());
        ok(fill(address, 1, 4096, a));
        let event = recorded(a);
        // SAFETY: a handle.
        ok(unsafe { cuEventSynchronize(event) });
        ok(fill(address, 2, 4096, b));
        rig.machine.run_all();
        // Complete, but the host did not look.
        ok(fill(address, 3, 4096, a));
        rig.one_violation("unordered reuse");
        let event = recorded(a);
        rig.machine.run_all();
        ok(query(event));
        ok(fill(address, 3, 4096, b));
        ok(synchronise_stream(b));
        ok(fill(address, 4, 4096, a));
        ok(synchronise());
        ok(fill(address, 5, 4096, b));
    });
}

#[test]
fn race_detector_knows_the_legacy_stream_orders_blocking_streams_only() {
    at_every_pace(|rig| {
        let (address, blocking, other) = (mapped(CHUNK), stream_with(0), stream_with(0));
        ok(fill(address, 1, 4096, blocking));
        ok(fill(address, 2, 4096, LEGACY));
        ok(fill(address, 3, 4096, other));
        ok(fill(address, 3, 4096, LEGACY));
        ok(fill(address, 4, 4096, per_thread()));
        ok(fill(address, 5, 4096, LEGACY));
        let free = stream();
        ok(fill(address, 6, 4096, free));
        rig.one_violation("unordered reuse");
        ok(fill(address, 7, 4096, LEGACY));
        rig.one_violation("unordered reuse");
        ok(fill(address, 8, 4096, blocking));
        ok(fill(address, 9, 4096, other));
        rig.one_violation("unordered reuse");
    });
}

#[test]
fn race_detector_allows_concurrent_reads_only() {
    at_every_pace(|rig| {
        let (address, a, b) = (mapped(CHUNK), stream(), stream());
        ok(fill(address, 1, 4096, a));
        wait(b, recorded(a));
        ok(copy(address + 65536, address, 4096, a));
        ok(copy(address + 131_072, address, 4096, b));
        ok(fill(address, 2, 4096, a));
        rig.one_violation("is not ordered after the read");
    });
}

#[test]
fn race_detector_sees_through_aliases() {
    at_every_pace(|rig| {
        let (one, other, handle) = (reserve(CHUNK), reserve(CHUNK), create(CHUNK));
        for address in [one, other] {
            ok(map(address, CHUNK, handle));
            ok(open(address, CHUNK));
        }
        let (a, b) = (stream(), stream());
        ok(fill(one + 4096, 1, 4096, a));
        ok(fill(other, 2, 4096, b));
        ok(fill(other + 4096, 2, 4096, b));
        rig.one_violation(&format!("at {:#x}", other + 4096));
    });
}

#[test]
fn race_detector_tells_reused_stream_handles_apart() {
    at_every_pace(|rig| {
        let (address, a) = (mapped(CHUNK), stream());
        ok(fill(address, 1, 4096, a));
        destroy(a);
        let b = stream();
        assert_eq!(a, b);
        ok(fill(address, 2, 4096, b));
        rig.one_violation("unordered reuse");
        // Once the host knows, its place may be used again, and old accesses are in order.
        ok(synchronise());
        destroy(b);
        let c = stream();
        ok(fill(address, 3, 4096, c));
    });
}

#[test]
fn race_detector_with_many_short_streams() {
    let rig = Rig::new(Config::default());
    let address = mapped(CHUNK);
    for turn in 0..100 {
        let a = stream_with(turn % 2);
        ok(fill(address, 1, 4096, a));
        if turn % 3 == 0 {
            ok(synchronise_stream(a));
        } else {
            ok(synchronise());
        }
        destroy(a);
    }
    let (a, b) = (stream(), stream());
    ok(fill(address, 1, 4096, a));
    ok(fill(address, 1, 4096, b));
    rig.one_violation("unordered reuse");
}

#[test]
fn race_detector_finds_an_unmap_before_work_is_known_complete() {
    at_every_pace(|rig| {
        let (address, a) = (mapped(CHUNK), stream());
        ok(fill(address, 1, 4096, a));
        rig.machine.run_all();
        ok(unmap(address, CHUNK));
        rig.one_violation("unmap overtakes running work: cuMemUnmap");
        let address = mapped(CHUNK);
        ok(fill(address, 1, 4096, a));
        ok(synchronise_stream(a));
        ok(unmap(address, CHUNK));
        // Through one alias only: the other may go.
        let (one, other, handle) = (reserve(CHUNK), reserve(CHUNK), create(CHUNK));
        for address in [one, other] {
            ok(map(address, CHUNK, handle));
            ok(open(address, CHUNK));
        }
        ok(fill(one, 1, 4096, a));
        ok(unmap(other, CHUNK));
    });
}

#[test]
fn race_detector_can_be_turned_off() {
    let rig = Rig::new(Config {
        checks: false,
        ..Config::default()
    });
    let (address, a, b) = (mapped(CHUNK), stream(), stream());
    rig.machine.claim(address, 4096, 1);
    rig.machine.claim(address, 4096, 2);
    ok(fill(address, 1, 4096, a));
    ok(fill(address, 2, CHUNK, b));
    ok(unmap(address, CHUNK));
}

#[test]
fn race_detector_finds_nothing_in_random_ordered_work() {
    for seed in 0..20 {
        let rig = Rig::new(Config::default());
        rig.machine.set_pace(Pace::Random(seed));
        let address = mapped(CHUNK);
        let streams: Vec<_> = (0..4).map(|kind| stream_with(kind % 2)).collect();
        let mut last: Option<CUevent> = None;
        for turn in 0..50_u32 {
            let stream = streams[(turn.wrapping_mul(2_654_435_761) >> 28) as usize % 4];
            if let Some(event) = last {
                wait(stream, event);
            }
            ok(fill(address, turn, 4096, stream));
            last = Some(recorded(stream));
        }
        ok(synchronise());
        assert_eq!(word(address, LEGACY), 49);
    }
}
