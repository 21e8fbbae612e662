//! Bytes that an arena holds from the driver, counted as PyTorch counts them for a private pool; and which
//! addresses are the arena's.

use super::arena::{Arena, ArenaId};
use super::gpu::Gpu;
use super::pool::Pool;

/// Reserved bytes of one arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReservedBytes {
    /// Now.
    pub current: u64,
    /// The most since the last reset of peaks.
    pub peak: u64,
    /// Taken from the driver since the last reset of sums.
    pub allocated: u64,
    /// Returned to the driver since then.
    pub freed: u64,
}

impl ReservedBytes {
    /// Counts bytes that were taken from the driver.
    pub fn add(&mut self, bytes: u64) {
        self.current += bytes;
        self.allocated += bytes;
        self.peak = self.peak.max(self.current);
    }

    /// Counts bytes that were returned to the driver.
    pub fn remove(&mut self, bytes: u64) {
        self.current -= bytes;
        self.freed += bytes;
    }
}

impl Arena {
    /// Whether an address lies in memory of the arena, or in addresses that it has reserved.
    fn contains(&self, address: u64) -> bool {
        let mut ranges = self.addresses.ranges.iter().copied();
        let mut segments = self.segments.iter().map(|(start, size)| (*start, *size));
        let within = |(start, size): (u64, u64)| (start..start + size).contains(&address);
        ranges.any(within) || segments.any(within)
    }
}

impl<G: Gpu> Pool<G> {
    /// Whether an address is the arena's. Takes time in proportion to its segments.
    pub fn is_of_arena(&self, address: u64, id: ArenaId) -> bool {
        self.arenas[id as usize].contains(address)
    }

    /// What the arena holds from the driver.
    pub fn reserved_bytes(&self, id: ArenaId) -> ReservedBytes {
        self.arenas[id as usize].bytes
    }

    /// Sets the peaks of all arenas to their current bytes.
    pub fn reset_arena_peaks(&mut self) {
        for arena in &mut self.arenas {
            arena.bytes.peak = arena.bytes.current;
        }
    }

    /// Sets the sums of all arenas to 0.
    pub fn reset_arena_sums(&mut self) {
        for arena in &mut self.arenas {
            (arena.bytes.allocated, arena.bytes.freed) = (0, 0);
        }
    }
}
