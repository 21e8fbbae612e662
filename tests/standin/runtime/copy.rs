//! Copies and fills. The direction that a program gives is not needed: addresses tell.

use crate::driver::{Address, Answer, Driver, INVALID, NOT_SUPPORTED, Pointer};
use crate::kernel::variable;
use crate::memory::Extent;
use crate::thread::{OWN, primary, ready, run};
use std::ffi::{c_int, c_uint, c_void};

/// `cudaMemcpyDefault`, the last of the directions.
const DIRECTIONS: c_uint = 4;

runtime! {
    cudaMemcpy(to: Address, from: Address, bytes: usize, direction: c_uint) ready().copy(to, from, bytes, direction);
    cudaMemcpyPeer(to: Address, device: c_int, from: Address, peer: c_int, bytes: usize) ready().copy_peer_now(to, device, from, peer, bytes);
    cudaMemcpy2D(to: Address, to_pitch: usize, from: Address, from_pitch: usize, width: usize, height: usize, direction: c_uint) ready().copy_rows_now(to, to_pitch, from, from_pitch, width, height, direction, std::ptr::null_mut());
    cudaMemset(address: Address, value: c_int, bytes: usize) ready().cuMemsetD8Async(address, value as u8, bytes, std::ptr::null_mut());
    cudaMemset2D(address: Address, pitch: usize, value: c_int, width: usize, height: usize) ready().cuMemsetD2D8Async(address, pitch, value as u8, width, height, std::ptr::null_mut());
}

stream_runtime! {
    cudaMemcpyAsync[stream](to: Address, from: Address, bytes: usize, direction: c_uint, stream: Pointer) ready().copy_async(to, from, bytes, direction, stream);
    cudaMemcpyPeerAsync[stream](to: Address, device: c_int, from: Address, peer: c_int, bytes: usize, stream: Pointer) ready().copy_peer(to, device, from, peer, bytes, stream);
    cudaMemcpy2DAsync[stream](to: Address, to_pitch: usize, from: Address, from_pitch: usize, width: usize, height: usize, direction: c_uint, stream: Pointer) ready().copy_rows(to, to_pitch, from, from_pitch, width, height, direction, stream);
    cudaMemsetAsync[stream](address: Address, value: c_int, bytes: usize, stream: Pointer) ready().cuMemsetD8Async(address, value as u8, bytes, stream);
    cudaMemset2DAsync[stream](address: Address, pitch: usize, value: c_int, width: usize, height: usize, stream: Pointer) ready().cuMemsetD2D8Async(address, pitch, value as u8, width, height, stream);
}

runtime! {
    cudaMemcpy_ptds(to: Address, from: Address, bytes: usize, direction: c_uint) ready().copy_own(to, from, bytes, direction);
    cudaMemcpy2D_ptds(to: Address, to_pitch: usize, from: Address, from_pitch: usize, width: usize, height: usize, direction: c_uint) ready().copy_rows_now(to, to_pitch, from, from_pitch, width, height, direction, OWN);
    cudaMemset_ptds(address: Address, value: c_int, bytes: usize) ready().cuMemsetD8Async(address, value as u8, bytes, OWN);
    cudaMemset2D_ptds(address: Address, pitch: usize, value: c_int, width: usize, height: usize) ready().cuMemsetD2D8Async(address, pitch, value as u8, width, height, OWN);
}

impl Driver {
    unsafe fn copy(&self, to: Address, from: Address, bytes: usize, direction: c_uint) -> Answer {
        if direction > DIRECTIONS {
            return Err(21);
        }
        // SAFETY: the caller's promise.
        unsafe { self.cuMemcpy(to, from, bytes) }
    }

    unsafe fn copy_async(
        &self,
        to: Address,
        from: Address,
        bytes: usize,
        direction: c_uint,
        stream: Pointer,
    ) -> Answer {
        if direction > DIRECTIONS {
            return Err(21);
        }
        // SAFETY: the caller's promise.
        unsafe { self.cuMemcpyAsync(to, from, bytes, stream) }
    }

    unsafe fn copy_own(
        &self,
        to: Address,
        from: Address,
        bytes: usize,
        direction: c_uint,
    ) -> Answer {
        // SAFETY: the caller's promise.
        unsafe {
            self.copy_async(to, from, bytes, direction, OWN)?;
            self.cuStreamSynchronize(OWN)
        }
    }

    unsafe fn copy_peer(
        &self,
        to: Address,
        device: c_int,
        from: Address,
        peer: c_int,
        bytes: usize,
        stream: Pointer,
    ) -> Answer {
        let (device, peer) = (primary(self, device)?, primary(self, peer)?);
        // SAFETY: the caller's promise.
        unsafe { self.cuMemcpyPeerAsync(to, device, from, peer, bytes, stream) }
    }

