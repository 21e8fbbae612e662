//! Graphs.

use crate::driver::{NOT_SUPPORTED, Pointer};
use crate::thread::{ready, run};
use std::ffi::{c_char, c_uint, c_ulonglong};

runtime! {
    cudaGraphDestroy(graph: Pointer) ready().cuGraphDestroy(graph);
    cudaGraphGetNodes(graph: Pointer, nodes: *mut Pointer, count: *mut usize) ready().cuGraphGetNodes(graph, nodes, count);
    cudaGraphInstantiateWithFlags(executable: *mut Pointer, graph: Pointer, flags: c_ulonglong) ready().cuGraphInstantiateWithFlags(executable, graph, flags);
    cudaGraphInstantiate(executable: *mut Pointer, graph: Pointer, flags: c_ulonglong) ready().cuGraphInstantiateWithFlags(executable, graph, flags);
    cudaGraphExecDestroy(executable: Pointer) ready().cuGraphExecDestroy(executable);
    cudaGraphLaunch(executable: Pointer, stream: Pointer) ready().cuGraphLaunch(executable, stream);
    cudaGraphDebugDotPrint(graph: Pointer, path: *const c_char, flags: c_uint) ready().cuGraphDebugDotPrint(graph, path, flags);
}

/// Nodes are a list here, and not told apart.
#[unsafe(no_mangle)]
extern "C" fn cudaGraphNodeGetDependencies() -> u32 {
    run(|| Err(NOT_SUPPORTED))
}
