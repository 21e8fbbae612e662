//! Errors: the last one of a thread, and what they are called.

use crate::thread::last_error;
use std::ffi::{CStr, c_char};

#[unsafe(no_mangle)]
extern "C" fn cudaGetLastError() -> u32 {
    last_error(false)
}

#[unsafe(no_mangle)]
extern "C" fn cudaPeekAtLastError() -> u32 {
    last_error(true)
}

macro_rules! errors {
    ($($number:literal $name:literal $text:literal;)*) => {
        fn described(status: u32) -> (&'static CStr, &'static CStr) {
            match status {
                $($number => ($name, $text),)*
                _ => (c"cudaErrorUnknown", c"unknown error"),
            }
        }
    };
}

errors! {
    0 c"cudaSuccess" c"no error";
    1 c"cudaErrorInvalidValue" c"invalid argument";
    2 c"cudaErrorMemoryAllocation" c"out of memory";
    3 c"cudaErrorInitializationError" c"initialization error";
    4 c"cudaErrorCudartUnloading" c"driver shutting down";
    35 c"cudaErrorInsufficientDriver" c"CUDA driver version is insufficient for CUDA runtime version";
    98 c"cudaErrorInvalidDeviceFunction" c"invalid device function";
    100 c"cudaErrorNoDevice" c"no CUDA-capable device is detected";
    101 c"cudaErrorInvalidDevice" c"invalid device ordinal";
    201 c"cudaErrorDeviceUninitialized" c"invalid device context";
    205 c"cudaErrorMapBufferObjectFailed" c"mapping of buffer object failed";
    217 c"cudaErrorPeerAccessUnsupported" c"peer access is not supported between these two devices";
    400 c"cudaErrorInvalidResourceHandle" c"invalid resource handle";
    500 c"cudaErrorSymbolNotFound" c"named symbol not found";
    600 c"cudaErrorNotReady" c"device not ready";
    700 c"cudaErrorIllegalAddress" c"an illegal memory access was encountered";
    704 c"cudaErrorPeerAccessAlreadyEnabled" c"peer access is already enabled";
    705 c"cudaErrorPeerAccessNotEnabled" c"peer access has not been enabled";
    709 c"cudaErrorContextIsDestroyed" c"context is destroyed";
    712 c"cudaErrorHostMemoryAlreadyRegistered" c"part or all of the requested memory range is already mapped";
    713 c"cudaErrorHostMemoryNotRegistered" c"pointer does not correspond to a registered memory region";
    719 c"cudaErrorLaunchFailure" c"unspecified launch failure";
    800 c"cudaErrorNotPermitted" c"operation not permitted";
    801 c"cudaErrorNotSupported" c"operation not supported";
    900 c"cudaErrorStreamCaptureUnsupported" c"operation not permitted when stream is capturing";
    901 c"cudaErrorStreamCaptureInvalidated" c"operation failed due to a previous error during capture";
    902 c"cudaErrorStreamCaptureMerge" c"operation would result in a merge of separate capture sequences";
    903 c"cudaErrorStreamCaptureUnmatched" c"capture was not ended in the same stream as it began";
    904 c"cudaErrorStreamCaptureUnjoined" c"capturing stream has unjoined work";
    905 c"cudaErrorStreamCaptureIsolation" c"dependency created on uncaptured work in another stream";
    906 c"cudaErrorStreamCaptureImplicit" c"operation would make the legacy stream depend on a capturing blocking stream";
    907 c"cudaErrorCapturedEvent" c"operation not permitted on an event last recorded in a capturing stream";
    908 c"cudaErrorStreamCaptureWrongThread" c"attempt to terminate a thread-local capture sequence from another thread";
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorName(status: u32) -> *const c_char {
    described(status).0.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn cudaGetErrorString(status: u32) -> *const c_char {
    described(status).1.as_ptr()
}
