//! Streams, events and host functions.

use super::*;
use std::sync::atomic::Ordering::SeqCst;

fn id(stream: CUstream) -> u64 {
    let mut id = 0;
    // SAFETY: outputs are locals.
    ok(unsafe { cuStreamGetId(stream, &mut id) });
    id
}

#[test]
fn stream_handles_are_reused_with_new_ids() {
    let rig = Rig::held();
    let address = mapped(CHUNK);
    let (one, other) = (stream(), stream());
    let (first, second) = (id(one), id(other));
    ok(fill(address, 3, 4096, other));
    destroy(one);
    destroy(other);
    let (again, more) = (stream(), stream());
    assert_eq!((again, more), (other, one));
    assert!(![first, second].contains(&id(again)));
    // The destroyed stream's work is not this one's.
    ok(synchronise_stream(again));
    assert_eq!(rig.machine.busy_streams(), 1);
    assert!(!rig.machine.step(again));
    ok(synchronise());
    assert_eq!(word(address, LEGACY), 3);
}

#[test]
fn stream_handle_that_is_destroyed_is_refused_and_reported() {
    let rig = Rig::new(Config::default());
    let (gone, address) = (stream(), mapped(CHUNK));
    destroy(gone);
    let refused = |answer| {
        status(answer, CUresult::CUDA_ERROR_INVALID_HANDLE);
        rig.one_violation("destroyed");
    };
    refused(fill(address, 1, 4, gone));
    refused(synchronise_stream(gone));
    // SAFETY: a handle.
    refused(unsafe { cuStreamDestroy_v2(gone) });
    let event = event();
    // SAFETY: a handle.
    ok(unsafe { cuEventDestroy_v2(event) });
    let _reuses_the_place = self::event();
    refused(query(event));
}

#[test]
fn stream_defaults_are_told_apart() {
    let rig = Rig::new(Config::default());
    let legacy = id(LEGACY);
    assert_eq!(id(without_provenance_mut(1)), legacy);
    let mine = id(per_thread());
    assert_eq!(id(per_thread()), mine);
    assert_ne!(mine, legacy);
    let mut context = null_mut();
    // SAFETY: outputs are locals.
    ok(unsafe { cuCtxGetCurrent(&mut context) });
    let context = context as usize;
    let theirs = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let _bound = rig.machine.bind();
            // SAFETY: a handle.
            ok(unsafe { cuCtxSetCurrent(without_provenance_mut(context)) });
            (id(per_thread()), id(LEGACY))
        });
        other.join().unwrap()
    });
    assert_ne!(theirs.0, mine);
    assert_eq!(theirs.1, legacy);
}

#[test]
fn event_stands_for_earlier_work() {
    let rig = Rig::held();
    let address = mapped(CHUNK);
    let (a, b) = (stream(), stream());
    let fresh = event();
    ok(query(fresh));
    ok(fill(address, 1, 4096, a));
    let event = recorded(a);
    not_ready(query(event));
    not_ready(query(event));
    wait(b, event);
    ok(fill(address, 2, 4096, b));
    assert!(!rig.machine.step(b));
    assert!(rig.machine.step(a));
    not_ready(query(event));
    assert!(rig.machine.step(a));
    ok(query(event));
    assert!(!rig.machine.step(a));
    assert!(rig.machine.step(b) && rig.machine.step(b) && !rig.machine.step(b));
    ok(synchronise());
    assert_eq!(word(address, a), 2);
}

#[test]
fn event_wait_keeps_the_record_it_was_made_for() {
    let rig = Rig::held();
    let (a, b, counter) = (stream(), stream(), counter());
    let event = recorded(a);
    wait(b, event);
    ok(count_up(b, counter));
    record(event, b);
    // SAFETY: a handle.
    ok(unsafe { cuEventDestroy_v2(event) });
    ok(synchronise_stream(b));
    assert_eq!((counter.load(SeqCst), rig.machine.busy_streams()), (1, 0));
}

#[test]
fn stream_synchronize_runs_what_it_depends_on() {
    let rig = Rig::held();
    let (streams, counter) = ([stream(), stream(), stream()], counter());
    // A long chain to and fro: no recursion.
    for turn in 0..30_000 {
        let (from, to) = (streams[turn % 2], streams[(turn + 1) % 2]);
        ok(count_up(from, counter));
        let event = recorded(from);
        wait(to, event);
        // SAFETY: a handle.
        ok(unsafe { cuEventDestroy_v2(event) });
    }
    ok(count_up(streams[2], counter));
    let last = recorded(streams[0]);
    // SAFETY: a handle.
    ok(unsafe { cuEventSynchronize(last) });
    assert_eq!(counter.load(SeqCst), 30_000);
    assert_eq!(rig.machine.busy_streams(), 1);
}

