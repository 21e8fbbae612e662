//! Calls that would break a capture.

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
fn streams_say_whether_they_capture() {
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
fn synchronising_calls_break_a_capture() {
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
