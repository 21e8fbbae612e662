//! The C functions, by what they serve.

mod launched_by_run;
mod panic_guard;
mod preload;
mod python;
mod start;
mod stats_functions;
mod torch;
