//! Private pools whose memory a supplier allocates: PyTorch's `MemPool` with an allocator of its own, such as
//! NCCL's, whose memory network cards and switches can access.
//!
//! Suppliers are the program's code. They are called with no lock held: they may allocate themselves, wait
//! for Python's interpreter, or throw a C++ exception, which unwinds through this file to the caller.

use crate::core::{BLOCK, Refusal, SHARED_ARENA, Shortage};
use crate::device::Device;
use crate::device::oom_report::OutOfMemory;
use crate::device::private_pools::{PoolId, Supplier};
use crate::util::message;
use std::mem::forget;
use std::sync::Arc;

/// Bytes that a supplier is about to allocate, or to free: they count towards the limit until this is
/// dropped.
struct Reservation<'a> {
    device: &'a Device,
    bytes: u64,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let _state = self.device.state.lock();
        self.device.ledger.subtract(self.bytes);
    }
}

/// A segment that its supplier gets back even if a tracker throws.
struct Returned {
    supplier: Option<Arc<dyn Supplier>>,
    address: u64,
}

impl Drop for Returned {
    fn drop(&mut self) {
        if let Some(supplier) = self.supplier.take() {
            supplier.free(self.address);
        }
    }
}

impl Device {
    /// Reserves `bytes` of the limit before a supplier is called, so that concurrent requests count for each
    /// other. `None` if they are beyond the limit.
    fn reserve_supplied(&self, bytes: u64) -> Option<Reservation<'_>> {
        let _state = self.state.lock();
        self.ledger.allows(bytes).then(|| {
            self.ledger.add(bytes);
            Reservation {
                device: self,
                bytes,
            }
        })
    }

    /// Counts one more user of a private pool. If there is none of that name it is made, and gets its memory
    /// from the supplier, or without one from the driver.
    pub fn retain_pool(&self, pool: PoolId, supplier: Option<Arc<dyn Supplier>>) {
        self.state.lock().retain_pool(pool, supplier);
    }

    /// Has the private pool's supplier allocate what a request was short of; the request is to be made again
    /// then. An error is for the program: the pool has no supplier, or the supplier has no memory, also after
    /// free memory was returned to it.
    pub fn supply(&self, mut shortage: Box<OutOfMemory>) -> Result<(), Box<OutOfMemory>> {
        let Refusal::Unsupplied(bytes) = shortage.shortage.refusal else {
            return Err(shortage);
        };
        shortage.shortage.refusal = Refusal::OutOfMemory;
        let state = self.state.lock();
        let supplier = state
            .private(shortage.pool)
            .and_then(|it| it.supplier.clone());
        drop(state);
        for last in [false, true] {
            let Some(supplier) = &supplier else { break };
            match self.reserve_supplied(bytes) {
                Some(reservation) => match supplier.allocate(bytes) {
                    Some(address) if self.add_supplied(address, bytes, shortage.pool, supplier) => {
                        // The bytes count until they are returned.
                        forget(reservation);
                        return Ok(());
                    }
                    Some(address) => {
                        supplier.free(address);
                        break;
                    }
                    None => {}
                },
                None => shortage.shortage.refusal = Refusal::OverLimit,
            }
            if !last {
                self.empty_cache();
                self.return_supplied();
                if self.has_idle_block(&shortage) {
                    return Ok(());
                }
            }
        }
        let mut state = self.state.lock();
        state.pool.counters_mut().ooms += 1;
        let arena = state.private(shortage.pool).map(|it| it.arena);
        let Shortage { asked, refusal, .. } = shortage.shortage;
        shortage.shortage = state
            .pool
            .shortage(asked, arena.unwrap_or(SHARED_ARENA), refusal);
        Err(shortage)
    }

    /// Whether the private pool has a completed free block for the request, as it may after a wait for the
    /// device.
    fn has_idle_block(&self, shortage: &OutOfMemory) -> bool {
        let size = self.block_size(shortage.shortage.asked as usize);
        let state = self.state.lock();
        let private = state.private(shortage.pool);
        private.is_some_and(|it| state.pool.has_idle_block(size, it.arena))
    }

    /// Adds a supplied segment to its pool. False if it cannot be used.
    fn add_supplied(
        &self,
        address: u64,
        bytes: u64,
        pool: PoolId,
        supplier: &Arc<dyn Supplier>,
    ) -> bool {
        if !address.is_multiple_of(BLOCK) {
            message::print(&format!(
                "a private pool's allocator gave the address {address:#x}, which is no multiple of {BLOCK}: \
                 it goes back"
            ));
            return false;
        }
        let mut state = self.state.lock();
        let Some(arena) = state.private(pool).map(|private| private.arena) else {
            return false;
        };
        state.suppliers.insert(address, supplier.clone());
        state.pool.add_supplied_segment(address, bytes, arena);
        true
    }

    /// Returns released segments to their suppliers. Trackers are told first.
    pub fn return_supplied(&self) {
        loop {
            let mut state = self.state.lock();
            let Some((address, bytes)) = state.pool.pop_returned_segment() else {
                return;
            };
            state.pool.gpu_mut().spans.remove_part(address);
            let supplier = state.suppliers.remove(&address);
            drop(state);
            let _reservation = Reservation {
                device: self,
                bytes,
            };
            let returned = Returned { supplier, address };
            self.tell_trackers();
            drop(returned);
        }
    }
}
