//! Whether a call is the program's own: not one that the driver, or a tool that watches it, makes while it
//! works for us.

use super::breaks::is_broken;
use concertina_engine::util::reentrancy;

pub use reentrancy::{Inside, is_inside};

/// `None` where the thread is inside already.
#[inline]
pub fn enter() -> Option<Inside> {
    let inside = reentrancy::enter();
    (!inside.was_inside() || is_broken("inside")).then_some(inside)
}
