//! Graphs.

use crate::driver::{Pointer, version};
use crate::thread::{ready, run};
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::ptr;

runtime! {
    cudaGraphDestroy(graph: Pointer) ready().cuGraphDestroy(graph);
    cudaGraphGetNodes(graph: Pointer, nodes: *mut Pointer, count: *mut usize) ready().cuGraphGetNodes(graph, nodes, count);
    cudaGraphAddEmptyNode(node: *mut Pointer, graph: Pointer, dependencies: *const Pointer, count: usize) ready().cuGraphAddEmptyNode(node, graph, dependencies, count);
    cudaGraphNodeGetType(node: Pointer, kind: *mut c_uint) ready().cuGraphNodeGetType(node, kind);
    cudaGraphInstantiateWithFlags(executable: *mut Pointer, graph: Pointer, flags: c_ulonglong) ready().cuGraphInstantiateWithFlags(executable, graph, flags);
    cudaGraphInstantiate(executable: *mut Pointer, graph: Pointer, flags: c_ulonglong) ready().cuGraphInstantiateWithFlags(executable, graph, flags);
    cudaGraphExecDestroy(executable: Pointer) ready().cuGraphExecDestroy(executable);
    cudaGraphConditionalHandleCreate(handle: *mut c_ulonglong, graph: Pointer, default: c_uint, flags: c_uint) ready().cuGraphConditionalHandleCreate(handle, graph, ptr::null_mut(), default, flags);
    cudaGraphRetainUserObject(graph: Pointer, object: Pointer, count: c_uint, flags: c_uint) ready().cuGraphRetainUserObject(graph, object, count, flags);
    cudaUserObjectCreate(object: *mut Pointer, data: Pointer, destroy: Pointer, count: c_uint, flags: c_uint) ready().cuUserObjectCreate(object, data, destroy, count, flags);
    cudaUserObjectRelease(object: Pointer, count: c_uint) ready().cuUserObjectRelease(object, count);
    cudaDeviceGetGraphMemAttribute(device: c_int, attribute: c_uint, value: Pointer) ready().cuDeviceGetGraphMemAttribute(device, attribute, value);
    cudaDeviceSetGraphMemAttribute(device: c_int, attribute: c_uint, value: Pointer) ready().cuDeviceSetGraphMemAttribute(device, attribute, value);
    cudaGraphDebugDotPrint(graph: Pointer, path: *const c_char, flags: c_uint) ready().cuGraphDebugDotPrint(graph, path, flags);
}

stream_runtime! {
    cudaGraphLaunch[stream](executable: Pointer, stream: Pointer) ready().cuGraphLaunch(executable, stream);
    cudaStreamBeginCaptureToGraph[stream](stream: Pointer, graph: Pointer, dependencies: *const Pointer, edges: *const c_void, count: usize, mode: c_uint) ready().cuStreamBeginCaptureToGraph(stream, graph, dependencies, edges, count, mode);
}

/// CUDA 13 put `edges` before the count.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGraphAddNode(
    node: *mut Pointer,
    graph: Pointer,
    dependencies: *const Pointer,
    fourth: Pointer,
    fifth: Pointer,
    sixth: Pointer,
) -> u32 {
    let (edges, count, parameters) = match version() >= 13000 {
        true => (fourth, fifth as usize, sixth),
        false => (ptr::null_mut(), fourth as usize, fifth),
    };
    run(|| {
        let driver = ready()?;
        // SAFETY: the caller's promise; an argument that an older caller did not pass is not used.
        unsafe { driver.cuGraphAddNode(node, graph, dependencies, edges, count, parameters) }
    })
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
        false => (ptr::null_mut(), third.cast()),
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
        false => (ptr::null_mut(), third as usize, fourth as c_uint),
    };
    run(|| {
        let driver = ready()?;
        // SAFETY: as above.
        unsafe {
            driver.cuStreamUpdateCaptureDependencies(stream, dependencies, edges, count, flags)
        }
    })
}
