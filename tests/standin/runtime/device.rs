//! Devices, and the runtime as a whole.

use crate::driver::{Answer, Driver, INVALID, NO_DEVICE, driver, version};
use crate::kernel;
use crate::thread::{choose, device, forget, primary, ready, run};
use std::ffi::{c_char, c_int, c_uint};

runtime! {
    cudaDriverGetVersion(to: *mut c_int) driver().cuDriverGetVersion(to);
    cudaDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) driver().cuDeviceGetAttribute(value, attribute, device);
    cudaDeviceGetP2PAttribute(value: *mut c_int, attribute: c_uint, device: c_int, peer: c_int) driver().cuDeviceGetP2PAttribute(value, attribute, device, peer);
    cudaDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) driver().cuDeviceCanAccessPeer(can, device, peer);
    cudaDeviceGetPCIBusId(text: *mut c_char, length: c_int, device: c_int) driver().cuDeviceGetPCIBusId(text, length, device);
    cudaDeviceGetByPCIBusId(device: *mut c_int, text: *const c_char) driver().cuDeviceGetByPCIBusId(device, text);
    cudaDeviceGetStreamPriorityRange(least: *mut c_int, most: *mut c_int) ready().cuCtxGetStreamPriorityRange(least, most);
    cudaDeviceGetLimit(value: *mut usize, limit: c_uint) ready().cuCtxGetLimit(value, limit);
    cudaDeviceSetLimit(limit: c_uint, value: usize) ready().cuCtxSetLimit(limit, value);
    cudaDeviceSynchronize() ready().cuCtxSynchronize();
    cudaDeviceEnablePeerAccess(peer: c_int, flags: c_uint) ready().enable_peer(peer, flags);
    cudaDeviceDisablePeerAccess(peer: c_int) ready().disable_peer(peer);
    cudaDeviceReset() ready().reset();
}

impl Driver {
    unsafe fn enable_peer(&self, peer: c_int, flags: c_uint) -> Answer {
        let peer = primary(self, peer)?;
        // SAFETY: a context that is held.
        unsafe { self.cuCtxEnablePeerAccess(peer, flags) }
    }

    unsafe fn disable_peer(&self, peer: c_int) -> Answer {
        let peer = primary(self, peer)?;
        // SAFETY: a context that is held.
        unsafe { self.cuCtxDisablePeerAccess(peer) }
    }

    unsafe fn reset(&self) -> Answer {
        let device = device()?;
        // SAFETY: no pointers.
        unsafe { self.cuDevicePrimaryCtxReset(device) }?;
        kernel::forget(device);
        forget(self, device)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDeviceCount(count: *mut c_int) -> u32 {
    run(|| {
        let driver = driver()?;
        // SAFETY: the caller's promise.
        match unsafe { driver.cuDeviceGetCount(count).map(|()| *count) }? {
            0 => Err(NO_DEVICE),
            _ => Ok(()),
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDevice(to: *mut c_int) -> u32 {
    run(|| {
        if to.is_null() {
            return Err(INVALID);
        }
        let device = device()?;
        // SAFETY: the caller's promise.
        unsafe { to.write(device) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudaSetDevice(device: c_int) -> u32 {
    run(|| choose(device))
}

#[unsafe(no_mangle)]
extern "C" fn cudaInitDevice(device: c_int, _device_flags: c_uint, _flags: c_uint) -> u32 {
    run(|| primary(driver()?, device).map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn cudaSetDeviceFlags(flags: c_uint) -> u32 {
    run(|| {
        let device = device()?;
        // SAFETY: no pointers.
        unsafe { driver()?.cuDevicePrimaryCtxSetFlags(device, flags) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDeviceFlags(flags: *mut c_uint) -> u32 {
    run(|| {
        let (device, mut active) = (device()?, 0);
        // SAFETY: the caller's promise, and a local.
        unsafe { driver()?.cuDevicePrimaryCtxGetState(device, flags, &mut active) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cudaRuntimeGetVersion(to: *mut c_int) -> u32 {
    run(|| {
        if to.is_null() {
            return Err(INVALID);
        }
        // SAFETY: the caller's promise.
        unsafe { to.write(version()) };
        Ok(())
    })
}

/// There is no profiler to start.
#[unsafe(no_mangle)]
extern "C" fn cudaProfilerStart() -> u32 {
    run(|| ready().map(drop))
}

#[unsafe(no_mangle)]
extern "C" fn cudaProfilerStop() -> u32 {
    run(|| ready().map(drop))
}
