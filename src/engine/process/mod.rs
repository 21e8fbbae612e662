//! The process: its one allocator, statistics as JSON and as a file, start, fork and exit.

pub mod allocator;
pub mod cuda_calls;
pub mod lifecycle;
mod purge_timer;
pub mod stats;
pub mod stats_file;
mod stats_triggers;
