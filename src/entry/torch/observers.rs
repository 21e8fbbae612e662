//! Who observes PyTorch's blocks: flags that every allocation reads.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// `torch.profiler`. Set until `attach.py` watches profilers start: one may have started unseen.
pub const PROFILER: u8 = 1;
/// `torch.cuda._gpu_trace`.
pub const GPU_TRACE: u8 = 2;
/// Trackers of memory events that C++ has attached.
pub const TRACKERS: u8 = 4;

/// Observers of blocks other than the memory history, a bit each.
static OBSERVERS: AtomicU8 = AtomicU8::new(PROFILER);

/// Notes whether there may be such an observer from now on.
pub fn set_observer(observer: u8, present: bool) {
    match present {
        true => OBSERVERS.fetch_or(observer, Relaxed),
        false => OBSERVERS.fetch_and(!observer, Relaxed),
    };
}

/// Whether there may be one of these observers.
#[inline]
pub fn may_have_observer(observers: u8) -> bool {
    OBSERVERS.load(Relaxed) & observers != 0
}
