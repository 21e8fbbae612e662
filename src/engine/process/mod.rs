//! The process: its one allocator, its settings and statistics, start, fork and exit.
//!
//! In layers, the lowest first: [`state`], [`settings`], [`ready_devices`], [`cuda_calls`]; [`allocator`];
//! [`stats`] and the files that write them; `purge_timer` and `stats_triggers`; [`exit`]; [`startup`].

pub mod allocator;
pub mod cuda_calls;
pub mod exit;
mod launcher;
mod purge_timer;
pub mod ready_devices;
pub mod settings;
pub mod startup;
pub mod state;
pub mod stats;
pub mod stats_file;
pub mod stats_output;
pub mod stats_path;
mod stats_triggers;
