//! Free memory goes back to the driver: on request, and when it has been idle for long enough.

use crate::core::Origin;
use crate::device::stream_key::is_capturing;
use crate::device::{Device, State, external_cache};
use std::time::Duration;

/// Chunks released before others get the device's lock: a millisecond or so (H100).
const CHUNKS_AT_ONCE: usize = 32;

impl Device {
    /// Releases every wholly free chunk to the driver, and the external cache. Waits for the device first if
    /// free memory may still be in use. Memory of private pools that are in use is kept.
    pub fn empty_cache(&self) {
        external_cache::release_all();
        let mut state = self.lock_flushed();
        let waits = state.pool.counters().syncs;
        state.pool.trim_all(None);
        state.pool.gpu_mut().retry_pending_releases();
        // Counted as a wait even where there was nothing to wait for, as PyTorch's own allocator counts it.
        let counters = state.pool.counters_mut();
        counters.syncs = counters.syncs.max(waits + 1);
    }

    /// Like [`Device::empty_cache`], for what is known to be idle. Never waits for the GPU.
    pub fn release_idle(&self) {
        let mut state = self.lock_flushed();
        let State { depot, pool, .. } = &mut *state;
        depot.free_completed(pool);
        pool.trim_idle();
        pool.gpu_mut().retry_pending_releases();
    }

    /// Releases wholly free chunks that have not been used for `patience` to the driver; to be called now and
    /// then. `now` is the time of a monotonic clock. Never waits for the GPU. True if there is more to
    /// release, which the next call does: each holds the device's lock for a few chunks only.
    pub fn purge_idle(&self, now: Duration, patience: Duration) -> bool {
        let mut state = self.lock_flushed();
        let seen = [Origin::Allocator, Origin::Cuda].map(|origin| {
            let of = &state.pool.stats_of(origin).all.allocation;
            of.allocated + of.freed
        });
        let seen = seen.iter().sum();
        if state.seen.0 != seen {
            state.seen = (seen, now);
        }
        let quiet_since = state.seen.1;
        let silent = now.saturating_sub(quiet_since) >= patience;
        // A capture on a stream that synchronizes with the default one may be unannounced: the driver is
        // asked.
        if silent && is_capturing(&self.functions, self.properties.context, 0) != Some(false) {
            return false;
        }
        let due = patience.saturating_add(if silent { quiet_since } else { now });
        let [now, due] = [now, due].map(|time| time.as_millis() as u64);
        state.pool.purge_idle(now, due, silent, CHUNKS_AT_ONCE)
    }
}
