//! Failures on demand, and counts.

use super::*;

#[test]
fn failure_on_demand_of_the_nth_call_does_nothing() {
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
fn failure_on_demand_of_every_call_until_cleared() {
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
fn violations_beyond_a_number_are_counted_only() {
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
fn failure_on_demand_of_an_unknown_function_panics() {
    Machine::new(Config::default()).fail("cuMemFoo", 1, CUresult::CUDA_ERROR_UNKNOWN);
}

#[test]
#[should_panic(expected = "counted from 1")]
fn failure_on_demand_of_call_zero_panics() {
    Machine::new(Config::default()).fail("cuMemMap", 0, CUresult::CUDA_ERROR_UNKNOWN);
}
