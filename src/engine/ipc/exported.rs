//! What a program gave away by `cudaIpcGetMemHandle`. The handle of an allocation by `cudaMalloc` is good
//! until the program frees it, also where other memory is handed out at the same address later. That of a
//! tensor is as good as the memory that it lies in, which PyTorch keeps.

use crate::ipc::Unshared;
use crate::ipc::secret::Secret;
use crate::util::message;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Numbers from here on are allocations', those below it spans'.
const FIRST: u64 = 1 << 63;

/// One allocation that was given away.
#[derive(Clone, Copy)]
pub struct Exported {
    pub number: u64,
    pub secret: Secret,
    /// The span that it lies in.
    span: u64,
}

/// By the address that the program has.
static GIVEN: Mutex<Option<HashMap<u64, Exported>>> = Mutex::new(None);
/// There was ever one.
static ANY: AtomicBool = AtomicBool::new(false);
/// A tensor was ever given away.
static ANY_TENSOR: AtomicBool = AtomicBool::new(false);
/// Somebody who had the handle ever asked for something.
static WANTED: AtomicBool = AtomicBool::new(false);

/// Gives the allocation at `address` away: by the same number and secret until it is freed, and never
/// another's.
pub fn give(address: u64, span: u64) -> Result<Exported, Unshared> {
    static NEXT: AtomicU64 = AtomicU64::new(FIRST);
    let mut given = GIVEN.lock();
    let given = given.get_or_insert_default();
    if let Some(given) = given.get(&address) {
        return Ok(*given);
    }
    let new = Exported {
        number: NEXT.fetch_add(1, Relaxed),
        secret: Secret::new().map_err(Unshared::without_secret)?,
        span,
    };
    given.insert(address, new);
    ANY.store(true, Relaxed);
    Ok(new)
}

/// A tensor was given away.
pub fn note_tensor() {
    ANY_TENSOR.store(true, Relaxed);
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
pub(crate) fn explain_unwanted() {
    let remedy = match (ANY.load(Relaxed), ANY_TENSOR.load(Relaxed)) {
        _ if WANTED.load(Relaxed) => return,
        (false, false) => return,
        (_, false) => "ipc:True leaves cudaMalloc's memory to CUDA",
        (false, true) => "expandable_segments:False has tensors in CUDA's own allocations",
        (true, true) => "ipc:True,expandable_segments:False has it all in CUDA's own allocations",
    };
    message::print(&format!(
        "no process has imported what cudaIpcGetMemHandle shared: only those that have this library \
         preloaded can; CONCERTINA_CONF={remedy}, for all"
    ));
}

/// Somebody who had the handle has asked.
pub(crate) fn note_wanted() {
    WANTED.store(true, Relaxed);
}

/// Whether a number is an allocation's.
pub(crate) fn is_given(number: u64) -> bool {
    number >= FIRST
}

/// The span of the allocation that was given away under a number, if it still is, and the secret is its own.
pub(crate) fn span_of(number: u64, secret: &Secret) -> Option<u64> {
    let given = GIVEN.lock();
    let mut given = given.iter().flat_map(HashMap::values);
    let given = given.find(|it| it.number == number)?;
    given.secret.is(secret).then_some(given.span)
}
