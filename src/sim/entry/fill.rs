//! The functions that set memory.

use super::work::enqueue;
use crate::call::call;
use crate::failure::Function;
use crate::run::Session;
use crate::state::DriverResult;
use crate::work::Work;
use cudarc::driver::sys::{CUdeviceptr, CUresult, CUstream};
use std::ffi::{c_uchar, c_uint, c_ushort};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Rows of words of `width` bytes, `pitch` bytes apart.
struct Rows {
    to: CUdeviceptr,
    pitch: usize,
    value: u32,
    width: u8,
    count: usize,
    rows: usize,
}

fn fill(
    session: &mut Session<'_>,
    function: Function,
    rows: Rows,
    stream: CUstream,
) -> DriverResult {
    let width = usize::from(rows.width);
    let bytes = rows.count.checked_mul(width).ok_or(INVALID)?;
    let aligned = rows.to.is_multiple_of(width as u64) && rows.pitch.is_multiple_of(width);
    if !aligned || (rows.rows > 1 && rows.pitch < bytes) {
        return Err(INVALID);
    }
    for row in 0..rows.rows {
        let work = Work::Fill {
            to: rows.to + (row * rows.pitch) as u64,
            value: rows.value,
            width: rows.width,
            count: rows.count as u64,
        };
        enqueue(session, function.name(), stream, work)?;
    }
    Ok(())
}

macro_rules! fills {
    ($($async:ident $legacy:ident $width:literal $kind:ty;)*) => {$(
        #[doc = concat!("Fills memory with words of ", $width, " bytes.")]
        pub unsafe extern "C" fn $async(
            address: CUdeviceptr,
            value: $kind,
            count: usize,
            stream: CUstream,
        ) -> u32 {
            call(Function::$async, |session| {
                let rows = Rows { to: address, pitch: 0, value: value.into(), width: $width, count, rows: 1 };
                fill(session, Function::$async, rows, stream)
            })
        }

        #[doc = concat!("Fills memory with words of ", $width, " bytes, on the legacy stream.")]
        pub unsafe extern "C" fn $legacy(address: CUdeviceptr, value: $kind, count: usize) -> u32 {
            call(Function::$legacy, |session| {
                let rows = Rows { to: address, pitch: 0, value: value.into(), width: $width, count, rows: 1 };
                fill(session, Function::$legacy, rows, std::ptr::null_mut())
            })
        }
    )*};
}

fills! {
    cuMemsetD8Async cuMemsetD8_v2 1 c_uchar;
    cuMemsetD16Async cuMemsetD16_v2 2 c_ushort;
    cuMemsetD32Async cuMemsetD32_v2 4 c_uint;
}

macro_rules! fills_of_rows {
    ($($async:ident $legacy:ident $width:literal $kind:ty;)*) => {$(
        #[doc = concat!("Fills rows of memory with words of ", $width, " bytes.")]
        pub unsafe extern "C" fn $async(
            address: CUdeviceptr,
            pitch: usize,
            value: $kind,
            count: usize,
            rows: usize,
            stream: CUstream,
        ) -> u32 {
            call(Function::$async, |session| {
                let rows = Rows { to: address, pitch, value: value.into(), width: $width, count, rows };
                fill(session, Function::$async, rows, stream)
            })
        }

        #[doc = concat!("Fills rows of memory with words of ", $width, " bytes, on the legacy stream.")]
        pub unsafe extern "C" fn $legacy(
            address: CUdeviceptr,
            pitch: usize,
            value: $kind,
            count: usize,
            rows: usize,
        ) -> u32 {
            call(Function::$legacy, |session| {
                let rows = Rows { to: address, pitch, value: value.into(), width: $width, count, rows };
                fill(session, Function::$legacy, rows, std::ptr::null_mut())
            })
        }
    )*};
}

fills_of_rows! {
    cuMemsetD2D8Async cuMemsetD2D8_v2 1 c_uchar;
    cuMemsetD2D16Async cuMemsetD2D16_v2 2 c_ushort;
    cuMemsetD2D32Async cuMemsetD2D32_v2 4 c_uint;
}
