//! Allocation without the pool (PyTorch's `PYTORCH_NO_CUDA_MEMORY_CACHING`): each block is an allocation of
//! the driver and is not counted, so that tools that check accesses (CUDA's compute-sanitizer) see the bounds
//! of each request.

use crate::core::{Gpu, SHARED_ARENA};
use crate::device::exported;
use crate::device::oom_report::OutOfMemory;
use crate::device::{Device, State};
use std::mem::take;

impl Device {
    /// Turns allocation without the pool on or off. Blocks in use are freed to where they came from.
    pub fn set_uncached(&self, uncached: bool) {
        let mut state = self.lock_flushed();
        state.uncached = uncached;
        self.update_routing(&mut state);
    }

    /// Allocates from the driver.
    #[cold]
    pub(super) fn allocate_uncached(
        &self,
        state: &mut State,
        size: usize,
    ) -> Result<u64, Box<OutOfMemory>> {
        let bytes = size.max(1) as u64;
        let allocated = state.pool.gpu_mut().allocate(bytes);
        match allocated.or_else(|refusal| self.allocate_uncached_slow(state, bytes, refusal)) {
            Ok(address) => {
                state.blocks.insert(address, bytes);
                Ok(address)
            }
            Err(refusal) => {
                let shortage = state.pool.shortage(size as u64, SHARED_ARENA, refusal);
                Err(self.out_of_memory(state, size as u64, shortage, SHARED_ARENA))
            }
        }
    }

    /// Frees a block to the driver, which waits for its work. False if it is not one that came from there.
    #[cold]
    pub(super) fn free_uncached(state: &mut State, address: u64) -> bool {
        match state.blocks.remove(&address) {
            Some(bytes) => {
                state.pool.gpu_mut().free(address, bytes);
                true
            }
            None => false,
        }
    }

    /// Frees all blocks that came from the driver.
    pub(super) fn free_all_uncached(state: &mut State) {
        for (address, bytes) in take(&mut state.blocks) {
            exported::revoke(address);
            state.pool.gpu_mut().free(address, bytes);
        }
    }
}
