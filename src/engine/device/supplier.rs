//! Private pools whose memory somebody else supplies: PyTorch's `MemPool` with an allocator of its own, such as
//! NCCL's, which makes memory that network and switch reach by themselves.
//!
//! Suppliers are code of the program's. They are called with no lock held: they may allocate themselves, wait
//! for Python's interpreter, or throw a C++ exception, which goes through here to whoever called.

use crate::core::{BLOCK, Refusal, SHARED_ARENA, Shortage};
use crate::device::{Device, OutOfMemory, PoolId};
use crate::util::message;
use std::mem::forget;
use std::sync::Arc;

/// Whoever supplies a private pool's memory.
pub trait Supplier: Send + Sync {
    /// The address of so many bytes; `None` where there are none.
    fn supply(&self, bytes: u64) -> Option<u64>;
    /// Takes back what it supplied at this address. No work uses it any more.
    fn take_back(&self, address: u64);
}

/// Bytes that somebody is about to supply, or has taken back: they count towards the limit until this goes.
struct Reservation<'a> {
    device: &'a Device,
    bytes: u64,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        let _state = self.device.state.lock();
        self.device.ledger.give(self.bytes);
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
            supplier.take_back(self.address);
        }
    }
}

impl Device {
    /// `None` where it would be beyond the limit. Suppliers are called after it, so that of requests that come
    /// at the same time each counts for the others.
    fn reserve_supplied(&self, bytes: u64) -> Option<Reservation<'_>> {
        let _state = self.state.lock();
        self.ledger.allows(bytes).then(|| {
            self.ledger.take(bytes);
            Reservation {
                device: self,
                bytes,
            }
        })
    }

    /// Counts one more user of the private pool, which is made if there is none of that name: of what the
    /// supplier supplies, if there is one.
    pub fn retain_pool(&self, pool: PoolId, supplier: Option<Arc<dyn Supplier>>) {
        self.state.lock().retain(pool, supplier);
    }

    /// Has the private pool supplied with what a request missed; then it is to be made again. Where nothing
    /// is missing that is supplied, or there is no more, the answer is what to tell the program.
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
                Some(reservation) => match supplier.supply(bytes) {
                    Some(address) if self.add_supplied(address, bytes, shortage.pool, supplier) => {
                        // It counts until it is returned.
                        forget(reservation);
                        return Ok(());
                    }
                    Some(address) => {
                        supplier.take_back(address);
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

    /// Whether the private pool has room for the request in memory that any stream may use, as it may once
    /// the device was waited for.
    fn has_idle_block(&self, shortage: &OutOfMemory) -> bool {
        let size = self.block_size(shortage.shortage.asked as usize);
        let state = self.state.lock();
        let private = state.private(shortage.pool);
        private.is_some_and(|it| state.pool.has_idle_block(size, it.arena))
    }

    /// False where the memory cannot be used.
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

    /// Gives suppliers back what is not needed any more. Trackers are told first.
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
