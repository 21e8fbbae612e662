//! Mappings: chunks, reservations and mappings of the virtual memory management calls.

use super::*;
use CUmemAccess_flags::*;

#[test]
fn mapping_keeps_a_released_chunk_alive() {
    let rig = Rig::new(Config::default());
    let machine = &rig.machine;
    let (address, handle) = (reserve(4 * CHUNK), create(CHUNK));
    ok(map(address, CHUNK, handle));
    ok(map(address + CHUNK, CHUNK, handle));
    assert_eq!(
        (machine.used(0), machine.mappings(), machine.handles()),
        (CHUNK, 2, 1)
    );
    release(handle);
    assert_eq!((machine.used(0), machine.handles()), (CHUNK, 0));
    ok(unmap(address, CHUNK));
    assert_eq!(machine.used(0), CHUNK);
    ok(unmap(address + CHUNK, CHUNK));
    assert_eq!((machine.used(0), machine.mappings()), (0, 0));
    assert_eq!(machine.reserved_addresses(), 4 * CHUNK);
    // SAFETY: nothing is mapped there.
    ok(unsafe { cuMemAddressFree(address, 4 * CHUNK as usize) });
    assert_eq!(machine.reserved_addresses(), 0);
    // Unmapped first, then released.
    let (address, handle) = (reserve(CHUNK), create(CHUNK));
    ok(map(address, CHUNK, handle));
    ok(unmap(address, CHUNK));
    assert_eq!(machine.used(0), CHUNK);
    release(handle);
    assert_eq!(machine.used(0), 0);
    // SAFETY: a number.
    invalid(unsafe { cuMemRelease(handle) });
    rig.one_violation("released or never created");
    invalid(map(address, CHUNK, handle));
    rig.one_violation("released or never created");
}

#[test]
fn mapping_takes_whole_chunks_at_free_aligned_addresses() {
    let _rig = Rig::new(Config::default());
    let (address, handle) = (reserve(4 * CHUNK), create(2 * CHUNK));
    invalid(map(address, CHUNK, handle));
    invalid(map(address + 4096, 2 * CHUNK, handle));
    invalid(map(address + 3 * CHUNK, 2 * CHUNK, handle));
    invalid(map(address - CHUNK, 2 * CHUNK, handle));
    // SAFETY: numbers only.
    unsafe {
        invalid(cuMemMap(address, CHUNK as usize, CHUNK as usize, handle, 0));
        invalid(cuMemMap(address, 2 * CHUNK as usize, 0, handle, 1));
    }
    ok(map(address + CHUNK, 2 * CHUNK, handle));
    invalid(map(address, 2 * CHUNK, handle));
    invalid(map(address + 2 * CHUNK, 2 * CHUNK, handle));
    let plain = alloc(4 * CHUNK);
    invalid(map(plain.next_multiple_of(CHUNK), CHUNK, create(CHUNK)));
}

#[test]
fn mapping_is_unmapped_as_a_whole() {
    let rig = Rig::new(Config::default());
    let address = reserve(8 * CHUNK);
    for (place, size) in [(0, 1), (1, 2), (3, 1), (5, 1)] {
        ok(map(
            address + place * CHUNK,
            size * CHUNK,
            create(size * CHUNK),
        ));
    }
    invalid(unmap(address + CHUNK, CHUNK));
    invalid(unmap(address, 2 * CHUNK));
    invalid(unmap(address + 2 * CHUNK, CHUNK));
    invalid(unmap(address, 6 * CHUNK));
    invalid(unmap(address + 4 * CHUNK, CHUNK));
    invalid(unmap(address, 0));
    // SAFETY: refused.
    unsafe {
        invalid(cuMemAddressFree(address, 8 * CHUNK as usize));
    }
    assert_eq!(rig.machine.mappings(), 4);
    ok(unmap(address, 4 * CHUNK));
    ok(unmap(address + 5 * CHUNK, CHUNK));
    // SAFETY: nothing is mapped any more; the first two are refused.
    unsafe {
        invalid(cuMemAddressFree(address, CHUNK as usize));
        invalid(cuMemAddressFree(address + CHUNK, 7 * CHUNK as usize));
        ok(cuMemAddressFree(address, 8 * CHUNK as usize));
    }
}

