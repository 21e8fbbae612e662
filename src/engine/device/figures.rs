//! What is counted of a device.

use crate::core::{Origin, PoolStats};
use crate::device::ledger::{Call, CallFigures};
use crate::device::{Device, State};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

/// The library is PyTorch's allocator.
static TORCH_ALLOCATOR: AtomicBool = AtomicBool::new(false);

/// From now on the library is PyTorch's allocator: what CUDA's functions allocate belongs to other libraries,
/// even before PyTorch has allocated anything.
pub fn set_torch_allocator() {
    TORCH_ALLOCATOR.store(true, Relaxed);
}

/// What a device's pool looks like at one moment.
#[derive(Clone, Debug)]
pub struct Figures {
    /// PyTorch's counters and ours, with the blocks that the allocator's own functions were asked for.
    pub counters: PoolStats,
    /// The same with the blocks that CUDA's functions were asked for.
    pub of_cuda: PoolStats,
    /// Count and time of each driver call.
    pub calls: Vec<(Call, CallFigures)>,
    /// Bytes of the largest free range.
    pub largest_free: u64,
    /// Bytes of addresses reserved.
    pub addresses: u64,
    /// Bytes of host memory for what is known of each block.
    pub node_bytes: usize,
    /// The limit in bytes, if one is set.
    pub limit: Option<u64>,
}

impl Figures {
    /// Bytes held from the driver now, whatever they are for.
    pub fn reserved_bytes(&self) -> u64 {
        self.counters.all.reserved_bytes.current
    }

    /// What the statistics show as the program's: what it asked of the allocator, or where it asked nothing
    /// of that, its calls of CUDA's functions.
    pub fn of_program(&self) -> &PoolStats {
        match self.is_allocator() {
            true => &self.counters,
            false => &self.of_cuda,
        }
    }

    /// Beside it, what other libraries had by CUDA's functions; `None` where those are the program's calls.
    pub fn of_others(&self) -> Option<&PoolStats> {
        self.is_allocator().then_some(&self.of_cuda)
    }

    /// Whether the library is PyTorch's allocator, or another program's.
    fn is_allocator(&self) -> bool {
        let asked = &self.counters.all.allocation;
        TORCH_ALLOCATOR.load(Relaxed) || asked.allocated + asked.current + asked.peak > 0
    }

    /// The most that were held since the peaks were last reset.
    pub fn peak_reserved_bytes(&self) -> u64 {
        self.counters.all.reserved_bytes.peak
    }
}

impl Device {
    /// Sets the peaks to what there is now.
    pub fn reset_peaks(&self) {
        let mut state = self.lock_flushed();
        state.pool.counters_mut().reset_peaks();
        state.pool.reset_arena_peaks();
    }

    /// Sets the sums of what was ever allocated and freed to 0.
    pub fn reset_accumulated(&self) {
        let mut state = self.lock_flushed();
        state.pool.counters_mut().reset_accumulated();
        state.pool.reset_arena_sums();
    }

    /// What the pool looks like now.
    pub fn figures(&self) -> Figures {
        self.figures_of(&self.lock_flushed())
    }

    /// The same, unless another thread keeps the device locked for so long.
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
