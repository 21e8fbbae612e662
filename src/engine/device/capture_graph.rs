//! The graph that a capture makes, as the driver tells of it while it grows. To ask breaks no capture.

use crate::device::context::current;
use crate::driver::Functions;
use crate::driver::sys::{CUgraphNode, CUstream, CUstreamCaptureStatus};
use std::collections::HashSet;
use std::ptr::{null, null_mut};

/// A node, by its handle. It means nothing once its capture has ended.
pub type Node = usize;

/// Where a captured stream stands.
pub struct Front {
    /// The capture's number, which no other of the process ever has.
    pub capture: u64,
    /// What the stream does next comes after all of these.
    pub nodes: Vec<Node>,
}

/// Where a stream (by handle) stands in the graph that it is captured into. `None` where it is not
/// captured, its capture is broken, or the driver does not tell, as where an edge of the graph is more
/// than an order (`CUDA_ERROR_LOSSY_QUERY`: kernels that start before the one before them ends).
pub fn front(functions: &Functions, context: usize, stream: u64) -> Option<Front> {
    let _current = current(functions, context);
    // A number: a newer driver may answer with one that the enum does not know.
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
    // SAFETY: so many nodes may be read until the stream is used again, which is what the calling thread
    // would do after this.
    let node = |at| unsafe { *nodes.add(at) } as Node;
    Some(Front {
        capture,
        nodes: (0..count).map(node).collect(),
    })
}

/// Adds these nodes to a set, and all that come before them but for what comes before those that are in
/// it already.
pub fn add_all_before(
    functions: &Functions,
    context: usize,
    nodes: Vec<Node>,
    known: &mut HashSet<Node>,
) {
    let _current = current(functions, context);
    let mut open = nodes;
    while let Some(node) = open.pop() {
        if known.insert(node) {
            open.extend(before(functions, node));
        }
    }
}

/// The nodes that a node of a capture under way depends on; none where the driver does not tell.
fn before(functions: &Functions, node: Node) -> Vec<Node> {
    let ask = |nodes: *mut CUgraphNode, count: &mut usize| {
        let none = null_mut();
        // SAFETY: a node of a graph that is being captured; null, or room for so many.
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
