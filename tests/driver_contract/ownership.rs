//! Ownership: tests claim physical bytes, and two claims of one byte are reported.

use super::*;

#[test]
fn ownership_of_one_byte_by_two_is_found() {
    let rig = Rig::new(Config::default());
    let address = mapped(CHUNK);
    rig.machine.claim(address, 4096, 1);
    rig.machine.claim(address + 4096, 4096, 2);
    rig.machine.disown(address, 4096);
    rig.machine.claim(address, 4096, 3);
    assert!(rig.machine.violations().is_empty());
    rig.machine.claim(address + 8191, 1, 4);
    rig.one_violation("overlap: two live owners, 2 and 4");
}

#[test]
fn ownership_by_two_through_aliases_is_found() {
    let rig = Rig::new(Config::default());
    let (one, other, handle) = (reserve(CHUNK), reserve(CHUNK), create(CHUNK));
    ok(map(one, CHUNK, handle));
    ok(map(other, CHUNK, handle));
    rig.machine.claim(one, 4096, 1);
    rig.machine.claim(other, 512, 2);
    rig.one_violation("overlap: two live owners");
}

#[test]
fn ownership_is_needed_to_touch_memory() {
    let rig = Rig::new(Config::default());
    let address = mapped(CHUNK);
    // Before the first claim nobody has to own anything.
    ok(fill(address, 1, CHUNK, LEGACY));
    rig.machine.claim(address, 8192, 1);
    ok(fill(address, 1, 8192, LEGACY));
    ok(fill(address + 4096, 1, 8192, LEGACY));
    rig.one_violation(&format!(
        "touches freed memory: write of 8192 bytes at {:#x}",
        address + 4096
    ));
    rig.machine.disown(address, 8192);
    ok(copy(address + CHUNK / 2, address, 4, LEGACY));
    let violations = rig.machine.violations();
    assert_eq!(violations.len(), 2, "{violations:?}");
    assert!(violations[0].contains("read of 4 bytes"), "{violations:?}");
    rig.machine.unclaimed_ok(true);
    ok(fill(address, 1, 4, LEGACY));
}

#[test]
fn ownership_spans_chunks_and_must_fit() {
    let rig = Rig::new(Config::default());
    let address = reserve(3 * CHUNK);
    for place in 0..2 {
        ok(map(address + place * CHUNK, CHUNK, create(CHUNK)));
    }
    ok(open(address, 2 * CHUNK));
    rig.machine.claim(address + 512, 2 * CHUNK - 512, 1);
    ok(fill(address + 512, 1, 2 * CHUNK - 512, LEGACY));
    rig.machine.disown(address + 512, 2 * CHUNK - 512);
    assert!(rig.machine.violations().is_empty());
    rig.machine.disown(address + 512, 512);
    rig.one_violation("not all of which has an owner");
    rig.machine.claim(address + CHUNK, 2 * CHUNK, 1);
    rig.one_violation("not all mapped");
}

#[test]
fn ownership_forbids_an_unmap() {
    let rig = Rig::new(Config::default());
    let (address, other, handle) = (reserve(CHUNK), reserve(CHUNK), create(CHUNK));
    ok(map(address, CHUNK, handle));
    ok(map(other, CHUNK, handle));
    rig.machine.claim(address, 4096, 1);
    // An alias that nobody uses may go.
    ok(unmap(other, CHUNK));
    assert!(rig.machine.violations().is_empty());
    ok(unmap(address, CHUNK));
    rig.one_violation("unmap of owned memory");
    let plain = alloc(4096);
    rig.machine.claim(plain, 4096, 1);
    ok(free(plain));
    rig.one_violation("unmap of owned memory: cuMemFree");
}
