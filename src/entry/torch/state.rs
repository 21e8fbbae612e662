//! Flags that every allocation reads: whether PyTorch's allocator is this library, and who observes blocks.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};

static ATTACHED: AtomicBool = AtomicBool::new(false);

/// Whether PyTorch's current allocator is this library.
pub fn is_attached() -> bool {
    ATTACHED.load(Relaxed)
}

/// PyTorch's current allocator is this library from now on.
pub fn set_attached() {
    ATTACHED.store(true, Relaxed);
}

/// `torch.profiler`. Set until `attach.py` watches profilers start: one may have started unseen.
pub const PROFILER: u8 = 1;
/// `torch.cuda._gpu_trace`.
pub const GPU_TRACE: u8 = 2;

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
