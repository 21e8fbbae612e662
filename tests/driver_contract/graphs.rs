//! Graphs: what a capture records, and what its launches run.

use super::*;
use cudarc::driver::sys::{
    CUgraph, CUgraphExec, CUgraphNode, CUstreamCaptureMode, CUstreamCaptureMode as Mode,
    CUstreamCaptureStatus,
};

const GLOBAL: CUstreamCaptureMode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const THREAD_LOCAL: CUstreamCaptureMode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
pub const RELAXED: CUstreamCaptureMode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;
pub const MODES: [CUstreamCaptureMode; 3] = [GLOBAL, THREAD_LOCAL, RELAXED];

pub fn begin(stream: CUstream, mode: CUstreamCaptureMode) {
    // SAFETY: a handle.
    ok(unsafe { cuStreamBeginCapture_v2(stream, mode) });
}

pub fn end(stream: CUstream) -> Result<CUgraph, u32> {
    let mut graph = null_mut();
    // SAFETY: writes a local.
    match unsafe { cuStreamEndCapture(stream, &mut graph) } {
        0 => Ok(graph),
        status => {
            assert!(graph.is_null());
            Err(status)
        }
    }
}

fn executable(graph: CUgraph) -> CUgraphExec {
    let mut executable = null_mut();
    // SAFETY: writes a local.
    ok(unsafe { cuGraphInstantiateWithFlags(&mut executable, graph, 0) });
    executable
}

fn launch(executable: CUgraphExec, stream: CUstream) {
    // SAFETY: handles.
    ok(unsafe { cuGraphLaunch(executable, stream) });
}

/// The capture's status and number.
fn info(stream: CUstream) -> (CUstreamCaptureStatus, u64) {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut id, none) = (0, null_mut());
    // SAFETY: writes locals.
    ok(unsafe {
        let info = cuStreamGetCaptureInfo_v3;
        info(
            stream,
            &mut status,
            &mut id,
            none,
            null_mut(),
            null_mut(),
            null_mut(),
        )
    });
    (status, id)
}

#[test]
fn graph_runs_captured_work_at_each_launch_and_not_before() {
    let _rig = Rig::new(Config::default());
    let (a, address, calls) = (stream(), alloc(512), counter());
    ok(fill(address, 1, 512, a));
    begin(a, GLOBAL);
    ok(fill(address, 2, 512, a));
    ok(count_up(a, calls));
    let graph = end(a).expect("a whole capture");
    assert_eq!(word(address, a), 1);
    let executable = executable(graph);
    // SAFETY: a handle that is not used again.
    ok(unsafe { cuGraphDestroy(graph) });
    for launches in 1..3 {
        ok(fill(address, 1, 512, a));
        launch(executable, a);
        assert_eq!(word(address, a), 2);
        assert_eq!(calls.load(std::sync::atomic::Ordering::SeqCst), launches);
    }
    // SAFETY: as above.
    ok(unsafe { cuGraphExecDestroy(executable) });
    // SAFETY: a stale handle is an error, and nothing else.
    invalid(unsafe { cuGraphLaunch(executable, a) });
}

#[test]
fn graph_lists_its_nodes() {
    use cudarc::driver::sys::CUgraphNodeType as Type;
    let _rig = Rig::new(Config::default());
    let (a, address) = (stream(), alloc(512));
    begin(a, GLOBAL);
    ok(fill(address, 2, 512, a));
    ok(copy(address, address + 256, 256, a));
    let graph = end(a).expect("a whole capture");
    let (mut count, mut nodes) = (0, [null_mut(); 4]);
    // SAFETY: writes locals.
    unsafe {
        ok(cuGraphGetNodes(graph, null_mut(), &mut count));
        assert_eq!(count, 2);
        count = nodes.len();
        ok(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count));
        assert_eq!(count, 2);
        ok(cuGraphAddEmptyNode(&mut nodes[3], graph, &nodes[1], 1));
        count = nodes.len();
        ok(cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count));
    }
    assert_eq!(count, 3);
    assert!(nodes[3].is_null());
    let kinds = [
        Type::CU_GRAPH_NODE_TYPE_MEMSET,
        Type::CU_GRAPH_NODE_TYPE_MEMCPY,
        Type::CU_GRAPH_NODE_TYPE_EMPTY,
    ];
    for (number, kind) in kinds.into_iter().enumerate() {
        let (mut found, mut before, mut count) = (Type::CU_GRAPH_NODE_TYPE_HOST, null_mut(), 1);
        // SAFETY: a handle, and outputs that are locals.
        unsafe {
            ok(cuGraphNodeGetType(nodes[number], &mut found));
            let none = null_mut();
            ok(cuGraphNodeGetDependencies_v2(
                nodes[number],
                &mut before,
                none,
                &mut count,
            ));
        }
        assert_eq!(found, kind);
        assert_eq!(count, number.min(1));
        assert!(number == 0 || before == nodes[number - 1]);
    }
}