#[test]
fn mapping_addresses_are_finite() {
    let rig = Rig::new(Config {
        addresses: 8 * CHUNK,
        ..Config::default()
    });
    let first = reserve(6 * CHUNK);
    let mut more = 0;
    // SAFETY: outputs are locals.
    unsafe {
        status(
            cuMemAddressReserve(&mut more, 3 * CHUNK as usize, 0, 0, 0),
            CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        );
        ok(cuMemAddressReserve(&mut more, 2 * CHUNK as usize, 0, 0, 0));
        ok(cuMemAddressFree(first, 6 * CHUNK as usize));
        ok(cuMemAddressFree(more, 2 * CHUNK as usize));
    }
    assert_eq!(rig.machine.reserved_addresses(), 0);
}

#[test]
fn mapping_sizes_and_devices_are_checked() {
    let _rig = Rig::new(Config {
        devices: 2,
        ..Config::default()
    });
    invalid(try_create(0, 0));
    invalid(try_create(0, CHUNK + 4096));
    status(try_create(2, CHUNK), CUresult::CUDA_ERROR_INVALID_DEVICE);
    ok(try_create(1, CHUNK));
    let mut address = 0;
    // SAFETY: outputs are locals.
    unsafe {
        invalid(cuMemAddressReserve(&mut address, 0, 0, 0, 0));
        invalid(cuMemAddressReserve(&mut address, 4096, 0, 0, 0));
        invalid(cuMemAddressReserve(
            &mut address,
            CHUNK as usize,
            3 << 20,
            0,
            0,
        ));
        ok(cuMemAddressReserve(
            &mut address,
            CHUNK as usize,
            1 << 30,
            0,
            0,
        ));
        assert_eq!(address % (1 << 30), 0);
        ok(cuMemAddressFree(address, CHUNK as usize));
        let wanted = address;
        ok(cuMemAddressReserve(
            &mut address,
            CHUNK as usize,
            0,
            wanted,
            0,
        ));
        assert_eq!(address, wanted);
        ok(cuMemAddressReserve(
            &mut address,
            CHUNK as usize,
            0,
            wanted,
            0,
        ));
        assert_ne!(address, wanted);
    }
}

#[test]
fn mapping_needs_set_access() {
    let rig = Rig::new(Config::default());
    let address = reserve(2 * CHUNK);
    ok(map(address, CHUNK, create(CHUNK)));
    ok(map(address + CHUNK, CHUNK, create(CHUNK)));
    invalid(open(address, CHUNK / 2));
    invalid(open(address + CHUNK, 2 * CHUNK));
    ok(open(address, 2 * CHUNK));
    ok(fill(address, 5, 2 * CHUNK, LEGACY));
    ok(access(address, CHUNK, 0, CU_MEM_ACCESS_FLAGS_PROT_READ));
    assert_eq!(word(address, LEGACY), 5);
    ok(access(
        address + CHUNK,
        CHUNK,
        0,
        CU_MEM_ACCESS_FLAGS_PROT_NONE,
    ));
    ok(fill(address + CHUNK, 5, 4, LEGACY));
    rig.one_violation("touched unmapped memory");
}

#[test]
fn mapping_fault_is_sticky() {
    let rig = Rig::new(Config::default());
    let address = reserve(CHUNK);
    ok(map(address, CHUNK, create(CHUNK)));
    let (event, counter) = (recorded(LEGACY), counter());
    ok(fill(address, 1, 4, LEGACY));
    rig.one_violation(&format!("touched unmapped memory at {address:#x}"));
    let fault = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
    status(synchronise(), fault);
    status(synchronise_stream(LEGACY), fault);
    status(query(event), fault);
    // SAFETY: a handle.
    status(unsafe { cuEventSynchronize(event) }, fault);
    status(count_up(LEGACY, counter), fault);
    ok(unmap(address, CHUNK));
}

