//! The graph of a capture under way: its nodes and their dependencies. Queries of it break no capture.

use crate::device::context::current;
use crate::driver::Functions;
use crate::driver::sys::{CUgraphNode, CUstream, CUstreamCaptureStatus};
use std::collections::HashSet;
use std::ptr::{null, null_mut};

/// A graph node's handle, which is valid until its capture ends.
pub type Node = usize;

/// A captured stream's position in the graph.
pub struct Front {
    /// The capture's id, unique in the process.
    pub capture: u64,
    /// The nodes that the stream's next node will depend on.
    pub nodes: Vec<Node>,
}

/// The position of a stream (by handle) in the graph that it is captured into. `None` if it is not captured,
/// its capture is broken, or the driver does not tell: an edge with data, as of programmatic dependent
/// launches, is `CUDA_ERROR_LOSSY_QUERY`.
pub fn front(functions: &Functions, context: usize, stream: u64) -> Option<Front> {
    let _current = current(functions, context);
    // Not the enum: a newer driver may return a value that it does not have.
    let mut status = 0_u32;
    let (mut capture, mut nodes, mut count) = (0, null(), 0);
    // SAFETY: the outputs are locals, and null is allowed for the others; the enum is 32 bits wide. The
    // program uses the stream, or has said that it does in the capture that goes on.
    let answer = unsafe {
        (functions.cuStreamGetCaptureInfo_v3)(
            stream as CUstream,
            (&raw mut status).cast(),
            &mut capture,
            null_mut(),
            &mut nodes,
            null_mut(),
            &mut count,
        )
    };
    let active = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32;
    if answer != 0 || status != active || (nodes.is_null() && count > 0) {
        return None;
    }
    // SAFETY: the driver returned `count` nodes, valid until the stream is used again, which is what the
    // calling thread does after this.
    let node = |at| unsafe { *nodes.add(at) } as Node;
    Some(Front {
        capture,
        nodes: (0..count).map(node).collect(),
    })
}

/// Adds nodes and all their ancestors to a set. The ancestors of a node in the set are taken to be in it.
pub fn add_ancestors(
    functions: &Functions,
    context: usize,
    nodes: Vec<Node>,
    known: &mut HashSet<Node>,
) {
    let _current = current(functions, context);
    let mut open = nodes;
    while let Some(node) = open.pop() {
        if known.insert(node) {
            open.extend(dependencies(functions, node));
        }
    }
}

/// The nodes that a node depends on; none if the driver does not tell.
fn dependencies(functions: &Functions, node: Node) -> Vec<Node> {
    let ask = |nodes: *mut CUgraphNode, count: &mut usize| {
        let none = null_mut();
        // SAFETY: a node of a graph that is being captured; null, or room for `count` nodes.
        unsafe {
            (functions.cuGraphNodeGetDependencies_v2)(node as CUgraphNode, nodes, none, count)
        }
    };
    let mut count = 0;
    if ask(null_mut(), &mut count) != 0 {
        return Vec::new();
    }
    let mut nodes = vec![null_mut(); count];
    if ask(nodes.as_mut_ptr(), &mut count) != 0 {
        return Vec::new();
    }
    nodes.truncate(count);
    nodes.into_iter().map(|node| node as Node).collect()
}
