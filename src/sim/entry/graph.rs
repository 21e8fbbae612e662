//! Captures, and the graphs that they make.

use crate::call::{call, check_output, write_output};
use crate::context;
use crate::failure::Function;
use crate::graph::{Graph, Node, RELAXED};
use crate::run::Session;
use crate::state::DriverResult;
use crate::stream::Kind;
use crate::work::Work;
use cudarc::driver::sys::{
    CUgraph, CUgraphExec, CUgraphNode, CUgraphNodeType, CUresult, CUstream, CUstreamCaptureMode,
    CUstreamCaptureStatus,
};
use std::ffi::{CStr, c_char, c_uint, c_ulonglong, c_void};
use std::ptr::{null, null_mut};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Nodes' handles are their graph's plus this for each.
const NODE_STEP: u64 = 1 << 48;

/// Begins to record a stream's work instead of enqueueing it. The legacy stream cannot be captured.
pub unsafe extern "C" fn cuStreamBeginCapture_v2(
    stream: CUstream,
    mode: CUstreamCaptureMode,
) -> u32 {
    call(Function::cuStreamBeginCapture_v2, |session| {
        let slot = session.state.stream("cuStreamBeginCapture", stream)?;
        let found = session.state.streams.get(slot);
        if found.kind == Kind::Legacy {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        }
        if found.capturing {
            return Err(CUresult::CUDA_ERROR_ILLEGAL_STATE);
        }
        session.state.begin_capture(slot, mode as u32);
        Ok(())
    })
}

/// Ends a capture on the stream that it began on, and hands its graph over. What broke the capture
/// is said now, and there is no graph.
pub unsafe extern "C" fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> u32 {
    call(Function::cuStreamEndCapture, |session| {
        check_output(graph)?;
        let slot = session.state.stream("cuStreamEndCapture", stream)?;
        // SAFETY: the module's contract.
        unsafe { write_output(graph, null_mut())? };
        let state = &mut *session.state;
        let illegal = CUresult::CUDA_ERROR_ILLEGAL_STATE;
        let index = state.streams.get(slot).capture.ok_or(illegal)?;
        let capture = state.captures.get(index).ok_or(illegal)?;
        if capture.parts.first().is_none_or(|part| part.slot != slot) {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        }
        if capture.mode != RELAXED && capture.thread != context::thread() {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        let Some(capture) = state.end_capture(index) else {
            return Err(illegal);
        };
        let broken = match (capture.invalid, capture.unjoined()) {
            (true, _) => Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED),
            (_, true) => Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED),
            _ => None,
        };
        if let Some(status) = broken {
            if let Some(graph) = state.graphs.remove(capture.graph) {
                release(session, graph.owned);
            }
            return Err(status);
        }
        let handle = state.graphs.handle(capture.graph) as CUgraph;
        // SAFETY: the module's contract.
        unsafe { write_output(graph, handle) }
    })
}

/// What `cuStreamIsCapturing` says of a stream.
pub(super) fn capture_status(session: &Session<'_>, slot: u32) -> CUstreamCaptureStatus {
    let stream = session.state.streams.get(slot);
    let capture = stream.capture.and_then(|it| session.state.captures.get(it));
    match (stream.capturing, capture) {
        (false, _) => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE,
        (_, Some(capture)) if capture.invalid => {
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED
        }
        _ => CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE,
    }
}

