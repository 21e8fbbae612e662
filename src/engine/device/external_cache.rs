//! Memory that the process keeps beside the pools, for whoever has none: see `announce`.

use serde_json::{Value, json};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What whoever keeps memory beside the pools can do with it. Both may be called under a device's lock, take none,
/// and do not wait for the GPU.
#[derive(Clone, Copy)]
pub struct Keeper {
    /// Gives all of it back to the driver. False where there was nothing.
    pub give_back: fn() -> bool,
    /// The same of what nobody has asked for since it was called [`LOOKS`] times.
    pub tend: fn(),
}

/// How often idle memory is looked after in the time that it may lie idle.
pub const LOOKS: u32 = 4;

static KEEPER: OnceLock<Keeper> = OnceLock::new();

/// Somebody keeps memory from now on. Only the first one counts.
pub fn announce(keeper: Keeper) {
    let _ = KEEPER.set(keeper);
}

static BYTES: AtomicU64 = AtomicU64::new(0);
static SERVED: AtomicU64 = AtomicU64::new(0);

/// So many bytes are kept now.
pub fn note_bytes(bytes: u64) {
    BYTES.store(bytes, Relaxed);
}

/// A request was met from what is kept.
pub fn note_served() {
    SERVED.fetch_add(1, Relaxed);
}

/// What of it stands in the statistics. Takes no lock.
pub(crate) fn json() -> Value {
    json!({"bytes": BYTES.load(Relaxed), "served": SERVED.load(Relaxed)})
}

/// Has what is kept given back; false where there was nothing.
pub(crate) fn give_back() -> bool {
    KEEPER.get().is_some_and(|keeper| (keeper.give_back)())
}

/// To be called four times in the time that memory may lie idle.
pub(crate) fn tend() {
    if let Some(keeper) = KEEPER.get() {
        (keeper.tend)();
    }
}
