//! Graphs.

use crate::driver::{Pointer, version};
use crate::thread::{ready, run};
use std::ffi::{c_char, c_uint, c_ulonglong};

runtime! {
    cudaGraphDestroy(graph: Pointer) ready().cuGraphDestroy(graph);
    cudaGraphGetNodes(graph: Pointer, nodes: *mut Pointer, count: *mut usize) ready().cuGraphGetNodes(graph, nodes, count);
    cudaGraphAddEmptyNode(node: *mut Pointer, graph: Pointer, dependencies: *const Pointer, count: usize) ready().cuGraphAddEmptyNode(node, graph, dependencies, count);
    cudaGraphNodeGetType(node: Pointer, kind: *mut c_uint) ready().cuGraphNodeGetType(node, kind);
    cudaGraphInstantiateWithFlags(executable: *mut Pointer, graph: Pointer, flags: c_ulonglong) ready().cuGraphInstantiateWithFlags(executable, graph, flags);
    cudaGraphInstantiate(executable: *mut Pointer, graph: Pointer, flags: c_ulonglong) ready().cuGraphInstantiateWithFlags(executable, graph, flags);
    cudaGraphExecDestroy(executable: Pointer) ready().cuGraphExecDestroy(executable);
    cudaGraphDebugDotPrint(graph: Pointer, path: *const c_char, flags: c_uint) ready().cuGraphDebugDotPrint(graph, path, flags);
}

stream_runtime! {
    cudaGraphLaunch[stream](executable: Pointer, stream: Pointer) ready().cuGraphLaunch(executable, stream);
}

/// CUDA 13 put `edges` before the count.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGraphNodeGetDependencies(
    node: Pointer,
    dependencies: *mut Pointer,
    third: Pointer,
    fourth: *mut usize,
) -> u32 {
    let (edges, count) = match version() >= 13000 {
        true => (third, fourth),
        false => (std::ptr::null_mut(), third.cast()),
    };
    run(|| {
        // SAFETY: the caller's promise; an argument that an older caller did not pass is not used.
        unsafe { ready()?.cuGraphNodeGetDependencies(node, dependencies, edges, count) }
    })
}

/// CUDA 13 put `edges` before the count.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamUpdateCaptureDependencies(
    stream: Pointer,
    dependencies: *mut Pointer,
    third: Pointer,
    fourth: usize,
    fifth: c_uint,
) -> u32 {
    let (edges, count, flags) = match version() >= 13000 {
        true => (third, fourth, fifth),
        false => (std::ptr::null_mut(), third as usize, fourth as c_uint),
    };
    run(|| {
        let driver = ready()?;
        // SAFETY: as above.
        unsafe {
            driver.cuStreamUpdateCaptureDependencies(stream, dependencies, edges, count, flags)
        }
    })
}