/// Whether a stream captures, the capture's number, its graph so far, and the nodes that the stream's
/// next one will come after. Those may be read until the stream is asked again or the capture ends.
pub unsafe extern "C" fn cuStreamGetCaptureInfo_v3(
    stream: CUstream,
    status: *mut CUstreamCaptureStatus,
    id: *mut c_ulonglong,
    graph: *mut CUgraph,
    dependencies: *mut *const CUgraphNode,
    edges: *mut *const c_void,
    count: *mut usize,
) -> u32 {
    call(Function::cuStreamGetCaptureInfo_v3, |session| {
        check_output(status)?;
        let slot = session.state.stream("cuStreamGetCaptureInfo", stream)?;
        if session.state.implicitly_captured(slot) {
            return Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        let said = capture_status(session, slot);
        let state = &mut *session.state;
        let capture = state.streams.get(slot).capture;
        let (mut number, mut of, mut nodes): (_, CUgraph, _) = (0, null_mut(), (null(), 0));
        if let Some(capture) = capture.and_then(|index| state.captures.get_mut(index)) {
            (number, of) = (capture.id, state.graphs.handle(capture.graph) as CUgraph);
            if let Some(part) = capture.part(slot) {
                let handles = part.ends.iter().map(|end| node_handle(of, *end) as u64);
                // Where nothing has changed, what was told before may still be read.
                if !handles.clone().eq(part.told.iter().copied()) {
                    part.told = handles.collect();
                }
                nodes = (part.told.as_ptr().cast(), part.told.len());
            }
        }
        // SAFETY: the module's contract: all but the status may be null.
        unsafe {
            write_output(status, said)?;
            if capture.is_some() {
                if_wanted(id, number)?;
                if_wanted(graph, of)?;
            }
            if_wanted(dependencies, nodes.0)?;
            if_wanted(edges, null())?;
            if_wanted(count, nodes.1)
        }
    })
}

/// # Safety
/// The output is null or may be written.
unsafe fn if_wanted<T>(to: *mut T, value: T) -> DriverResult {
    match to.is_null() {
        true => Ok(()),
        // SAFETY: the caller's promise.
        false => unsafe { write_output(to, value) },
    }
}

/// The graph that a handle means.
fn graph(session: &Session<'_>, handle: CUgraph) -> DriverResult<u32> {
    session.state.graphs.index(handle as u64).ok_or(INVALID)
}

/// Makes an empty graph.
pub unsafe extern "C" fn cuGraphCreate(to: *mut CUgraph, flags: c_uint) -> u32 {
    call(Function::cuGraphCreate, |session| {
        check_output(to)?;
        if flags != 0 {
            return Err(INVALID);
        }
        let graph = session.state.graphs.insert(Graph::default());
        // SAFETY: the module's contract.
        unsafe { write_output(to, session.state.graphs.handle(graph) as CUgraph) }
    })
}

/// Ends a graph; executables made of it stay.
pub unsafe extern "C" fn cuGraphDestroy(handle: CUgraph) -> u32 {
    call(Function::cuGraphDestroy, |session| {
        let index = graph(session, handle)?;
        if let Some(graph) = session.state.graphs.remove(index)
            && !graph.instantiated
        {
            release(session, graph.owned);
        }
        Ok(())
    })
}

/// Frees what a graph owned. What a program has freed itself is gone already.
fn release(session: &mut Session<'_>, owned: Vec<u64>) {
    for address in owned {
        let _ = session.state.memory.free(address);
    }
}

/// A graph's nodes: as many as fit, and how many; without a place for them, how many there are.
pub unsafe extern "C" fn cuGraphGetNodes(
    handle: CUgraph,
    nodes: *mut CUgraphNode,
    count: *mut usize,
) -> u32 {
    call(Function::cuGraphGetNodes, |session| {
        check_output(count)?;
        let index = graph(session, handle)?;
        let found = session.state.graphs.get(index);
        let all = found.map_or(0, |graph| graph.nodes.len());
        let handles = (0..all).map(|number| node_handle(handle, number));
        // SAFETY: the module's contract: `count` says how many nodes may be written.
        unsafe { give_nodes(handles, nodes, count) }
    })
}

fn node_handle(graph: CUgraph, number: usize) -> CUgraphNode {
    (graph as u64 + (number as u64 + 1) * NODE_STEP) as CUgraphNode
}

/// The graph of a node, and the node's number in it.
fn node(session: &Session<'_>, handle: CUgraphNode) -> DriverResult<(CUgraph, usize)> {
    let of = (handle as u64 % NODE_STEP) as CUgraph;
    let number = (handle as u64 / NODE_STEP).checked_sub(1).ok_or(INVALID)? as usize;
    let graph = session.state.graphs.get(graph(session, of)?);
    match graph.is_some_and(|graph| number < graph.nodes.len()) {
        true => Ok((of, number)),
        false => Err(INVALID),
    }
}

/// The numbers of nodes of one graph.
///
/// # Safety
/// So many handles may be read.
unsafe fn numbers(
    session: &Session<'_>,
    of: CUgraph,
    nodes: *const CUgraphNode,
    count: usize,
) -> DriverResult<Vec<usize>> {
    if count > 0 && nodes.is_null() {
        return Err(INVALID);
    }
    let number = |at| {
        // SAFETY: the caller's promise.
        let (graph, number) = node(session, unsafe { *nodes.add(at) })?;
        (graph == of).then_some(number).ok_or(INVALID)
    };
    (0..count).map(number).collect()
}

/// Adds a node that does nothing.
pub unsafe extern "C" fn cuGraphAddEmptyNode(
    to: *mut CUgraphNode,
    handle: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
) -> u32 {
    call(Function::cuGraphAddEmptyNode, |session| {
        check_output(to)?;
        let index = graph(session, handle)?;
        // SAFETY: the module's contract: `count` says how many there are.
        let after = unsafe { numbers(session, handle, dependencies, count)? };
        let graph = session.state.graphs.get_mut(index).ok_or(INVALID)?;
        let work = Work::Mark;
        graph.nodes.push(Node { work, after });
        let number = graph.nodes.len() - 1;
        // SAFETY: the module's contract.
        unsafe { write_output(to, node_handle(handle, number)) }
    })
}

/// What kind of work a node is. A kernel does nothing here, and is as good as an empty node.
pub unsafe extern "C" fn cuGraphNodeGetType(which: CUgraphNode, to: *mut CUgraphNodeType) -> u32 {
    use CUgraphNodeType::*;
    call(Function::cuGraphNodeGetType, |session| {
        let (of, number) = node(session, which)?;
        let graph = session.state.graphs.get(graph(session, of)?);
        let kind = match graph.map(|graph| &graph.nodes[number].work) {
            Some(Work::Fill { .. }) => CU_GRAPH_NODE_TYPE_MEMSET,
            Some(Work::Call { .. }) => CU_GRAPH_NODE_TYPE_HOST,
            Some(Work::Free { .. }) => CU_GRAPH_NODE_TYPE_MEM_FREE,
            Some(Work::Mark) | None => CU_GRAPH_NODE_TYPE_EMPTY,
            Some(_) => CU_GRAPH_NODE_TYPE_MEMCPY,
        };
        // SAFETY: the module's contract.
        unsafe { write_output(to, kind) }
    })
}

/// What a node comes after: as many nodes as fit, and how many; without a place for them, how many there
/// are.
pub unsafe extern "C" fn cuGraphNodeGetDependencies_v2(
    which: CUgraphNode,
    dependencies: *mut CUgraphNode,
    _edges: *mut c_void,
    count: *mut usize,
) -> u32 {
    call(Function::cuGraphNodeGetDependencies_v2, |session| {
        check_output(count)?;
        let (of, number) = node(session, which)?;
        let graph = session.state.graphs.get(graph(session, of)?);
        let after = graph.map_or(&[][..], |graph| &graph.nodes[number].after);
        let handles = after.iter().map(|number| node_handle(of, *number));
        // SAFETY: the module's contract: `count` says how many nodes may be written.
        unsafe { give_nodes(handles, dependencies, count) }
    })
}

/// # Safety
/// `nodes` is null, or so many as `count` says may be written.
unsafe fn give_nodes(
    mut all: impl ExactSizeIterator<Item = CUgraphNode>,
    nodes: *mut CUgraphNode,
    count: *mut usize,
) -> DriverResult {
    let there = all.len();
    // SAFETY: the caller's promise.
    unsafe {
        if nodes.is_null() {
            return write_output(count, there);
        }
        let room = *count;
        for number in 0..room {
            nodes.add(number).write(all.next().unwrap_or(null_mut()));
        }
        write_output(count, room.min(there))
    }
}

/// Changes what a capturing stream's next work comes after: these nodes (flag 1), or these as well (0).
pub unsafe extern "C" fn cuStreamUpdateCaptureDependencies_v2(
    stream: CUstream,
    dependencies: *mut CUgraphNode,
    _edges: *const c_void,
    count: usize,
    flags: c_uint,
) -> u32 {
    call(Function::cuStreamUpdateCaptureDependencies_v2, |session| {
        let slot = session
            .state
            .stream("cuStreamUpdateCaptureDependencies", stream)?;
        let illegal = CUresult::CUDA_ERROR_ILLEGAL_STATE;
        let index = session.state.streams.get(slot).capture.ok_or(illegal)?;
        let capture = session.state.captures.get(index).ok_or(illegal)?;
        let of = session.state.graphs.handle(capture.graph) as CUgraph;
        if flags > 1 {
            return Err(INVALID);
        }
        // SAFETY: the module's contract: `count` says how many there are.
        let nodes = unsafe { numbers(session, of, dependencies, count)? };
        if let Some(capture) = session.state.captures.get_mut(index) {
            if let Some(part) = capture.part(slot).filter(|_| flags == 1) {
                part.ends.clear();
            }
            capture.extend(slot, &nodes);
        }
        Ok(())
    })
}

/// Makes an executable of a graph.
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    to: *mut CUgraphExec,
    handle: CUgraph,
    _flags: c_ulonglong,
) -> u32 {
    call(Function::cuGraphInstantiateWithFlags, |session| {
        session.state.device()?;
        check_output(to)?;
        let index = graph(session, handle)?;
        let state = &mut *session.state;
        let graph = state.graphs.get_mut(index).ok_or(INVALID)?;
        let executable = Graph {
            nodes: graph.nodes.clone(),
            owned: match graph.instantiated {
                true => Vec::new(),
                false => graph.owned.clone(),
            },
            instantiated: true,
        };
        graph.instantiated = true;
        let index = state.executables.insert(executable);
        // SAFETY: the module's contract.
        unsafe { write_output(to, state.executables.handle(index) as CUgraphExec) }
    })
}