#[test]
fn stream_legacy_and_blocking_streams_wait_for_each_other() {
    let rig = Rig::held();
    let (blocking, free) = (stream_with(0), stream());
    let counter = counter();
    ok(count_up(blocking, counter));
    ok(count_up(free, counter));
    ok(count_up(per_thread(), counter));
    ok(synchronise_stream(LEGACY));
    assert_eq!(counter.load(SeqCst), 2);
    ok(count_up(LEGACY, counter));
    ok(count_up(blocking, counter));
    assert!(!rig.machine.step(blocking));
    assert!(rig.machine.step(LEGACY) && rig.machine.step(blocking));
    // SAFETY: handles.
    unsafe {
        ok(cuStreamQuery(LEGACY));
        not_ready(cuStreamQuery(free));
        ok(count_up(blocking, counter));
        not_ready(cuStreamQuery(LEGACY));
    }
    ok(synchronise());
    assert_eq!(counter.load(SeqCst), 6);
}

#[test]
fn event_belongs_to_a_device() {
    let _rig = Rig::new(Config {
        devices: 2,
        ..Config::default()
    });
    let event = event();
    let mut context = null_mut();
    // SAFETY: outputs are locals.
    unsafe {
        ok(cuDevicePrimaryCtxRetain(&mut context, 1));
        ok(cuCtxPushCurrent_v2(context));
        status(
            cuEventRecord(event, LEGACY),
            CUresult::CUDA_ERROR_INVALID_HANDLE,
        );
    }
    // Waiting across devices is fine.
    wait(LEGACY, event);
}

#[test]
fn host_function_may_not_call_the_driver() {
    unsafe extern "C" fn calls(answer: *mut c_void) {
        // SAFETY: the local below, which outlives the synchronise.
        unsafe { answer.cast::<u32>().write(cuCtxSynchronize()) };
    }
    let rig = Rig::held();
    let mut answer = 0_u32;
    // SAFETY: as above.
    ok(unsafe { cuLaunchHostFunc(LEGACY, Some(calls), (&raw mut answer).cast()) });
    ok(synchronise());
    status(answer, CUresult::CUDA_ERROR_NOT_PERMITTED);
    rig.one_violation("cuCtxSynchronize called by a host function");
}

#[test]
fn threads_share_a_machine() {
    let rig = Rig::new(Config {
        memory: 4 << 30,
        ..Config::default()
    });
    rig.machine.set_pace(Pace::Random(11));
    let mut context = null_mut();
    // SAFETY: outputs are locals.
    ok(unsafe { cuCtxGetCurrent(&mut context) });
    let context = context as usize;
    std::thread::scope(|scope| {
        for thread in 0..4_u32 {
            let machine = &rig.machine;
            scope.spawn(move || {
                let _bound = machine.bind();
                // SAFETY: a handle.
                ok(unsafe { cuCtxSetCurrent(without_provenance_mut(context)) });
                let counter = counter();
                for turn in 0..50 {
                    let (stream, address) = (stream_with(turn % 2), mapped(CHUNK));
                    let plain = alloc(4096);
                    ok(fill(address, thread, CHUNK, stream));
                    ok(copy(plain, address + 4096, 4096, stream));
                    ok(count_up(stream, counter));
                    wait(per_thread(), recorded(stream));
                    assert_eq!(word(plain, per_thread()), thread);
                    assert_eq!(counter.load(SeqCst), turn + 1);
                    ok(unmap(address, CHUNK));
                    ok(free(plain));
                    destroy(stream);
                }
            });
        }
    });
    assert_eq!((rig.machine.used(0), rig.machine.mappings()), (0, 0));
}

#[test]
fn host_function_leaves_the_machine_usable_while_it_runs() {
    use std::sync::{Barrier, atomic::AtomicBool};
    static STARTED: Barrier = Barrier::new(2);
    static FINISH: Barrier = Barrier::new(2);
    static DONE: AtomicBool = AtomicBool::new(false);
    unsafe extern "C" fn slow(_: *mut c_void) {
        STARTED.wait();
        FINISH.wait();
        std::thread::sleep(std::time::Duration::from_millis(20));
        DONE.store(true, SeqCst);
    }
    let rig = Rig::new(Config::default());
    let (one, other) = (stream() as usize, stream());
    let mut context = null_mut();
    // SAFETY: outputs are locals.
    ok(unsafe { cuCtxGetCurrent(&mut context) });
    let context = context as usize;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _bound = rig.machine.bind();
            // SAFETY: handles; the function takes no argument.
            unsafe {
                ok(cuCtxSetCurrent(without_provenance_mut(context)));
                ok(cuLaunchHostFunc(
                    without_provenance_mut(one),
                    Some(slow),
                    null_mut(),
                ));
            }
        });
        STARTED.wait();
        // SAFETY: a handle.
        not_ready(unsafe { cuStreamQuery(without_provenance_mut(one)) });
        ok(synchronise_stream(other));
        FINISH.wait();
        ok(synchronise_stream(without_provenance_mut(one)));
        assert!(DONE.load(SeqCst));
    });
}
