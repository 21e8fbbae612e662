//! The C functions, by what they serve.

mod guard;
mod launched;
mod preload;
mod python;
mod start;
mod stats;
mod torch;
