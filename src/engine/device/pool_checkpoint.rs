//! Checkpoints of a private pool: which blocks are in use and where, and restoring that state.

use crate::core::BlockInfo;
use crate::device::{ActiveRoute, Device, PoolId, PoolRoute, State};
use crate::util::thread::thread_number;

/// Why a checkpoint could not be restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotRestored {
    /// There is no private pool of that name.
    NoPool,
    /// The address of a block of the checkpoint, where memory is in use or not the pool's any more.
    Taken(u64),
}

impl Device {
    /// The blocks in use of a private pool; `None` if there is none of that name.
    pub fn pool_blocks(&self, pool: PoolId) -> Option<Vec<BlockInfo>> {
        let state = self.state.lock();
        let arena = state.private(pool)?.arena;
        Some(state.pool.blocks_of(arena).collect())
    }

    /// Restores the blocks of a private pool, all of them or none, each at its address. Until
    /// [`Device::end_pool`] the allocations that the route's filter accepts get these blocks, in this order.
    /// Counts no user of the pool. Waits for the device if other streams may still use free memory.
    pub fn restore_pool(&self, route: PoolRoute, blocks: &[BlockInfo]) -> Result<(), NotRestored> {
        let mut state = self.lock_flushed();
        let arena = state.private(route.pool).ok_or(NotRestored::NoPool)?.arena;
        let State { pool, routes, .. } = &mut *state;
        let placed =
            pool.allocate_at(blocks, arena)
                .or_else(|unplaced| match pool.synchronize_frees() {
                    true => pool.allocate_at(blocks, arena),
                    false => Err(unplaced),
                });
        placed.map_err(|unplaced| NotRestored::Taken(unplaced.0))?;
        routes.push(ActiveRoute {
            route,
            made: true,
            thread: thread_number(),
            // It allocates nothing.
            capture: Some(false),
            restored: blocks.iter().map(|block| block.start).collect(),
        });
        self.update_routing(&mut state);
        Ok(())
    }
}
