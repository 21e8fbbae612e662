//! Copies and fills of every shape, and host memory that the driver knows.

use super::*;
use cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUDA_MEMCPY3D, CUmemorytype, CUpointer_attribute, CUpointer_attribute_enum,
};

fn read(address: u64, bytes: usize) -> Vec<u8> {
    let mut there = vec![0; bytes];
    // SAFETY: so many bytes may be written, now.
    ok(unsafe { cuMemcpyDtoH_v2(there.as_mut_ptr().cast(), address, bytes) });
    there
}

fn write(address: u64, bytes: &[u8]) {
    // SAFETY: so many bytes may be read.
    ok(unsafe { cuMemcpyHtoD_v2(address, bytes.as_ptr().cast(), bytes.len()) });
}

fn locked(bytes: usize) -> *mut u8 {
    let mut address = null_mut();
    // SAFETY: writes a local.
    ok(unsafe { cuMemHostAlloc(&mut address, bytes, 0) });
    address.cast()
}

/// An attribute that is a number of four bytes.
fn attribute(which: CUpointer_attribute_enum, address: u64) -> Result<u32, u32> {
    let mut value = 0_u32;
    // SAFETY: writes a local of the attribute's size.
    match unsafe { cuPointerGetAttribute((&raw mut value).cast(), which, address) } {
        0 => Ok(value),
        status => Err(status),
    }
}

#[test]
fn fills_of_words_and_rows() {
    let _rig = Rig::new(Config::default());
    let address = alloc(4096);
    // SAFETY: device memory only.
    unsafe {
        ok(cuMemsetD8_v2(address, 1, 4096));
        ok(cuMemsetD16_v2(address + 2, 0x0302, 2));
        ok(cuMemsetD32_v2(address + 8, 0x0706_0504, 1));
        // Two rows of three bytes, eight apart.
        ok(cuMemsetD2D8_v2(address + 16, 8, 9, 3, 2));
        invalid(cuMemsetD16_v2(address + 1, 0, 1));
        invalid(cuMemsetD2D8_v2(address, 2, 9, 3, 2));
    }
    let expected = [
        [1, 1, 2, 3, 2, 3, 1, 1],
        [4, 5, 6, 7, 1, 1, 1, 1],
        [9, 9, 9, 1, 1, 1, 1, 1],
        [9, 9, 9, 1, 1, 1, 1, 1],
    ];
    assert_eq!(read(address, 32), expected.concat());
}

#[test]
fn copies_of_rows_and_planes() {
    let _rig = Rig::new(Config::default());
    let (address, host) = (alloc(4096), (0..64_u8).collect::<Vec<_>>());
    let mut flat = CUDA_MEMCPY2D {
        srcXInBytes: 2,
        srcY: 1,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: host.as_ptr().cast(),
        srcDevice: 0,
        srcArray: null_mut(),
        srcPitch: 8,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: null_mut(),
        dstDevice: address,
        dstArray: null_mut(),
        dstPitch: 16,
        WidthInBytes: 3,
        Height: 2,
    };
    // SAFETY: the source has eight rows of eight bytes.
    ok(unsafe { cuMemcpy2D_v2(&flat) });
    assert_eq!(read(address, 3), [10, 11, 12]);
    assert_eq!(read(address + 16, 3), [18, 19, 20]);
    flat.dstPitch = 2;
    // SAFETY: refused.
    invalid(unsafe { cuMemcpy2D_v2(&flat) });

    let deep = CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: host.as_ptr().cast(),
        srcDevice: 0,
        srcArray: null_mut(),
        reserved0: null_mut(),
        srcPitch: 4,
        srcHeight: 4,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 1,
        dstLOD: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: null_mut(),
        dstDevice: address,
        dstArray: null_mut(),
        reserved1: null_mut(),
        dstPitch: 4,
        dstHeight: 2,
        WidthInBytes: 4,
        Height: 2,
        Depth: 2,
    };
    // SAFETY: the source has four planes of four rows of four bytes.
    ok(unsafe { cuMemcpy3D_v2(&deep) });
    let planes = [0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23];
    assert_eq!(read(address + 8, 16), planes);
}

#[test]
fn copies_from_pinned_memory_are_asynchronous_and_from_pageable_memory_immediate() {
    let _rig = Rig::held();
    let (a, first, second) = (stream(), alloc(16), alloc(16));
    let (late, mut early) = (locked(16), [1_u8; 16]);
    // SAFETY: both have 16 bytes, and the locked ones stay.
    unsafe {
        late.write_bytes(1, 16);
        ok(cuMemcpyHtoDAsync_v2(first, late.cast(), 16, a));
        ok(cuMemcpyHtoDAsync_v2(second, early.as_ptr().cast(), 16, a));
        late.write_bytes(2, 16);
    }
    early.fill(2);
    ok(synchronise_stream(a));
    assert_eq!(
        (read(first, 16), read(second, 16)),
        (vec![2; 16], vec![1; 16])
    );
    assert_eq!(early, [2; 16]);
}

