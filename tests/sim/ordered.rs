//! Memory allocated in the order of a stream, and the pools that it comes from.

use cudarc::driver::sys::CUresult;
use std::collections::BTreeMap;

/// Default pools' handles start here, one a device; the pools that programs create come after them.
const FIRST_HANDLE: u64 = 0x5d00_0000_0000;
const HANDLE_STEP: u64 = 0x1000;
/// Default pools have the numbers below this one.
const DEVICES: u64 = 64;

/// A pool, by number: the default pool of the device of that number, or one that a program created.
pub(crate) type PoolId = u64;

#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
    pub threshold: u64,
    /// The most bytes that were ever in use.
    pub used_high: u64,
}

/// An allocation of a pool's.
#[derive(Debug)]
pub(crate) struct Ordered {
    pub pool: PoolId,
    pub size: u64,
    /// Given back, though the stream may not have come to it yet.
    pub freed: bool,
}

/// All pools of a machine.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    /// Those that were used or created so far. A created one names its device.
    pub pools: BTreeMap<PoolId, (usize, Pool)>,
    /// The current pool of each device that has another than its default one.
    pub current: BTreeMap<usize, PoolId>,
    /// Allocations that are not free yet, by address.
    pub blocks: BTreeMap<u64, Ordered>,
    created: u64,
}

pub(crate) fn handle(pool: PoolId) -> u64 {
    FIRST_HANDLE + pool * HANDLE_STEP
}

impl Pools {
    /// The pool and its device that a handle means, on a machine of so many devices.
    pub fn of(&self, handle: u64, devices: usize) -> Result<(PoolId, usize), CUresult> {
        let invalid = CUresult::CUDA_ERROR_INVALID_VALUE;
        let distance = handle.checked_sub(FIRST_HANDLE).ok_or(invalid)?;
        let pool = distance / HANDLE_STEP;
        let known = match self.pools.get(&pool) {
            Some((device, _)) => Some(*device),
            None => Some(pool as usize).filter(|device| *device < devices),
        };
        match known {
            Some(device) if distance.is_multiple_of(HANDLE_STEP) => Ok((pool, device)),
            _ => Err(invalid),
        }
    }

    /// The current pool of a device.
    pub fn current(&self, device: usize) -> PoolId {
        self.current
            .get(&device)
            .copied()
            .unwrap_or(device as PoolId)
    }

    pub fn create(&mut self, device: usize) -> PoolId {
        self.created += 1;
        let pool = DEVICES + self.created;
        self.pools.insert(pool, (device, Pool::default()));
        pool
    }

    pub fn get_mut(&mut self, pool: PoolId, device: usize) -> &mut Pool {
        &mut self
            .pools
            .entry(pool)
            .or_insert((device, Pool::default()))
            .1
    }

    /// Bytes in use of a pool.
    pub fn used(&self, pool: PoolId) -> u64 {
        let blocks = self.blocks.values();
        let mine = blocks.filter(|block| block.pool == pool && !block.freed);
        mine.map(|block| block.size).sum()
    }
}
