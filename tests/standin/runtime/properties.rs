//! `cudaDeviceProp`, whose fields differ between CUDA 12 and 13: written by a list of them.

use crate::driver::{Answer, INVALID, driver, version};
use crate::thread::run;
use std::ffi::{c_char, c_int, c_uint};

/// The fields in order: name, kind and, behind `@`, the CUDA version that alone has it. `i` is an
/// `int`, `u` a `size_t`, `c` a byte, with a count where there are several.
const FIELDS: &str = "
    name:c256 uuid:c16 luid:c8 luidDeviceNodeMask:i totalGlobalMem:u sharedMemPerBlock:u
    regsPerBlock:i warpSize:i memPitch:u maxThreadsPerBlock:i maxThreadsDim:i3 maxGridSize:i3
    clockRate:i@12 totalConstMem:u major:i minor:i textureAlignment:u texturePitchAlignment:u
    deviceOverlap:i@12 multiProcessorCount:i kernelExecTimeoutEnabled:i@12 integrated:i
    canMapHostMemory:i computeMode:i@12 maxTexture1D:i maxTexture1DMipmap:i maxTexture1DLinear:i@12
    maxTexture2D:i2 maxTexture2DMipmap:i2 maxTexture2DLinear:i3 maxTexture2DGather:i2
    maxTexture3D:i3 maxTexture3DAlt:i3 maxTextureCubemap:i maxTexture1DLayered:i2
    maxTexture2DLayered:i3 maxTextureCubemapLayered:i2 maxSurface1D:i maxSurface2D:i2
    maxSurface3D:i3 maxSurface1DLayered:i2 maxSurface2DLayered:i3 maxSurfaceCubemap:i
    maxSurfaceCubemapLayered:i2 surfaceAlignment:u concurrentKernels:i ECCEnabled:i pciBusID:i
    pciDeviceID:i pciDomainID:i tccDriver:i asyncEngineCount:i unifiedAddressing:i
    memoryClockRate:i@12 memoryBusWidth:i l2CacheSize:i persistingL2CacheMaxSize:i
    maxThreadsPerMultiProcessor:i streamPrioritiesSupported:i globalL1CacheSupported:i
    localL1CacheSupported:i sharedMemPerMultiprocessor:u regsPerMultiprocessor:i managedMemory:i
    isMultiGpuBoard:i multiGpuBoardGroupID:i hostNativeAtomicSupported:i
    singleToDoublePrecisionPerfRatio:i@12 pageableMemoryAccess:i concurrentManagedAccess:i
    computePreemptionSupported:i canUseHostPointerForRegisteredMem:i cooperativeLaunch:i
    cooperativeMultiDeviceLaunch:i@12 sharedMemPerBlockOptin:u
    pageableMemoryAccessUsesHostPageTables:i directManagedMemAccessFromHost:i
    maxBlocksPerMultiProcessor:i accessPolicyMaxWindowSize:i reservedSharedMemPerBlock:u
    hostRegisterSupported:i sparseCudaArraySupported:i hostRegisterReadOnlySupported:i
    timelineSemaphoreInteropSupported:i memoryPoolsSupported:i gpuDirectRDMASupported:i
    gpuDirectRDMAFlushWritesOptions:i gpuDirectRDMAWritesOrdering:i
    memoryPoolSupportedHandleTypes:i deferredMappingCudaArraySupported:i ipcEventSupported:i
    clusterLaunch:i unifiedFunctionPointers:i deviceNumaConfig:i@13 deviceNumaId:i@13 mpsEnabled:i@13
    hostNumaId:i@13 gpuPciDeviceID:i@13 gpuPciSubsystemID:i@13 hostNumaMultinodeIpcSupported:i@13
    reserved:i@13 reserved:i55@13 reserved:i63@12";

