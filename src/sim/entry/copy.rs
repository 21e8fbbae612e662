//! The functions that copy memory. An address itself tells whether it is host or device memory, as under
//! unified addressing.

use super::context::device_of;
use super::work::enqueue;
use crate::call::call;
use crate::failure::Function;
use crate::run::Session;
use crate::state::DriverResult;
use crate::work::Work;
use cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUDA_MEMCPY3D, CUcontext, CUdeviceptr, CUmemorytype, CUresult, CUstream,
};
use std::ffi::c_void;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// Enqueues a copy between two addresses, each on whichever side it lies; `between` are the devices
/// that reach them, where that is not the stream's.
///
/// # Safety
/// Host memory named by either address is good for so many bytes: what is not page-locked now, what
/// is until the copy is done.
unsafe fn transfer(
    session: &mut Session<'_>,
    function: Function,
    (to, from, bytes): (u64, u64, usize),
    between: Option<(usize, usize)>,
    stream: CUstream,
) -> DriverResult {
    if bytes == 0 {
        return Ok(());
    }
    if to == 0 || from == 0 {
        return Err(INVALID);
    }
    let slot = session.state.stream(function.name(), stream)?;
    let captured = session.state.streams.get(slot).capture.is_some();
    let memory = &session.state.memory;
    let length = bytes as u64;
    // A graph reads the host's memory at each launch, whatever that memory is.
    let locked = memory.locked_at(from).is_some() || captured;
    let work = match (memory.is_device(to), memory.is_device(from)) {
        (true, true) => Work::Copy {
            to,
            from,
            bytes: length,
            between,
        },
        (false, true) => Work::Read {
            to: to as usize,
            from,
            bytes: length,
        },
        // Page-locked memory is read when the copy's turn comes, other memory at once: the driver
        // stages it.
        (true, false) if locked => Work::Fetch {
            to,
            from: from as usize,
            bytes: length,
        },
        (true, false) => {
            // SAFETY: the caller's promise.
            let bytes = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) }.to_vec();
            Work::Write { to, bytes }
        }
        (false, false) => Work::Host {
            to: to as usize,
            from: from as usize,
            bytes: length,
        },
    };
    enqueue(session, function.name(), stream, work)
}

/// Waits for the stream, which the call has to do by what it promises.
fn wait(session: &mut Session<'_>, function: Function, stream: CUstream) -> DriverResult {
    let slot = session.state.stream(function.name(), stream)?;
    session.synchronise_stream(slot)
}

macro_rules! copies {
    ($($async:ident $now:ident ($to:ty, $from:ty) $sides:literal;)*) => {$(
        #[doc = concat!("Copies ", $sides, ".")]
        pub unsafe extern "C" fn $async(to: $to, from: $from, bytes: usize, stream: CUstream) -> u32 {
            call(Function::$async, |session| {
                // SAFETY: the module's contract.
                unsafe { transfer(session, Function::$async, (to as u64, from as u64, bytes), None, stream) }
            })
        }

        #[doc = concat!("Copies ", $sides, ", on the legacy stream, and waits.")]
        pub unsafe extern "C" fn $now(to: $to, from: $from, bytes: usize) -> u32 {
            call(Function::$now, |session| {
                let (function, stream) = (Function::$now, std::ptr::null_mut());
                session.state.outside_capture(function.name())?;
                // SAFETY: the module's contract.
                unsafe { transfer(session, function, (to as u64, from as u64, bytes), None, stream)? };
                wait(session, function, stream)
            })
        }
    )*};
}

copies! {
    cuMemcpyAsync cuMemcpy (CUdeviceptr, CUdeviceptr) "between any two places";
    cuMemcpyDtoDAsync_v2 cuMemcpyDtoD_v2 (CUdeviceptr, CUdeviceptr) "within device memory, of whichever devices";
    cuMemcpyDtoHAsync_v2 cuMemcpyDtoH_v2 (*mut c_void, CUdeviceptr) "to host memory, which is written when the copy's turn comes";
    cuMemcpyHtoDAsync_v2 cuMemcpyHtoD_v2 (CUdeviceptr, *const c_void) "from host memory, which is read at once unless it is page-locked";
}

/// Copies between the memories of two devices.
pub unsafe extern "C" fn cuMemcpyPeerAsync(
    to: CUdeviceptr,
    to_context: CUcontext,
    from: CUdeviceptr,
    from_context: CUcontext,
    bytes: usize,
    stream: CUstream,
) -> u32 {
    call(Function::cuMemcpyPeerAsync, |session| {
        // Each side is reached from its own context, whatever the stream's device reaches.
        let between = (
            device_of(session, to_context)?,
            device_of(session, from_context)?,
        );
        // SAFETY: the module's contract.
        unsafe {
            transfer(
                session,
                Function::cuMemcpyPeerAsync,
                (to, from, bytes),
                Some(between),
                stream,
            )
        }
    })
}

/// One side of a copy of rows: where a row starts.
#[derive(Clone, Copy)]
struct Side {
    start: u64,
    pitch: usize,
    plane: usize,
}