/// The nodes that a captured stream's next one comes after.
fn ends(stream: CUstream) -> Vec<CUgraphNode> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut nodes, mut count) = (std::ptr::null(), 0);
    // SAFETY: writes locals; the nodes are read before the next call.
    unsafe {
        ok(cuStreamGetCaptureInfo_v3(
            stream,
            &mut status,
            null_mut(),
            null_mut(),
            &mut nodes,
            null_mut(),
            &mut count,
        ));
        (0..count).map(|at| *nodes.add(at)).collect()
    }
}

/// The nodes that a node comes after.
fn before(node: CUgraphNode) -> Vec<CUgraphNode> {
    let (mut nodes, mut count) = ([null_mut(); 8], 8);
    // SAFETY: writes locals.
    unsafe {
        ok(cuGraphNodeGetDependencies_v2(
            node,
            nodes.as_mut_ptr(),
            null_mut(),
            &mut count,
        ));
    }
    nodes[..count].to_vec()
}

#[test]
fn graph_of_several_branches_is_no_chain() {
    let _rig = Rig::new(Config::default());
    let (a, b, address) = (stream(), stream(), alloc(1024));
    begin(a, GLOBAL);
    assert_eq!(ends(a), []);
    ok(fill(address, 1, 512, a));
    let fork = ends(a);
    wait(b, recorded(a));
    assert_eq!((fork.len(), ends(b)), (1, fork.clone()));
    ok(fill(address + 512, 3, 512, a));
    ok(fill(address, 2, 512, b));
    let (on_a, on_b) = (ends(a), ends(b));
    assert_ne!(on_a, on_b);
    assert_eq!((before(on_a[0]), before(on_b[0])), (fork.clone(), fork));
    wait(a, recorded(b));
    assert_eq!(ends(a), [on_a[0], on_b[0]]);
    ok(fill(address, 4, 1024, a));
    assert_eq!(before(ends(a)[0]), [on_a[0], on_b[0]]);
    // What comes after can be changed.
    let mut nodes = [on_a[0]];
    let update = cuStreamUpdateCaptureDependencies_v2;
    // SAFETY: handles, of this capture's.
    unsafe {
        ok(update(b, nodes.as_mut_ptr(), std::ptr::null(), 1, 1));
        assert_eq!(ends(b), on_a);
        nodes = [on_b[0]];
        ok(update(b, nodes.as_mut_ptr(), std::ptr::null(), 1, 0));
        assert_eq!(ends(b), [on_a[0], on_b[0]]);
    }
    wait(a, recorded(b));
    assert!(end(a).is_ok());
}

/// What two branches of a graph do to one place is in no order, however its streams were asked.
#[test]
fn graph_branches_that_are_not_joined_race_at_each_launch() {
    let rig = Rig::new(Config::default());
    let (a, b, address) = (stream(), stream(), alloc(512));
    for joined in [true, false] {
        begin(a, GLOBAL);
        wait(b, recorded(a));
        ok(fill(address, 2, 512, b));
        let join = recorded(b);
        if joined {
            wait(a, join);
        }
        ok(fill(address, 3, 512, a));
        wait(a, join);
        let executable = executable(end(a).expect("a whole capture"));
        assert_eq!(rig.machine.violations(), [""; 0], "nothing has run yet");
        launch(executable, a);
        match joined {
            true => assert_eq!(word(address, a), 3),
            false => rig.one_violation("not ordered"),
        }
    }
}

/// Whatever order the branches run in, what follows the launch comes after all of them.
#[test]
fn graph_launch_ends_with_all_its_branches() {
    for seed in 0..20 {
        let rig = Rig::new(Config::default());
        let (a, b, c, address) = (stream(), stream(), stream(), alloc(2048));
        begin(a, GLOBAL);
        for (number, other) in [b, c].into_iter().enumerate() {
            wait(other, recorded(a));
            ok(fill(address + 512 * number as u64, 1, 512, other));
            wait(a, recorded(other));
        }
        let executable = executable(end(a).expect("a whole capture"));
        rig.machine.set_pace(Pace::Random(seed));
        launch(executable, a);
        ok(copy(address + 1024, address, 1024, a));
        assert_eq!(word(address + 1024, a), 1);
        assert_eq!(word(address + 1536, a), 1);
        assert_eq!(rig.machine.violations(), [""; 0]);
    }
}

