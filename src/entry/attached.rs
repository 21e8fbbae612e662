//! Whether PyTorch's current allocator is this library.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static ATTACHED: AtomicBool = AtomicBool::new(false);

/// Whether it is. One relaxed load.
pub fn is_attached() -> bool {
    ATTACHED.load(Relaxed)
}

/// It is from now on.
pub fn set_attached() {
    ATTACHED.store(true, Relaxed);
}
