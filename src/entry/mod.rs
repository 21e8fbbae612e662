//! The C entry points: for PyTorch (`torch`), for programs that call CUDA (`preload`), and for everyone.

mod attached;
mod launched_by_run;
mod panic_guard;
mod preload;
mod python;
mod start;
mod stats_functions;
mod torch;