#[test]
fn graph_capture_is_joined_by_events() {
    let _rig = Rig::new(Config::default());
    let (a, b, address) = (stream(), stream(), alloc(512));
    begin(a, GLOBAL);
    let (_, id) = info(a);
    let fork = recorded(a);
    wait(b, fork);
    assert_eq!(
        info(b),
        (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE, id)
    );
    ok(fill(address, 7, 512, b));
    let join = recorded(b);
    wait(a, join);
    let graph = end(a).expect("a whole capture");
    assert_eq!(
        info(b).0,
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
    );
    launch(executable(graph), a);
    assert_eq!(word(address, a), 7);
}

#[test]
fn graph_capture_with_unjoined_work_fails() {
    let _rig = Rig::new(Config::default());
    let (a, b, address) = (stream(), stream(), alloc(512));
    begin(a, GLOBAL);
    let fork = recorded(a);
    wait(b, fork);
    ok(fill(address, 7, 512, b));
    let unjoined = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED as u32;
    assert_eq!(end(a), Err(unjoined));
    // Both are free again.
    ok(fill(address, 1, 512, b));
    ok(synchronise());
}

#[test]
fn graph_capture_ends_on_the_stream_where_it_began() {
    let _rig = Rig::new(Config::default());
    let (a, b) = (stream(), stream());
    let illegal = CUresult::CUDA_ERROR_ILLEGAL_STATE as u32;
    assert_eq!(end(a), Err(illegal));
    begin(a, GLOBAL);
    // SAFETY: a handle.
    status(
        unsafe { cuStreamBeginCapture_v2(a, GLOBAL) },
        CUresult::CUDA_ERROR_ILLEGAL_STATE,
    );
    let fork = recorded(a);
    wait(b, fork);
    assert_eq!(
        end(b),
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED as u32)
    );
    let join = recorded(b);
    wait(a, join);
    assert!(end(a).is_ok());
    // SAFETY: the legacy stream's handle.
    status(
        unsafe { cuStreamBeginCapture_v2(LEGACY, GLOBAL) },
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    );
}

/// What `cuMemAlloc_v2` answers on this thread, and whether a capture of this mode, begun here, is
/// whole after it was called there.
fn allocating(
    rig: &Rig,
    capture: CUstreamCaptureMode,
    caller: CUstreamCaptureMode,
    other_thread: bool,
) -> (bool, bool) {
    let a = stream();
    begin(a, capture);
    let call = || {
        let (mut mode, mut address) = (caller, 0);
        // SAFETY: outputs are locals.
        unsafe {
            ok(cuThreadExchangeStreamCaptureMode(&mut mode));
            let answer = cuMemAlloc_v2(&mut address, 512);
            ok(cuThreadExchangeStreamCaptureMode(&mut mode));
            answer == 0
        }
    };
    let allowed = match other_thread {
        false => call(),
        true => std::thread::scope(|scope| {
            let machine = rig.machine.clone();
            let there = move || {
                let _bound = machine.bind();
                let mut context = null_mut();
                // SAFETY: outputs are locals.
                unsafe {
                    ok(cuDevicePrimaryCtxRetain(&mut context, 0));
                    ok(cuCtxSetCurrent(context));
                }
                call()
            };
            scope.spawn(there).join().expect("no panic")
        }),
    };
    let whole = end(a).is_ok();
    assert_eq!(rig.machine.violations().len(), usize::from(!allowed));
    (allowed, whole)
}

#[test]
fn graph_capture_modes_say_which_threads_may_allocate() {
    let rig = Rig::new(Config::default());
    let (yes, no) = ((true, true), (false, false));
    // A thread that allows itself everything breaks no capture.
    for capture in [GLOBAL, THREAD_LOCAL, RELAXED] {
        assert_eq!(allocating(&rig, capture, RELAXED, false), yes);
        assert_eq!(allocating(&rig, capture, RELAXED, true), yes);
    }
    // A global capture binds every other, a thread-local one its own thread, a relaxed one nobody.
    assert_eq!(allocating(&rig, GLOBAL, GLOBAL, false), no);
    assert_eq!(allocating(&rig, GLOBAL, GLOBAL, true), no);
    assert_eq!(allocating(&rig, GLOBAL, THREAD_LOCAL, true), yes);
    assert_eq!(allocating(&rig, THREAD_LOCAL, GLOBAL, false), no);
    assert_eq!(allocating(&rig, THREAD_LOCAL, GLOBAL, true), yes);
    assert_eq!(allocating(&rig, RELAXED, GLOBAL, false), yes);
}

#[test]
fn graph_capture_is_broken_by_waiting_for_its_stream() {
    let rig = Rig::new(Config::default());
    let a = stream();
    begin(a, RELAXED);
    status(
        synchronise_stream(a),
        CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    );
    rig.one_violation("called during a capture");
    assert_eq!(
        info(a).0,
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED
    );
    assert_eq!(
        end(a),
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED as u32)
    );
}
