//! Bytes that an arena holds from the driver, counted as PyTorch counts them for a private pool; and which
//! addresses are the arena's.

use super::arena::Arena;
use super::gpu::Gpu;
use super::ids::ArenaId;
use super::pool::Pool;
use super::reserved_bytes::ReservedBytes;

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