impl Side {
    /// # Errors
    /// For arrays, which this machine does not have.
    fn new(
        kind: CUmemorytype,
        (host, device): (*const c_void, CUdeviceptr),
        (x, y, z): (usize, usize, usize),
        pitch: usize,
        height: usize,
    ) -> DriverResult<Side> {
        let base = match kind {
            CUmemorytype::CU_MEMORYTYPE_HOST => host as u64,
            CUmemorytype::CU_MEMORYTYPE_DEVICE | CUmemorytype::CU_MEMORYTYPE_UNIFIED => device,
            CUmemorytype::CU_MEMORYTYPE_ARRAY => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        };
        let plane = pitch.checked_mul(height).ok_or(INVALID)?;
        Ok(Side {
            start: base + (x + y * pitch + z * plane) as u64,
            pitch,
            plane,
        })
    }

    fn row(&self, y: usize, z: usize) -> u64 {
        self.start + (y * self.pitch + z * self.plane) as u64
    }
}

/// # Safety
/// As [`transfer`], for every row.
unsafe fn transfer_rows(
    session: &mut Session<'_>,
    function: Function,
    (to, from): (Side, Side),
    (width, height, depth): (usize, usize, usize),
    stream: CUstream,
) -> DriverResult {
    let narrow = |side: Side| height > 1 && side.pitch < width;
    if narrow(to) || narrow(from) {
        return Err(INVALID);
    }
    for z in 0..depth {
        for y in 0..height {
            let range = (to.row(y, z), from.row(y, z), width);
            // SAFETY: the caller's promise.
            unsafe { transfer(session, function, range, None, stream)? };
        }
    }
    Ok(())
}

/// # Safety
/// As the driver asks of `cuMemcpy2D`'s callers.
unsafe fn transfer_2d(
    session: &mut Session<'_>,
    function: Function,
    what: *const CUDA_MEMCPY2D,
    stream: CUstream,
) -> DriverResult {
    // SAFETY: the caller's promise.
    let it = unsafe { what.as_ref() }.ok_or(INVALID)?;
    let to = Side::new(
        it.dstMemoryType,
        (it.dstHost, it.dstDevice),
        (it.dstXInBytes, it.dstY, 0),
        it.dstPitch,
        0,
    )?;
    let from = Side::new(
        it.srcMemoryType,
        (it.srcHost, it.srcDevice),
        (it.srcXInBytes, it.srcY, 0),
        it.srcPitch,
        0,
    )?;
    let extent = (it.WidthInBytes, it.Height, 1);
    // SAFETY: the caller's promise.
    unsafe { transfer_rows(session, function, (to, from), extent, stream) }
}

/// # Safety
/// As the driver asks of `cuMemcpy3D`'s callers.
unsafe fn transfer_3d(
    session: &mut Session<'_>,
    function: Function,
    what: *const CUDA_MEMCPY3D,
    stream: CUstream,
) -> DriverResult {
    // SAFETY: the caller's promise.
    let it = unsafe { what.as_ref() }.ok_or(INVALID)?;
    let to = Side::new(
        it.dstMemoryType,
        (it.dstHost, it.dstDevice),
        (it.dstXInBytes, it.dstY, it.dstZ),
        it.dstPitch,
        it.dstHeight,
    )?;
    let from = Side::new(
        it.srcMemoryType,
        (it.srcHost, it.srcDevice),
        (it.srcXInBytes, it.srcY, it.srcZ),
        it.srcPitch,
        it.srcHeight,
    )?;
    let extent = (it.WidthInBytes, it.Height, it.Depth);
    // SAFETY: the caller's promise.
    unsafe { transfer_rows(session, function, (to, from), extent, stream) }
}

macro_rules! copies_of_rows {
    ($($async:ident $now:ident $transfer:ident $kind:ty;)*) => {$(
        /// Copies rows of memory, between any two places.
        pub unsafe extern "C" fn $async(what: *const $kind, stream: CUstream) -> u32 {
            call(Function::$async, |session| {
                // SAFETY: the module's contract.
                unsafe { $transfer(session, Function::$async, what, stream) }
            })
        }

        /// Copies rows of memory, between any two places, on the legacy stream, and waits.
        pub unsafe extern "C" fn $now(what: *const $kind) -> u32 {
            call(Function::$now, |session| {
                let (function, stream) = (Function::$now, std::ptr::null_mut());
                session.state.outside_capture(function.name())?;
                // SAFETY: the module's contract.
                unsafe { $transfer(session, function, what, stream)? };
                wait(session, function, stream)
            })
        }
    )*};
}

copies_of_rows! {
    cuMemcpy2DAsync_v2 cuMemcpy2D_v2 transfer_2d CUDA_MEMCPY2D;
    cuMemcpy3DAsync_v2 cuMemcpy3D_v2 transfer_3d CUDA_MEMCPY3D;
}

/// Copies rows of memory, between any two places, on the legacy stream, and waits.
pub unsafe extern "C" fn cuMemcpy2DUnaligned_v2(what: *const CUDA_MEMCPY2D) -> u32 {
    call(Function::cuMemcpy2DUnaligned_v2, |session| {
        let (function, stream) = (Function::cuMemcpy2DUnaligned_v2, std::ptr::null_mut());
        session.state.outside_capture(function.name())?;
        // SAFETY: the module's contract.
        unsafe { transfer_2d(session, function, what, stream)? };
        wait(session, function, stream)
    })
}
