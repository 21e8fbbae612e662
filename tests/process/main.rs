//! A process with the library in it: how it starts, forks, receives signals and exits, and its statistics
//! file.
//!
//! The processes are real, the library is the built one, the GPU is simulated.

mod exit;
mod fork;
mod harness;
#[path = "../library/mod.rs"]
mod library;
mod purge_timer;
mod python;
mod settings_mistakes;
mod signals;
mod start;
mod statistics_file;
mod stats_triggers;
