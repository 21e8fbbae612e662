//! Exported allocations: those whose IPC handle the program has asked for (`cudaIpcGetMemHandle`).
//!
//! The handle of an allocation by `cudaMalloc` is valid until the program frees it, also if its address is
//! allocated again later. That of a tensor is valid as long as the span that it lies in.

use crate::device::spans::IpcError;
use crate::util::message;
use crate::util::secret::Secret;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Numbers from here on are those of allocations, lower ones those of spans.
const FIRST_ALLOCATION: u64 = 1 << 63;

/// An exported allocation.
#[derive(Clone, Copy)]
pub struct Exported {
    /// Unique in the process, and never used again.
    pub number: u64,
    /// The secret in its handles.
    pub secret: Secret,
    /// The number of the span that it lies in.
    span: u64,
}

/// Exported allocations in use, by address.
static EXPORTED: Mutex<Option<HashMap<u64, Exported>>> = Mutex::new(None);
/// Whether an allocation was ever exported.
static ANY: AtomicBool = AtomicBool::new(false);
/// Whether a tensor was ever exported.
static ANY_TENSOR: AtomicBool = AtomicBool::new(false);
/// Whether another process has imported something.
static IMPORTED: AtomicBool = AtomicBool::new(false);

/// Exports the allocation at `address`, which lies in the span of that number. Until it is freed, every call
/// returns the same number and secret.
pub fn export(address: u64, span: u64) -> Result<Exported, IpcError> {
    static NEXT: AtomicU64 = AtomicU64::new(FIRST_ALLOCATION);
    let mut exported = EXPORTED.lock();
    let exported = exported.get_or_insert_default();
    if let Some(exported) = exported.get(&address) {
        return Ok(*exported);
    }
    let new = Exported {
        number: NEXT.fetch_add(1, Relaxed),
        secret: Secret::new().map_err(IpcError::without_secret)?,
        span,
    };
    exported.insert(address, new);
    ANY.store(true, Relaxed);
    Ok(new)
}

/// Remembers that a tensor was exported, for `explain_if_unimported`.
pub fn mark_tensor() {
    ANY_TENSOR.store(true, Relaxed);
}

/// Ends the export of the allocation at `address`, which is being freed. One relaxed load if nothing was ever
/// exported.
#[inline]
pub fn revoke(address: u64) {
    if ANY.load(Relaxed)
        && let Some(exported) = EXPORTED.lock().as_mut()
    {
        exported.remove(&address);
    }
}

/// Prints what to set if the process has exported memory and no process has imported any: the others may not
/// have this library. To be called when the process ends.
pub(crate) fn explain_if_unimported() {
    let remedy = match (ANY.load(Relaxed), ANY_TENSOR.load(Relaxed)) {
        _ if IMPORTED.load(Relaxed) => return,
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

/// Remembers that another process has imported memory, for `explain_if_unimported`.
pub(crate) fn mark_imported() {
    IMPORTED.store(true, Relaxed);
}

/// Whether the number is an allocation's, and not a span's.
pub(crate) fn is_allocation(number: u64) -> bool {
    number >= FIRST_ALLOCATION
}

/// The number of the span of an exported allocation. `None` if it was freed, or the secret is not its own.
pub(crate) fn span_of(number: u64, secret: &Secret) -> Option<u64> {
    let exported = EXPORTED.lock();
    let mut exported = exported.iter().flat_map(HashMap::values);
    let exported = exported.find(|it| it.number == number)?;
    exported.secret.matches(secret).then_some(exported.span)
}
