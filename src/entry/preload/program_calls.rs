//! Which calls are the program's own: not those that the driver, or a tool that watches it, makes while this library
//! calls the driver.

use super::mutation;
use super::preloaded;
use concertina_engine::util::{fork, reentrancy};

pub use reentrancy::{Inside, is_inside};

/// Marks the thread as inside this library. `None` if it is already: the call is not the program's.
#[inline]
pub fn enter() -> Option<Inside> {
    let inside = reentrancy::enter();
    (!inside.was_inside() || mutation::is_on("inside")).then_some(inside)
}

/// [`enter`] for a hook. `None` also where hooks do nothing: without preloading, and in a child forked from a
/// process that had used the GPU.
#[inline]
pub fn enter_hook() -> Option<Inside> {
    if !preloaded::is_on() || fork::in_forked_child() {
        return None;
    }
    enter()
}
