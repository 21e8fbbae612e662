//! Memory: cuMemAlloc and cuMemFree, and how much there is.

use super::*;

fn info() -> (usize, usize) {
    let (mut free, mut total) = (0, 0);
    // SAFETY: outputs are locals.
    ok(unsafe { cuMemGetInfo_v2(&mut free, &mut total) });
    (free, total)
}

#[test]
fn memory_is_finite_and_counted() {
    let rig = Rig::new(Config {
        memory: 8 * CHUNK,
        ..Config::default()
    });
    let total = 8 * CHUNK as usize;
    assert_eq!(info(), (total, total));
    let chunk = create(4 * CHUNK);
    let address = alloc(4 * CHUNK - 1024);
    assert_eq!(info(), (1024, total));
    let mut more = 0;
    // SAFETY: outputs are locals.
    unsafe {
        status(
            cuMemAlloc_v2(&mut more, 1025),
            CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        );
        status(
            cuMemAlloc_v2(&mut more, usize::MAX - 100),
            CUresult::CUDA_ERROR_OUT_OF_MEMORY,
        );
        invalid(cuMemAlloc_v2(&mut more, 0));
        invalid(cuMemAlloc_v2(null_mut(), 1));
    }
    assert_eq!(more, 0);
    status(try_create(0, CHUNK), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    release(chunk);
    ok(free(address));
    // Whoever took it, the most is known.
    assert_eq!(rig.machine.most_used(0), 8 * CHUNK - 1024);
    rig.machine.reset_most_used();
    assert_eq!(rig.machine.most_used(0), 0);
    assert_eq!(info(), (total, total));
    assert_eq!(rig.machine.used(0), 0);
}

#[test]
fn memory_allocations_are_aligned_and_do_not_overlap() {
    let _rig = Rig::new(Config::default());
    let (one, other) = (alloc(1), alloc(1));
    assert_eq!((one % 512, other % 512), (0, 0));
    assert_ne!(one, other);
    ok(fill(one, 7, 512, LEGACY));
    assert_eq!((word(one, LEGACY), word(other, LEGACY)), (7, 0));
    invalid(free(one + 512));
    ok(free(one));
    invalid(free(one));
    ok(free(0));
    ok(free(other));
}

#[test]
fn memory_free_waits_for_the_device() {
    let rig = Rig::held();
    let (one, other) = (alloc(4096), alloc(4096));
    let (a, b) = (stream(), stream());
    let counter = counter();
    ok(fill(one, 1, 4096, a));
    ok(count_up(b, counter));
    ok(free(one));
    assert_eq!(counter.load(std::sync::atomic::Ordering::SeqCst), 1);
    assert_eq!(rig.machine.busy_streams(), 0);
    // The host knows by that, so what follows is in order on any stream.
    ok(fill(other, 1, 4096, a));
    ok(free(alloc(1)));
    ok(fill(other, 2, 4096, b));
    ok(synchronise());
}

#[test]
fn memory_of_the_host_is_usable() {
    let _rig = Rig::new(Config {
        host_pointers: true,
        ..Config::default()
    });
    let address = alloc(10_000);
    ok(fill(address, 0x0102_0304, 10_000, LEGACY));
    let words = address as *mut u32;
    // SAFETY: the allocation is host memory on this machine, and no work is pending.
    unsafe {
        assert_eq!(words.add(2499).read(), 0x0102_0304);
        words.write(99);
    }
    assert_eq!(word(address, LEGACY), 99);
    ok(free(address));
}

#[test]
fn copies_between_host_and_device() {
    for host_pointers in [false, true] {
        let _rig = Rig::new(Config {
            host_pointers,
            ..Config::default()
        });
        // Two chunks side by side, and an allocation: a copy across the seam.
        let address = reserve(2 * CHUNK);
        for place in 0..2 {
            let handle = create(CHUNK);
            ok(map(address + place * CHUNK, CHUNK, handle));
            release(handle);
        }
        ok(open(address, 2 * CHUNK));
        let other = alloc(64);
        let bytes: Vec<u8> = (0..64).collect();
        let seam = address + CHUNK - 24;
        let mut back = vec![0_u8; 64];
        // SAFETY: host buffers live until the synchronise.
        unsafe {
            ok(cuMemcpyHtoDAsync_v2(
                seam,
                bytes.as_ptr().cast(),
                64,
                LEGACY,
            ));
            ok(cuMemcpyDtoDAsync_v2(other, seam, 64, LEGACY));
            ok(cuMemcpyDtoHAsync_v2(
                back.as_mut_ptr().cast(),
                other,
                64,
                LEGACY,
            ));
            ok(cuMemcpyDtoHAsync_v2(null_mut(), 12345, 0, LEGACY));
        }
        ok(synchronise());
        assert_eq!(back, bytes);
        ok(fill(seam, 0x0101_0101, 64, LEGACY));
        assert_eq!(
            (word(seam, LEGACY), word(seam + 60, LEGACY)),
            (0x0101_0101, 0x0101_0101)
        );
        invalid(fill(seam + 2, 0, 64, LEGACY));
    }
}
