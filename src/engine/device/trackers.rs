//! Tells the program's trackers of memory events (PyTorch's `attachAllocatorTraceTracker`).
//!
//! Trackers are told the events that a history records, whether or not one does: they are kept under the device's
//! lock, in order, and told once it is released, by one thread at a time. A thread that has caused events waits
//! until they are told, as under PyTorch's own allocator: a segment that a tracker registers with a library has to
//! be registered before it is used. A tracker may allocate: the same thread tells what comes of it at once. It may
//! throw a C++ exception, which goes through here to PyTorch; the events after it are told with the next.

use crate::device::Device;
use crate::device::history::{self, Entry};
use crate::util::fork;
use std::sync::OnceLock;

/// Calls each tracker with an event of the device, by its number.
type Tell = fn(i32, &Entry);

static TELL: OnceLock<Tell> = OnceLock::new();

/// Has `tell` called for each event from now on; the caller then has every device follow
/// ([`Device::follow_trackers`]).
pub(crate) fn set_tell(tell: Tell) {
    let _ = TELL.set(tell);
    history::set_tracked();
}

impl Device {
    /// Notes events from now on, for trackers.
    pub(crate) fn follow_trackers(&self) {
        let mut state = self.lock_flushed();
        state.pool.event_log_mut().enable(true);
        for segment in state.pool.segments() {
            let pool = state.pool_of(segment.arena);
            if pool != (0, 0) {
                state.history.add_segment(segment.blocks[0].address, pool);
            }
        }
    }

    /// Tells the trackers, if there are any, what has happened. No lock is held; a tracker may throw through here.
    #[inline]
    pub fn tell_trackers(&self) {
        if history::is_tracked() {
            self.tell_events();
        }
    }

    #[cold]
    fn tell_events(&self) {
        let Some(tell) = TELL.get().filter(|_| !fork::in_forked_child()) else {
            return;
        };
        let _turn = self.telling.lock();
        drop(self.lock_recorded(0, &None));
        loop {
            // In a statement of its own, so that the lock is released.
            let event = self.state.lock().history.pop_untold();
            let Some(event) = event else { return };
            tell(self.ordinal, &event);
        }
    }
}
