//! Captures: calls that would break one.

use super::graphs::{MODES, RELAXED, begin, end};
use super::*;

fn capturing(stream: CUstream) -> Result<u32, u32> {
    let mut capturing = 9;
    // SAFETY: outputs are locals.
    match unsafe { cuStreamIsCapturing(stream, &mut capturing) } {
        0 => Ok(capturing),
        status => Err(status),
    }
}

#[test]
fn capture_status_of_streams() {
    let rig = Rig::new(Config::default());
    let (a, blocking) = (stream(), stream_with(0));
    rig.machine.set_capturing(a, true);
    assert_eq!(
        (capturing(a), capturing(blocking), capturing(LEGACY)),
        (Ok(1), Ok(0), Ok(0))
    );
    rig.machine.set_capturing(a, false);
    rig.machine.set_capturing(blocking, true);
    let implicit = CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT as u32;
    assert_eq!(
        (capturing(a), capturing(blocking), capturing(LEGACY)),
        (Ok(0), Ok(1), Err(implicit))
    );
    destroy(blocking);
    assert_eq!(capturing(LEGACY), Ok(0));
}

#[test]
fn capture_is_broken_by_synchronizing_calls() {
    let rig = Rig::new(Config::default());
    let (a, b, address) = (stream(), stream(), alloc(512));
    let event = recorded(b);
    rig.machine.set_capturing(a, true);
    let (mut more, mut id) = (0, 0);
    // SAFETY: handles, and outputs are locals.
    let answers = unsafe {
        [
            synchronise(),
            query(event),
            cuEventSynchronize(event),
            synchronise_stream(b),
            cuStreamQuery(b),
            cuMemAlloc_v2(&mut more, 512),
            free(address),
            cuEventRecord(event, a),
            cuStreamGetId(a, &mut id),
        ]
    };
    for answer in answers {
        status(answer, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    let violations = rig.machine.violations();
    assert_eq!(violations.len(), answers.len());
    assert!(
        violations
            .iter()
            .all(|text| text.contains("called during a capture"))
    );
    // SAFETY: handles.
    let answer = unsafe { cuStreamWaitEvent(a, event, 0) };
    status(answer, CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    rig.one_violation("during a capture");
    // What does not synchronise goes on, on other streams and with mappings.
    record(event, b);
    ok(fill(mapped(CHUNK), 1, 4096, a));
    rig.machine.set_capturing(a, false);
    ok(synchronise());
    ok(free(address));
}

/// In whatever mode a stream is captured, and whatever the calling thread allows itself.
#[test]
fn capture_is_broken_by_a_wait_or_event_of_the_whole_context() {
    let rig = Rig::new(Config::default());
    let (a, event) = (stream(), recorded(stream()));
    let mut context = null_mut();
    // SAFETY: writes a local.
    ok(unsafe { cuCtxGetCurrent(&mut context) });
    for mode in MODES {
        for wait in [false, true] {
            begin(a, mode);
            let mut relaxed = RELAXED;
            // SAFETY: handles, and a local.
            let answer = unsafe {
                ok(cuThreadExchangeStreamCaptureMode(&mut relaxed));
                let answer = match wait {
                    true => cuCtxSynchronize(),
                    false => cuCtxRecordEvent(context, event),
                };
                ok(cuThreadExchangeStreamCaptureMode(&mut relaxed));
                answer
            };
            status(answer, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
            assert!(end(a).is_err(), "{mode:?}, wait {wait}");
            rig.one_violation("during a capture");
        }
    }
}

/// A stream that synchronizes with the legacy one: what is done there would be ordered with the capture.
#[test]
fn capture_of_a_blocking_stream_is_broken_by_an_event_on_the_legacy_stream() {
    let rig = Rig::new(Config::default());
    let (blocking, beside, other) = (stream_with(0), stream_with(0), stream());
    let event = recorded(other);
    begin(blocking, RELAXED);
    record(event, beside);
    record(event, other);
    assert!(end(blocking).is_ok());
    begin(blocking, RELAXED);
    // SAFETY: handles.
    let answer = unsafe { cuEventRecord(event, LEGACY) };
    status(answer, CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    assert!(end(blocking).is_err());
    rig.one_violation("on the legacy stream");
}

#[test]
fn capture_is_broken_by_a_query_of_its_event() {
    let rig = Rig::new(Config::default());
    let (a, event) = (stream(), recorded(stream()));
    begin(a, RELAXED);
    record(event, a);
    assert!(end(a).is_ok());
    begin(a, RELAXED);
    record(event, a);
    status(query(event), CUresult::CUDA_ERROR_CAPTURED_EVENT);
    assert!(end(a).is_err());
    drop(rig);
}
