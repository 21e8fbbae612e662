//! The state of a private pool at one moment, and going back to it: which blocks are in use, and where.

use crate::core::BlockInfo;
use crate::device::{ActiveRoute, Device, PoolId, PoolRoute, State};
use crate::util::thread::thread_number;

/// Why a private pool cannot go back to an earlier state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotRestored {
    /// There is no private pool of that name.
    NoPool,
    /// A block of the earlier state lies at this address, which is in use, or is the pool's no more.
    Taken(u64),
}

impl Device {
    /// Every block in use of a private pool; `None` where there is none of that name.
    pub fn pool_blocks(&self, pool: PoolId) -> Option<Vec<BlockInfo>> {
        let state = self.state.lock();
        let arena = state.private(pool)?.arena;
        Some(state.pool.blocks_of(arena).collect())
    }

    /// Takes a private pool's blocks into use again, all of them or none, each where it was. From then to
    /// [`Device::end_pool`] the allocations that the route's filter claims are handed these blocks, in this
    /// order. Counts no user of the pool.
    ///
    /// Waits for the device where freed memory may still be used by other streams.
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
