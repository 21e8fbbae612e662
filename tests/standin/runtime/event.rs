//! Events.

use crate::driver::Pointer;
use crate::thread::ready;
use std::ffi::c_uint;

runtime! {
    cudaEventCreate(event: *mut Pointer) ready().cuEventCreate(event, 0);
    cudaEventCreateWithFlags(event: *mut Pointer, flags: c_uint) ready().cuEventCreate(event, flags);
    cudaEventDestroy(event: Pointer) ready().cuEventDestroy(event);
    cudaEventElapsedTime(milliseconds: *mut f32, start: Pointer, end: Pointer) ready().cuEventElapsedTime(milliseconds, start, end);
    cudaEventQuery(event: Pointer) ready().cuEventQuery(event);
    cudaEventSynchronize(event: Pointer) ready().cuEventSynchronize(event);
}

stream_runtime! {
    cudaEventRecord[stream](event: Pointer, stream: Pointer) ready().cuEventRecordWithFlags(event, stream, 0);
    cudaEventRecordWithFlags[stream](event: Pointer, stream: Pointer, flags: c_uint) ready().cuEventRecordWithFlags(event, stream, flags);
}
