//! A thread's state: its stack of current contexts for each machine, its capture mode, its number.
//!
//! Nothing here has a destructor: driver calls made by destructors of thread-locals still find the current
//! context, as they do with the real driver.

use std::cell::{Cell, RefCell};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    /// The stack of (machine, context); the last entry of a machine is its current context.
    static CURRENT: ManuallyDrop<RefCell<Vec<(u64, usize)>>> =
        const { ManuallyDrop::new(RefCell::new(Vec::new())) };

    static THREAD: u64 = {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
}

thread_local! {
    /// `CUstreamCaptureMode`; global (0) at first.
    static CAPTURE_MODE: Cell<u32> = const { Cell::new(0) };
}

/// Sets the calling thread's capture mode and returns the one before.
pub(crate) fn exchange_capture_mode(mode: u32) -> u32 {
    CAPTURE_MODE.with(|current| current.replace(mode))
}

/// The calling thread's capture mode.
pub(crate) fn capture_mode() -> u32 {
    CAPTURE_MODE.with(Cell::get)
}

/// This thread's number, unique in the process.
pub(crate) fn thread() -> u64 {
    THREAD.with(|number| *number)
}

/// Contexts have numbers: a primary context its device's number, one that a program created its device's
/// number plus a multiple of this.
pub(crate) const DEVICES: usize = 64;

/// The number of the context that is current on this thread.
pub(crate) fn current(machine: u64) -> Option<usize> {
    CURRENT.with(|stack| {
        let stack = stack.borrow();
        stack
            .iter()
            .rev()
            .find(|(of, _)| *of == machine)
            .map(|(_, context)| *context)
    })
}

pub(crate) fn push(machine: u64, context: usize) {
    CURRENT.with(|stack| stack.borrow_mut().push((machine, context)));
}

pub(crate) fn pop(machine: u64) -> Option<usize> {
    CURRENT.with(|stack| {
        let mut stack = stack.borrow_mut();
        let last = stack.iter().rposition(|(of, _)| *of == machine)?;
        Some(stack.remove(last).1)
    })
}
