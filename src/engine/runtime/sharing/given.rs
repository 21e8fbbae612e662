//! What a program gave away by `cudaIpcGetMemHandle`: good until the program frees it, also where other
//! memory is handed out at the same address later.

use super::super::message;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// One allocation that was given away.
struct Given {
    number: u64,
    size: u64,
}

/// By the address that the program has.
static GIVEN: Mutex<Option<HashMap<u64, Given>>> = Mutex::new(None);
/// There was ever one.
static ANY: AtomicBool = AtomicBool::new(false);
/// One was ever asked for.
static WANTED: AtomicBool = AtomicBool::new(false);

/// The number under which the allocation at `address`, of `size` bytes, is given away: the same until it
/// is freed, and never another's.
pub fn give(address: u64, size: u64) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    ANY.store(true, Relaxed);
    let mut given = GIVEN.lock();
    let entry = given.get_or_insert_default().entry(address);
    let number = || NEXT.fetch_add(1, Relaxed);
    entry
        .or_insert_with(|| Given {
            number: number(),
            size,
        })
        .number
}

/// The allocation at `address` is being freed. One relaxed load where none was ever given away.
#[inline]
pub fn forget(address: u64) {
    if ANY.load(Relaxed)
        && let Some(given) = GIVEN.lock().as_mut()
    {
        given.remove(&address);
    }
}

/// The process ends. If nobody asked for anything that it gave away, those that it was for may not have
/// the library, and could not: one line says what to do then.
pub(super) fn explain_unwanted() {
    if ANY.load(Relaxed) && !WANTED.load(Relaxed) {
        message::say(
            "no process has opened what cudaIpcGetMemHandle shared: only those that have this library \
             preloaded can; CONCERTINA_CONF=ipc:True leaves cudaMalloc's memory to CUDA, for all",
        );
    }
}

/// Bytes of the allocation that was given away under this number, if it still is.
pub(super) fn size_of(number: u64) -> Option<u64> {
    WANTED.store(true, Relaxed);
    let given = GIVEN.lock();
    let mut given = given.iter().flat_map(HashMap::values);
    given.find(|it| it.number == number).map(|it| it.size)
}
