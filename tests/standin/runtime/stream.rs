//! Streams.

use crate::driver::{Answer, Pointer, version};
use crate::thread::ready;
use std::ffi::{c_int, c_uint, c_ulonglong};

runtime! {
    cudaStreamCreate(stream: *mut Pointer) ready().cuStreamCreateWithPriority(stream, 0, 0);
    cudaStreamCreateWithFlags(stream: *mut Pointer, flags: c_uint) ready().cuStreamCreateWithPriority(stream, flags, 0);
    cudaStreamCreateWithPriority(stream: *mut Pointer, flags: c_uint, priority: c_int) ready().cuStreamCreateWithPriority(stream, flags, priority);
    cudaStreamDestroy(stream: Pointer) ready().cuStreamDestroy(stream);
    cudaThreadExchangeStreamCaptureMode(mode: *mut c_uint) ready().cuThreadExchangeStreamCaptureMode(mode);
}

stream_runtime! {
    cudaStreamGetPriority[stream](stream: Pointer, priority: *mut c_int) ready().cuStreamGetPriority(stream, priority);
    cudaStreamGetFlags[stream](stream: Pointer, flags: *mut c_uint) ready().cuStreamGetFlags(stream, flags);
    cudaStreamGetId[stream](stream: Pointer, id: *mut c_ulonglong) ready().cuStreamGetId(stream, id);
    cudaStreamGetDevice[stream](stream: Pointer, device: *mut c_int) ready().cuStreamGetDevice(stream, device);
    cudaStreamQuery[stream](stream: Pointer) ready().cuStreamQuery(stream);
    cudaStreamSynchronize[stream](stream: Pointer) ready().cuStreamSynchronize(stream);
    cudaStreamWaitEvent[stream](stream: Pointer, event: Pointer, flags: c_uint) ready().cuStreamWaitEvent(stream, event, flags);
    cudaStreamAddCallback[stream](stream: Pointer, function: Pointer, argument: Pointer, flags: c_uint) ready().cuStreamAddCallback(stream, function, argument, flags);
    cudaLaunchHostFunc[stream](stream: Pointer, function: Pointer, argument: Pointer) ready().cuLaunchHostFunc(stream, function, argument);
    cudaStreamIsCapturing[stream](stream: Pointer, status: *mut c_uint) ready().cuStreamIsCapturing(stream, status);
    cudaStreamBeginCapture[stream](stream: Pointer, mode: c_uint) ready().cuStreamBeginCapture(stream, mode);
    cudaStreamEndCapture[stream](stream: Pointer, graph: *mut Pointer) ready().cuStreamEndCapture(stream, graph);
}

stream_runtime! {
    cudaStreamGetCaptureInfo_v2[stream](stream: Pointer, status: *mut c_uint, id: *mut c_ulonglong, graph: *mut Pointer, dependencies: *mut *const Pointer, count: *mut usize)
        ready().cuStreamGetCaptureInfo(stream, status, id, graph, dependencies, std::ptr::null_mut(), count);
    cudaStreamGetCaptureInfo_v3[stream](stream: Pointer, status: *mut c_uint, id: *mut c_ulonglong, graph: *mut Pointer, dependencies: *mut *const Pointer, edges: *mut Pointer, count: *mut usize)
        ready().cuStreamGetCaptureInfo(stream, status, id, graph, dependencies, edges, count);
}

/// CUDA 13 gave the plain name the arguments of `_v3`; before, there were the first three.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaStreamGetCaptureInfo(
    stream: Pointer,
    status: *mut c_uint,
    id: *mut c_ulonglong,
    graph: *mut Pointer,
    dependencies: *mut *const Pointer,
    edges: *mut Pointer,
    count: *mut usize,
) -> u32 {
    let null: *mut Pointer = std::ptr::null_mut();
    let all = version() >= 13000;
    let (graph, dependencies, edges, count) = match all {
        true => (graph, dependencies, edges, count),
        false => (null, std::ptr::null_mut(), null, std::ptr::null_mut()),
    };
    crate::thread::run(|| -> Answer {
        let driver = ready()?;
        // SAFETY: the caller's promise; arguments that an older caller did not pass are not used.
        unsafe {
            driver.cuStreamGetCaptureInfo(stream, status, id, graph, dependencies, edges, count)
        }
    })
}
