//! Allocations whose IPC handle the program has asked for (`cudaIpcGetMemHandle`). The handle of an
//! allocation by `cudaMalloc` is valid until the program frees it, also if its address is allocated again
//! later. That of a tensor is valid as long as the span that it lies in.

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

/// By address.
static EXPORTED: Mutex<Option<HashMap<u64, Exported>>> = Mutex::new(None);
/// An allocation has been exported.
static ANY: AtomicBool = AtomicBool::new(false);
/// A tensor has been exported.
static ANY_TENSOR: AtomicBool = AtomicBool::new(false);
/// Another process has imported something.
static IMPORTED: AtomicBool = AtomicBool::new(false);

/// Exports the allocation at `address`, which lies in `span`; under the same number and secret until it is
/// freed.
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

/// Notes that a tensor has been exported.
pub fn note_tensor() {
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

/// To be called when the process ends. If it has exported memory that no process has imported, the others may
/// not have this library: prints what to set then.
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

/// Notes that another process has imported something.
pub(crate) fn note_imported() {
    IMPORTED.store(true, Relaxed);
}

/// Whether a number is that of an allocation, and not of a span.
pub(crate) fn is_allocation(number: u64) -> bool {
    number >= FIRST_ALLOCATION
}

/// The span of an exported allocation, if it has not been freed and the secret is its own.
pub(crate) fn span_of(number: u64, secret: &Secret) -> Option<u64> {
    let exported = EXPORTED.lock();
    let mut exported = exported.iter().flat_map(HashMap::values);
    let exported = exported.find(|it| it.number == number)?;
    exported.secret.matches(secret).then_some(exported.span)
}