    unsafe fn copy_peer_now(
        &self,
        to: Address,
        device: c_int,
        from: Address,
        peer: c_int,
        bytes: usize,
    ) -> Answer {
        let stream = std::ptr::null_mut();
        // SAFETY: the caller's promise.
        unsafe {
            self.copy_peer(to, device, from, peer, bytes, stream)?;
            self.cuStreamSynchronize(stream)
        }
    }

    unsafe fn copy_rows(
        &self,
        to: Address,
        to_pitch: usize,
        from: Address,
        from_pitch: usize,
        width: usize,
        height: usize,
        direction: c_uint,
        stream: Pointer,
    ) -> Answer {
        if width > to_pitch || width > from_pitch {
            return Err(12);
        }
        for row in 0..height {
            let (to, from) = (
                to + (row * to_pitch) as u64,
                from + (row * from_pitch) as u64,
            );
            // SAFETY: the caller's promise.
            unsafe { self.copy_async(to, from, width, direction, stream)? };
        }
        Ok(())
    }

    unsafe fn copy_rows_now(
        &self,
        to: Address,
        to_pitch: usize,
        from: Address,
        from_pitch: usize,
        width: usize,
        height: usize,
        direction: c_uint,
        stream: Pointer,
    ) -> Answer {
        // SAFETY: the caller's promise.
        unsafe {
            self.copy_rows(
                to, to_pitch, from, from_pitch, width, height, direction, stream,
            )?;
            self.cuStreamSynchronize(stream)
        }
    }
}

/// `cudaPitchedPtr` within `cudaMemcpy3DParms`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Pitched {
    address: Address,
    pitch: usize,
    width: usize,
    height: usize,
}

/// `cudaMemcpy3DParms`; extents and positions count bytes where no array takes part.
#[derive(Clone, Copy)]
#[repr(C)]
struct Copy3D {
    from_array: Pointer,
    from_at: Extent,
    from: Pitched,
    to_array: Pointer,
    to_at: Extent,
    to: Pitched,
    extent: Extent,
    direction: c_uint,
}

/// Copies planes of rows.
///
/// # Safety
/// As the runtime asks of `cudaMemcpy3D`'s callers.
unsafe fn copy_3d(driver: &Driver, what: *const Copy3D, stream: Pointer) -> Answer {
    // SAFETY: the caller's promise.
    let it = unsafe { what.as_ref() }.ok_or(INVALID)?;
    if !it.from_array.is_null() || !it.to_array.is_null() {
        return Err(NOT_SUPPORTED);
    }
    let row = |side: &Pitched, at: &Extent, y: usize, z: usize| {
        let line = (at.depth + z) * side.height + at.height + y;
        side.address + (line * side.pitch + at.width) as u64
    };
    for z in 0..it.extent.depth {
        for y in 0..it.extent.height {
            let (to, from) = (
                row(&it.to, &it.to_at, y, z),
                row(&it.from, &it.from_at, y, z),
            );
            // SAFETY: the caller's promise.
            unsafe { driver.copy_async(to, from, it.extent.width, it.direction, stream)? };
        }
    }
    Ok(())
}

stream_runtime! {
    cudaMemcpy3DAsync[stream](what: *const Copy3D, stream: Pointer) ready().copy_3d(what, stream);
}

runtime! {
    cudaMemcpy3D(what: *const Copy3D) ready().copy_3d_now(what, std::ptr::null_mut());
    cudaMemcpy3D_ptds(what: *const Copy3D) ready().copy_3d_now(what, OWN);
}

impl Driver {
    unsafe fn copy_3d(&self, what: *const Copy3D, stream: Pointer) -> Answer {
        // SAFETY: the caller's promise.
        unsafe { copy_3d(self, what, stream) }
    }

    unsafe fn copy_3d_now(&self, what: *const Copy3D, stream: Pointer) -> Answer {
        // SAFETY: the caller's promise.
        unsafe {
            copy_3d(self, what, stream)?;
            self.cuStreamSynchronize(stream)
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemcpyToSymbol(
    symbol: *const c_void,
    from: Address,
    bytes: usize,
    offset: usize,
    direction: c_uint,
) -> u32 {
    run(|| {
        let driver = ready()?;
        let (address, size) = variable(driver, symbol)?;
        if offset > size || bytes > size - offset {
            return Err(INVALID);
        }
        // SAFETY: the caller's promise; the variable has so many bytes.
        unsafe { driver.copy(address + offset as u64, from, bytes, direction) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaMemcpyFromSymbol(
    to: Address,
    symbol: *const c_void,
    bytes: usize,
    offset: usize,
    direction: c_uint,
) -> u32 {
    run(|| {
        let driver = ready()?;
        let (address, size) = variable(driver, symbol)?;
        if offset > size || bytes > size - offset {
            return Err(INVALID);
        }
        // SAFETY: the caller's promise; the variable has so many bytes.
        unsafe { driver.copy(to, address + offset as u64, bytes, direction) }
    })
}
