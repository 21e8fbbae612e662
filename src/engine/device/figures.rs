//! The figures of a device: counters, driver calls and sizes at one moment, for the statistics.

use crate::core::{Origin, PoolStats};
use crate::device::ledger::{Call, CallFigures};
use crate::device::{Device, State};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// Whether the library is PyTorch's allocator.
static TORCH_ALLOCATOR: AtomicBool = AtomicBool::new(false);

/// Says that the library is PyTorch's allocator: what CUDA's functions allocate belongs to other libraries
/// then, even before PyTorch has allocated anything.
pub fn set_torch_allocator() {
    TORCH_ALLOCATOR.store(true, Relaxed);
}

/// The figures of a device at one moment.
#[derive(Clone, Debug)]
pub struct Figures {
    /// The pool's counters, with the blocks that were allocated by the allocator's own functions.
    pub counters: PoolStats,
    /// The counters of blocks that were allocated by CUDA's functions.
    pub of_cuda: PoolStats,
    /// Count and time of each driver call.
    pub calls: Vec<(Call, CallFigures)>,
    /// Bytes of the largest free block.
    pub largest_free: u64,
    /// Bytes of address space reserved.
    pub addresses: u64,
    /// Bytes of host memory for the pool's block nodes.
    pub node_bytes: usize,
    /// The limit in bytes, if one is set.
    pub limit: Option<u64>,
}

impl Figures {
    /// Bytes reserved from the driver now.
    pub fn reserved_bytes(&self) -> u64 {
        self.counters.all.reserved_bytes.current
    }

    /// The counters that the statistics show as the program's: those of the allocator's own functions, or if
    /// it calls none of them, those of CUDA's functions.
    pub fn of_program(&self) -> &PoolStats {
        match self.is_allocator() {
            true => &self.counters,
            false => &self.of_cuda,
        }
    }

    /// The counters of other libraries, which call CUDA's functions; `None` if those calls are the program's
    /// own.
    pub fn of_others(&self) -> Option<&PoolStats> {
        self.is_allocator().then_some(&self.of_cuda)
    }

    /// Whether the program calls the allocator's own functions.
    fn is_allocator(&self) -> bool {
        let asked = &self.counters.all.allocation;
        TORCH_ALLOCATOR.load(Relaxed) || asked.allocated + asked.current + asked.peak > 0
    }

    /// The most bytes reserved since the peaks were last reset.
    pub fn peak_reserved_bytes(&self) -> u64 {
        self.counters.all.reserved_bytes.peak
    }
}

impl Device {
    /// Resets each peak to the current value.
    pub fn reset_peaks(&self) {
        let mut state = self.lock_flushed();
        state.pool.counters_mut().reset_peaks();
        state.pool.reset_arena_peaks();
    }

    /// Resets the sums of all allocations and frees to 0.
    pub fn reset_accumulated(&self) {
        let mut state = self.lock_flushed();
        state.pool.counters_mut().reset_accumulated();
        state.pool.reset_arena_sums();
    }

    /// The figures now.
    pub fn figures(&self) -> Figures {
        self.figures_of(&self.lock_flushed())
    }

    /// The figures now. `None` if the device stays locked for `patience`.
    pub fn figures_within(&self, patience: Duration) -> Option<Figures> {
        let mut state = self.state.try_lock_for(patience)?;
        self.flush_caches(&mut state);
        Some(self.figures_of(&state))
    }

    fn figures_of(&self, state: &State) -> Figures {
        Figures {
            counters: state.pool.stats(),
            of_cuda: state.pool.stats_of(Origin::Cuda),
            calls: Call::ALL
                .iter()
                .map(|call| (*call, self.ledger.figures(*call)))
                .collect(),
            largest_free: state.pool.largest_free(),
            addresses: state.pool.addresses(),
            node_bytes: state.pool.node_bytes(),
            limit: self.limit(),
        }
    }
}