/// Fields that are one attribute of the driver (`CUdevice_attribute`), by its number.
const ATTRIBUTES: &[(&str, c_uint)] = &[
    ("sharedMemPerBlock", 8),
    ("regsPerBlock", 12),
    ("warpSize", 10),
    ("memPitch", 11),
    ("maxThreadsPerBlock", 1),
    ("clockRate", 13),
    ("totalConstMem", 9),
    ("major", 75),
    ("minor", 76),
    ("textureAlignment", 14),
    ("texturePitchAlignment", 51),
    ("multiProcessorCount", 16),
    ("canMapHostMemory", 19),
    ("concurrentKernels", 31),
    ("ECCEnabled", 32),
    ("pciBusID", 33),
    ("pciDeviceID", 34),
    ("pciDomainID", 50),
    ("asyncEngineCount", 40),
    ("unifiedAddressing", 41),
    ("memoryClockRate", 36),
    ("memoryBusWidth", 37),
    ("l2CacheSize", 38),
    ("maxThreadsPerMultiProcessor", 39),
    ("streamPrioritiesSupported", 78),
    ("globalL1CacheSupported", 79),
    ("localL1CacheSupported", 80),
    ("sharedMemPerMultiprocessor", 81),
    ("regsPerMultiprocessor", 82),
    ("managedMemory", 83),
    ("concurrentManagedAccess", 89),
    ("computePreemptionSupported", 90),
    ("canUseHostPointerForRegisteredMem", 91),
    ("cooperativeLaunch", 95),
    ("sharedMemPerBlockOptin", 97),
    ("maxBlocksPerMultiProcessor", 106),
    ("reservedSharedMemPerBlock", 111),
    ("hostRegisterSupported", 99),
    ("memoryPoolsSupported", 115),
];

/// The structure of this library's CUDA version, with every byte that is not set zero.
fn properties(device: c_int) -> Answer<Vec<u8>> {
    let driver = driver()?;
    let attribute = |number| {
        let mut value = 0;
        // SAFETY: the output is a local.
        unsafe { driver.cuDeviceGetAttribute(&mut value, number, device) }.map(|()| value)
    };
    let mut bytes = Vec::new();
    let major = version() / 1000;
    for field in FIELDS.split_whitespace() {
        let (field, only) = match field.split_once('@') {
            Some((field, only)) => (field, only.parse().ok()),
            None => (field, None),
        };
        if only.is_some_and(|only: c_int| only != major) {
            continue;
        }
        let Some((name, kind)) = field.split_once(':') else {
            continue;
        };
        let (kind, count) = kind.split_at(1);
        let count = count.parse().unwrap_or(1);
        let size = match kind {
            "c" => 1,
            "i" => 4,
            _ => 8,
        };
        let start = bytes.len().next_multiple_of(size);
        bytes.resize(start + size * count, 0);
        let place = &mut bytes[start..];
        match name {
            "name" => {
                // SAFETY: so many bytes may be written.
                unsafe { driver.cuDeviceGetName(place.as_mut_ptr().cast(), 256, device)? };
            }
            "uuid" => {
                // SAFETY: 16 bytes may be written.
                unsafe { driver.cuDeviceGetUuid(place.as_mut_ptr().cast(), device)? };
            }
            "totalGlobalMem" => {
                let mut total = 0_usize;
                // SAFETY: the output is a local.
                unsafe { driver.cuDeviceTotalMem(&mut total, device)? };
                place.copy_from_slice(&total.to_ne_bytes());
            }
            "maxThreadsDim" | "maxGridSize" => {
                let first = if name == "maxGridSize" { 5 } else { 2 };
                for (number, place) in (first..).zip(place.chunks_mut(4)) {
                    place.copy_from_slice(&attribute(number)?.to_ne_bytes());
                }
            }
            name => {
                if let Some((_, number)) = ATTRIBUTES.iter().find(|(known, _)| *known == name) {
                    let value = attribute(*number)?;
                    match size {
                        4 => place.copy_from_slice(&value.to_ne_bytes()),
                        _ => place.copy_from_slice(&(value as usize).to_ne_bytes()),
                    }
                }
            }
        }
    }
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    Ok(bytes)
}

/// # Safety
/// Room for the structure of this library's CUDA version.
unsafe fn give(to: *mut c_char, device: c_int) -> u32 {
    run(|| {
        if to.is_null() {
            return Err(INVALID);
        }
        let bytes = properties(device)?;
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), bytes.len()) };
        Ok(())
    })
}

/// CUDA 13's name.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDeviceProperties(to: *mut c_char, device: c_int) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { give(to, device) }
}

/// CUDA 12's name.
#[unsafe(no_mangle)]
unsafe extern "C" fn cudaGetDeviceProperties_v2(to: *mut c_char, device: c_int) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { give(to, device) }
}