#[test]
fn pointer_attribute_of_host_and_device_addresses() {
    let _rig = Rig::new(Config::default());
    let (device, host, mut plain) = (alloc(64), locked(64), [7_u8; 64]);
    let plain_address = plain.as_mut_ptr() as u64;
    // SAFETY: all three have 64 bytes.
    unsafe {
        ok(cuMemcpy(host as u64, plain_address, 64));
        ok(cuMemcpy(device, host as u64, 64));
        plain.fill(0);
        ok(cuMemcpy(plain.as_mut_ptr() as u64, device, 64));
        invalid(cuMemcpy(0, device, 64));
    }
    assert_eq!(plain, [7; 64]);
}

#[test]
fn managed_memory_is_usable_on_host_and_device() {
    let rig = Rig::new(Config::default());
    let (mut address, before) = (0, rig.machine.used(0));
    // SAFETY: writes a local, and then memory that the host reaches.
    unsafe {
        ok(cuMemAllocManaged(&mut address, 4096, 1));
        ok(fill(address, 0x0101_0101, 4096, LEGACY));
        ok(synchronise());
        assert_eq!(*(address as *const u8).add(4095), 1);
        (address as *mut u8).write(5);
    }
    assert_eq!(read(address, 2), [5, 1]);
    let managed = attribute(
        CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        address,
    );
    assert_eq!(managed, Ok(1));
    assert_eq!(rig.machine.used(0), before + 4096);
    ok(free(address));
    assert_eq!(rig.machine.used(0), before);
}

#[test]
fn pointer_attributes() {
    use CUpointer_attribute::*;
    let _rig = Rig::new(Config::default());
    let (device, chunk, host, plain) = (alloc(1000), mapped(2 * CHUNK), locked(64), 5_u8);
    let kind = |address| attribute(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address);
    assert_eq!((kind(device + 999), kind(chunk + CHUNK)), (Ok(2), Ok(2)));
    assert_eq!(kind(host as u64 + 63), Ok(1));
    let unknown = CUresult::CUDA_ERROR_INVALID_VALUE as u32;
    assert_eq!(kind(&raw const plain as u64), Err(unknown));
    let legacy = |address| attribute(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address);
    assert_eq!((legacy(device), legacy(chunk)), (Ok(1), Ok(0)));
    let (mut start, mut size) = (0, 0);
    // SAFETY: outputs are locals.
    ok(unsafe { cuMemGetAddressRange_v2(&mut start, &mut size, chunk + 5) });
    assert_eq!((start, size as u64), (chunk, 2 * CHUNK));
    // An allocation at a former one's address is another.
    let id = |address| {
        let mut id = 0_u64;
        // SAFETY: writes a local of the attribute's size.
        ok(unsafe {
            cuPointerGetAttribute(
                (&raw mut id).cast(),
                CU_POINTER_ATTRIBUTE_BUFFER_ID,
                address,
            )
        });
        id
    };
    let former = id(device);
    ok(free(device));
    assert_ne!(id(alloc(1000)), former);
}

#[test]
fn host_memory_is_registered_once() {
    let _rig = Rig::new(Config::default());
    let mut mine = vec![0_u8; 8192];
    let address = mine.as_mut_ptr();
    // SAFETY: memory that stays until the end of the test.
    unsafe {
        ok(cuMemHostRegister_v2(address.cast(), 8192, 0));
        let overlapping = cuMemHostRegister_v2(address.add(100).cast(), 10, 0);
        status(
            overlapping,
            CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
        );
        // It is the program's own.
        invalid(cuMemFreeHost(address.cast()));
        ok(cuMemHostUnregister(address.cast()));
        let again = cuMemHostUnregister(address.cast());
        status(again, CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
        let locked = locked(100);
        status(
            cuMemHostUnregister(locked.cast()),
            CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
        );
        ok(cuMemFreeHost(locked.cast()));
        invalid(cuMemFreeHost(locked.cast()));
    }
}

#[test]
fn copies_between_devices_and_their_contexts() {
    let _rig = Rig::new(Config {
        devices: 2,
        ..Config::default()
    });
    let here = mapped(CHUNK);
    write(here, &[3; 64]);
    let mut contexts = [null_mut(); 2];
    // SAFETY: outputs are locals.
    let there = unsafe {
        ok(cuCtxGetCurrent(&mut contexts[0]));
        ok(cuDevicePrimaryCtxRetain(&mut contexts[1], 1));
        let (address, handle) = (reserve(CHUNK), {
            let mut handle = 0;
            ok(cuMemCreate(&mut handle, CHUNK as usize, &properties(1), 0));
            handle
        });
        ok(map(address, CHUNK, handle));
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        ok(access(address, CHUNK, 1, flags));
        address
    };
    // SAFETY: device memory only.
    unsafe {
        ok(cuMemcpyPeerAsync(
            there,
            contexts[1],
            here,
            contexts[0],
            64,
            LEGACY,
        ));
        ok(synchronise());
        ok(cuCtxSetCurrent(contexts[1]));
    }
    assert_eq!(read(there, 64), [3; 64]);
}
