//! The contexts that are current on a thread, per machine, and the thread's own number.
//!
//! Nothing here has a destructor: driver calls made by destructors of a thread's variables must
//! still find what was current, as they do with the real driver.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    /// The stack of (machine, device); the last entry of a machine is its current context.
    static CURRENT: ManuallyDrop<RefCell<Vec<(u64, usize)>>> =
        const { ManuallyDrop::new(RefCell::new(Vec::new())) };

    static THREAD: u64 = {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
}

/// A number of this thread's own.
pub(crate) fn thread() -> u64 {
    THREAD.with(|number| *number)
}

/// The device whose context is current on this thread.
pub(crate) fn current(machine: u64) -> Option<usize> {
    CURRENT.with(|stack| {
        let stack = stack.borrow();
        stack
            .iter()
            .rev()
            .find(|(of, _)| *of == machine)
            .map(|(_, device)| *device)
    })
}

pub(crate) fn push(machine: u64, device: usize) {
    CURRENT.with(|stack| stack.borrow_mut().push((machine, device)));
}

pub(crate) fn pop(machine: u64) -> Option<usize> {
    CURRENT.with(|stack| {
        let mut stack = stack.borrow_mut();
        let last = stack.iter().rposition(|(of, _)| *of == machine)?;
        Some(stack.remove(last).1)
    })
}