#[test]
fn mapping_is_translated_when_work_runs() {
    let rig = Rig::held();
    rig.machine.unclaimed_ok(true);
    let (address, handle) = (reserve(CHUNK), create(CHUNK));
    ok(map(address, CHUNK, handle));
    ok(open(address, CHUNK));
    ok(fill(address, 1, CHUNK, LEGACY));
    ok(unmap(address, CHUNK));
    status(synchronise(), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    let violations = rig.machine.violations();
    assert!(
        violations[0].contains("unmap overtakes running work"),
        "{violations:?}"
    );
    assert!(
        violations[1].contains("touched unmapped memory"),
        "{violations:?}"
    );
    assert_eq!(violations.len(), 2);
}

#[test]
fn mapping_alias_shows_the_same_bytes() {
    for host_pointers in [false, true] {
        let _rig = Rig::new(Config {
            host_pointers,
            ..Config::default()
        });
        let (address, other, handle) = (reserve(CHUNK), reserve(CHUNK), create(CHUNK));
        for at in [address, other] {
            ok(map(at, CHUNK, handle));
            ok(open(at, CHUNK));
        }
        ok(fill(address + 4096, 77, 4096, LEGACY));
        assert_eq!(word(other + 4096, LEGACY), 77);
        ok(synchronise());
        if host_pointers {
            // SAFETY: real mappings, and no work is pending.
            unsafe {
                ((address + 8) as *mut u32).write_volatile(1234);
                assert_eq!(((other + 8) as *const u32).read_volatile(), 1234);
            }
        }
        ok(unmap(address, CHUNK));
        assert_eq!(word(other + 4096, LEGACY), 77);
        ok(synchronise());
        ok(unmap(other, CHUNK));
        // The handle still holds the bytes.
        ok(map(address, CHUNK, handle));
        ok(open(address, CHUNK));
        assert_eq!(word(address + 4096, LEGACY), 77);
    }
}

#[test]
fn mapping_for_peers_may_be_refused() {
    let _rig = Rig::new(Config {
        devices: 2,
        peers: true,
        peers_refuse: true,
        ..Config::default()
    });
    let mut can = 0;
    // SAFETY: the output is a local.
    ok(unsafe { cuDeviceCanAccessPeer(&mut can, 1, 0) });
    assert_eq!(can, 1);
    let address = mapped(CHUNK);
    let write = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    assert_eq!(
        access(address, CHUNK, 1, write),
        CUresult::CUDA_ERROR_INVALID_DEVICE as u32
    );
    ok(access(address, CHUNK, 0, write));
    ok(fill(address, 1, 4, LEGACY));
    ok(synchronise());
}

#[test]
fn mapping_for_peers_needs_set_access_of_their_own() {
    let rig = Rig::new(Config {
        devices: 2,
        peers: true,
        ..Config::default()
    });
    let address = mapped(CHUNK);
    let mut context = null_mut();
    // SAFETY: outputs are locals.
    unsafe {
        ok(cuDevicePrimaryCtxRetain(&mut context, 1));
        ok(cuCtxPushCurrent_v2(context));
    }
    ok(access(
        address,
        CHUNK,
        1,
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    ));
    ok(fill(address, 1, 4, LEGACY));
    ok(synchronise());
    ok(access(address, CHUNK, 1, CU_MEM_ACCESS_FLAGS_PROT_NONE));
    ok(fill(address, 1, 4, LEGACY));
    rig.one_violation("touched unmapped memory");
    drop(rig);
    let _rig = Rig::new(Config {
        devices: 2,
        ..Config::default()
    });
    let address = mapped(CHUNK);
    let refused = access(address, CHUNK, 1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    status(refused, CUresult::CUDA_ERROR_INVALID_DEVICE);
}
