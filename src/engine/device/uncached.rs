//! Allocation without the pool (PyTorch's `PYTORCH_NO_CUDA_MEMORY_CACHING`): each block is an allocation of the driver
//! and is not counted, so that tools that check accesses (CUDA's compute-sanitizer) see the bounds of each request.

use crate::core::{Gpu, Refusal, SHARED_ARENA};
use crate::device::exported;
use crate::device::external_cache;
use crate::device::{Device, OutOfMemory, State};
use std::mem::take;

impl Device {
    /// Turns allocation without the pool on or off. Blocks in use are freed to where they came from.
    pub fn set_uncached(&self, uncached: bool) {
        let mut state = self.lock_flushed();
        state.uncached = uncached;
        self.update_routing(&mut state);
    }

    /// Allocates from the driver. Out of memory has fewer steps than [`Device::allocate_slow`]: there are no free
    /// blocks to search and no deferred frees, only what can be released to the driver.
    #[cold]
    pub(super) fn allocate_uncached(
        &self,
        state: &mut State,
        size: usize,
    ) -> Result<u64, Box<OutOfMemory>> {
        let bytes = size.max(1) as u64;
        let State { pool, blocks, .. } = state;
        let mut taken = pool.gpu_mut().allocate(bytes);
        // The pool may hold free memory from before.
        if taken.is_err() && pool.trim_all(None) > 0 {
            taken = pool.gpu_mut().allocate(bytes);
        }
        if taken == Err(Refusal::OutOfMemory) && external_cache::release_all() {
            taken = pool.gpu_mut().allocate(bytes);
        }
        match taken {
            Ok(address) => {
                blocks.insert(address, bytes);
                Ok(address)
            }
            Err(refusal) => {
                let shortage = pool.shortage(size as u64, SHARED_ARENA, refusal);
                Err(self.out_of_memory(state, size as u64, shortage, SHARED_ARENA))
            }
        }
    }

    /// Gives a block back to the driver, which waits for the work that uses it. False where it is none.
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

    /// Gives all blocks back that came from the driver one by one.
    pub(super) fn free_all_uncached(state: &mut State) {
        for (address, bytes) in take(&mut state.blocks) {
            exported::revoke(address);
            state.pool.gpu_mut().free(address, bytes);
        }
    }
}
