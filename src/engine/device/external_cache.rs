//! A cache of driver memory that is kept outside the pools, as far as the pools have to know: when the driver
//! has no memory left it is released, and with the pools it is purged.
//!
//! The preloaded library has one: the program's own mappings (`cuMemMap`) that it keeps for reuse.

use serde_json::{Value, json};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The functions of a cache. Both may be called under a device's lock, take no such lock, and do not wait for
/// the GPU.
#[derive(Clone, Copy)]
pub struct ExternalCache {
    /// Releases all cached memory to the driver. False if there was none.
    pub release_all: fn() -> bool,
    /// Releases what has been cached for [`CHECKS`] calls of this function.
    pub purge: fn(),
}

/// Calls of [`ExternalCache::purge`] in the time after which idle memory is released (`idle_release_ms`).
pub const CHECKS: u32 = 4;

static CACHE: OnceLock<ExternalCache> = OnceLock::new();

/// Sets the process's external cache. Only the first call counts.
pub fn register(cache: ExternalCache) {
    let _ = CACHE.set(cache);
}

static BYTES: AtomicU64 = AtomicU64::new(0);
static HITS: AtomicU64 = AtomicU64::new(0);

/// Sets how many bytes are cached now, for the statistics.
pub fn set_bytes(bytes: u64) {
    BYTES.store(bytes, Relaxed);
}

/// Counts a request that was served from the cache.
pub fn count_hit() {
    HITS.fetch_add(1, Relaxed);
}

/// The cache's part of the statistics. Takes no lock.
pub(crate) fn json() -> Value {
    json!({"bytes": BYTES.load(Relaxed), "served": HITS.load(Relaxed)})
}

/// Releases all that is cached to the driver. False if there was nothing.
pub(crate) fn release_all() -> bool {
    CACHE.get().is_some_and(|cache| (cache.release_all)())
}

/// Releases what has been cached for too long. To be called [`CHECKS`] times in `idle_release_ms`.
pub(crate) fn purge() {
    if let Some(cache) = CACHE.get() {
        (cache.purge)();
    }
}
