//! Looking up a block by its address, and sizes.

use crate::device::Device;

impl Device {
    /// Bytes of the block that starts at `address`, if it is in use.
    pub fn size_of(&self, address: u64) -> Option<u64> {
        let state = self.lock_flushed();
        let of_driver = || state.blocks.get(&address).copied();
        state.pool.size_of(address).or_else(of_driver)
    }

    /// Start and size of what the block that starts at `address`, if it is in use, is part of to CUDA.
    pub fn base_of(&self, address: u64) -> Option<(u64, u64)> {
        let state = self.lock_flushed();
        let of_driver = || Some((address, *state.blocks.get(&address)?));
        let size = match state.pool.size_of(address) {
            Some(size) => size,
            None => return of_driver(),
        };
        let backing = state.pool.backing(address)?;
        match (backing.mapped, state.pool.allocation_around(address)) {
            (false, _) => Some((backing.start, backing.bytes())),
            (true, Some(it)) if it.private => Some((it.found.start, it.found.size)),
            (true, _) => Some((address, size)),
        }
    }

    /// Bytes that were asked for the block that starts at `address`, if it is in use, and the handle of the
    /// stream that it is of.
    pub fn block_at(&self, address: u64) -> Option<(u64, u64)> {
        let state = self.state.lock();
        let of_driver = || state.blocks.get(&address).map(|size| (*size, 0));
        let live = state.pool.find_live(address);
        live.map(|live| (live.requested, state.pool.owner_of(&live).handle))
            .or_else(of_driver)
    }

    /// Bytes of the block that a request for `size` bytes gets.
    pub fn block_size(&self, size: usize) -> u64 {
        self.state.lock().block_size(size)
    }
}
