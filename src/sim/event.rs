//! Events: a position in a stream, and the work that comes before it.

use crate::clock::Clock;
use crate::graph::Place;

/// One event of `cuEventCreate`.
#[derive(Debug, Default)]
pub(crate) struct Event {
    pub device: usize,
    /// Created for other processes, too.
    pub interprocess: bool,
    /// Created with timing.
    pub timed: bool,
    /// The stream slot and sequence number of the latest record.
    pub recorded: Option<(u32, u64)>,
    /// Where the latest record is in a capture, if it was captured.
    pub captured: Option<Place>,
    /// The number of items that the machine had enqueued by then.
    pub ordinal: u64,
    /// The work that comes before that record.
    pub clock: Clock,
}
