//! Failures on demand, and counts.

use super::*;

#[test]
fn the_nth_use_fails_and_does_nothing() {
    let rig = Rig::new(Config::default());
    create(CHUNK);
    rig.machine
        .fail("cuMemCreate", 2, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    rig.machine
        .fail("cuMemCreate", 3, CUresult::CUDA_ERROR_UNKNOWN);
    ok(try_create(0, CHUNK));
    status(try_create(0, CHUNK), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    status(try_create(0, CHUNK), CUresult::CUDA_ERROR_UNKNOWN);
    ok(try_create(0, CHUNK));
    assert_eq!((rig.machine.used(0), rig.machine.handles()), (3 * CHUNK, 3));
    assert_eq!(rig.machine.calls("cuMemCreate"), 5);
}

#[test]
fn every_use_fails_until_cleared() {
    let rig = Rig::new(Config::default());
    rig.machine
        .fail_every("cuCtxSynchronize", CUresult::CUDA_ERROR_LAUNCH_FAILED);
    for _ in 0..3 {
        status(synchronise(), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    }
    rig.machine.clear_failures();
    ok(synchronise());
    assert_eq!(rig.machine.calls("cuCtxSynchronize"), 4);
}

#[test]
fn a_flood_of_violations_is_counted() {
    let rig = Rig::new(Config::default());
    for _ in 0..1003 {
        status(query(null_mut()), CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    let violations = rig.machine.violations();
    assert_eq!(
        (violations.len(), violations[1000].as_str()),
        (1001, "3 further violations")
    );
}

#[test]
#[should_panic(expected = "no function cuMemFoo")]
fn unknown_names_panic() {
    Machine::new(Config::default()).fail("cuMemFoo", 1, CUresult::CUDA_ERROR_UNKNOWN);
}

#[test]
#[should_panic(expected = "counted from 1")]
fn there_is_no_use_zero() {
    Machine::new(Config::default()).fail("cuMemMap", 0, CUresult::CUDA_ERROR_UNKNOWN);
}
