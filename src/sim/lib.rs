//! A simulated GPU in host memory, behind the CUDA driver API's own functions.
//!
//! Every function of the driver that concertina calls is here at the crate root, under its own name
//! and with its own arguments, as an ordinary Rust `unsafe extern "C" fn` (not exported: whoever
//! links this crate into a shared library must not hand out a second `cuMemAlloc_v2`). A table of
//! driver functions filled from these runs with no GPU.
//!
//! A [`Machine`] is one such GPU, or several. It keeps the promises of the real driver, which
//! [`Config`] can narrow; runs work late on purpose ([`Pace`]); fails any call on demand
//! ([`Machine::fail`]); and records as *violations* what a real GPU would punish rarely and late:
//! memory used again before its last use is ordered, memory unmapped under running work, handles
//! used after their end, synchronising calls during a capture ([`Machine::violations`]).
//!
//! Layers, each using only those before it:
//!
//! 1. `slab`, `interval`, `clock`, `page`: containers, and the system calls for address ranges
//! 2. `shadow`, `memory`: who touched what, and physical and virtual memory
//! 3. `stream`, `event`, `work`, `graph`, `pace`, `failure`, `context`: the other nouns
//! 4. `state`, `order`, `run`: one machine's state, what is enqueued, what executes
//! 5. `machine`, `call`, `entry`: the handle for tests, and the driver functions

#![warn(missing_docs)]

mod call;
mod clock;
mod config;
mod context;
mod entry;
mod event;
mod failure;
mod functions;
mod graph;
mod interval;
mod machine;
mod memory;
mod order;
mod pace;
mod page;
mod run;
mod shadow;
mod slab;
mod state;
mod stream;
mod work;

pub use config::Config;
pub use entry::*;
pub use failure::FUNCTIONS;
pub use functions::functions;
pub use machine::{Bound, Machine};
pub use pace::Pace;
