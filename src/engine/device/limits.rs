//! How much memory a device's pool may hold, and how much a request may get.

use crate::device::Device;
use std::sync::atomic::Ordering::Relaxed;

impl Device {
    /// The limit in bytes, if one is set.
    pub fn limit(&self) -> Option<u64> {
        Some(self.ledger.limit()).filter(|limit| *limit != u64::MAX)
    }

    /// Sets how many bytes may be held from the driver; `None` lifts the limit. What is held beyond it stays.
    /// [`Device::set_memory_fraction`] sets it anew, within the limit of the settings.
    pub fn set_limit(&self, bytes: Option<u64>) {
        self.ledger.set_limit(bytes.unwrap_or(u64::MAX));
    }

    /// The share of the device's memory that the pool may hold, as it was last set.
    pub fn memory_fraction(&self) -> f64 {
        f64::from_bits(self.fraction.load(Relaxed))
    }

    /// Limits the pool to a share of the device's memory, 0.0 to 1.0. The `limit` of the settings stays: it is the
    /// person's who runs the program, and the share is the program's.
    pub fn set_memory_fraction(&self, fraction: f64) {
        self.fraction.store(fraction.to_bits(), Relaxed);
        self.ledger.set_limit(effective_limit(
            self.limit_of_settings,
            fraction,
            self.properties.total,
        ));
    }

    /// Bytes of the largest block that a request could get now, as far as can be told beforehand: the largest
    /// free range, or what the limit and the device leave to grow by.
    pub fn largest_obtainable(&self) -> u64 {
        let state = self.lock_flushed();
        let reserved = state.pool.stats().all.reserved_bytes.current;
        let device = state.pool.gpu().memory_info().map_or(0, |(free, _)| free);
        let limit = self.ledger.limit().saturating_sub(self.ledger.unpooled());
        let growth = device.min(limit.saturating_sub(reserved));
        growth.max(state.pool.largest_free())
    }
}

/// The smaller of a limit in bytes (`u64::MAX` for none) and a share of a device's memory, of which 1.0 is no limit.
pub(super) fn effective_limit(bytes: u64, fraction: f64, total: u64) -> u64 {
    match fraction < 1.0 {
        true => bytes.min((total as f64 * fraction.clamp(0.0, 1.0)) as u64),
        false => bytes,
    }
}
