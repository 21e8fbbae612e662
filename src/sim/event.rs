//! Events: a place in a stream's order, and all that comes before it.

use crate::clock::Clock;
use crate::graph::Place;

/// One event of `cuEventCreate`.
#[derive(Debug, Default)]
pub(crate) struct Event {
    pub device: usize,
    /// Made for other processes too.
    pub interprocess: bool,
    /// Made with timing.
    pub timed: bool,
    /// The stream slot and place of the latest record.
    pub recorded: Option<(u32, u64)>,
    /// The latest record was within a capture, here.
    pub captured: Option<Place>,
    /// How many pieces of work the machine had been given by then.
    pub ordinal: u64,
    /// What comes before that record.
    pub clock: Clock,
}