/// Ends an executable; launches of it that are under way go on.
pub unsafe extern "C" fn cuGraphExecDestroy(handle: CUgraphExec) -> u32 {
    call(Function::cuGraphExecDestroy, |session| {
        let index = session.state.executables.index(handle as u64);
        let gone = session.state.executables.remove(index.ok_or(INVALID)?);
        if let Some(gone) = gone.filter(|gone| !gone.owned.is_empty()) {
            let device = session.state.device()?;
            session.synchronise_device(device)?;
            release(session, gone.owned);
        }
        Ok(())
    })
}

/// Enqueues all that an executable recorded, in no other order than its nodes have; a stream that
/// captures records it again.
pub unsafe extern "C" fn cuGraphLaunch(handle: CUgraphExec, stream: CUstream) -> u32 {
    call(Function::cuGraphLaunch, |session| {
        let slot = session.state.stream("cuGraphLaunch", stream)?;
        session
            .state
            .check_not_faulted(session.state.streams.get(slot).device)?;
        let index = session.state.executables.index(handle as u64);
        let found = session.state.executables.get(index.ok_or(INVALID)?);
        let nodes = found.map_or_else(Vec::new, |graph| graph.nodes.clone());
        session.launch(slot, &nodes);
        Ok(())
    })
}

/// Does nothing: there is nothing to prepare.
pub unsafe extern "C" fn cuGraphUpload(handle: CUgraphExec, stream: CUstream) -> u32 {
    call(Function::cuGraphUpload, |session| {
        session.state.stream("cuGraphUpload", stream)?;
        let index = session.state.executables.index(handle as u64);
        index.map(drop).ok_or(INVALID)
    })
}

/// Writes a graph's nodes to a file, in the language of Graphviz.
pub unsafe extern "C" fn cuGraphDebugDotPrint(
    handle: CUgraph,
    path: *const c_char,
    _flags: c_uint,
) -> u32 {
    call(Function::cuGraphDebugDotPrint, |session| {
        let index = graph(session, handle)?;
        if path.is_null() {
            return Err(INVALID);
        }
        // SAFETY: the module's contract: text that ends in a zero.
        let path = unsafe { CStr::from_ptr(path) };
        let found = session.state.graphs.get(index);
        let mut text = String::from("digraph {\n");
        for (number, node) in found
            .map_or(&[][..], |graph| &graph.nodes)
            .iter()
            .enumerate()
        {
            text += &format!("  n{number} [label=\"{}\"];\n", node.work.describe());
            for before in &node.after {
                text += &format!("  n{before} -> n{number};\n");
            }
        }
        text += "}\n";
        let path = path.to_str().map_err(|_| INVALID)?;
        std::fs::write(path, text).map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)
    })
}
