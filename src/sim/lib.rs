//! A simulated GPU in host memory, with the functions of the CUDA driver API.
//!
//! Every function of the driver that concertina calls is here at the crate root, under its own name and with
//! its own arguments, as an ordinary Rust `unsafe extern "C" fn`. They are not exported: a shared library
//! that links this crate must not define a second `cuMemAlloc_v2`. [`functions()`] is the table of them.
//!
//! A [`Machine`] has one such GPU or several. It behaves as the real driver does; [`Config`] can take
//! features away. It runs work late on purpose ([`Pace`]), fails any call on demand ([`Machine::fail`]), and
//! records as *violations* what on a real GPU would be rare and hard to find: memory reused before its last
//! use is ordered, memory unmapped under running work, handles used after their end, synchronising calls
//! during a capture ([`Machine::violations`]).
//!
//! Layers, each using only those before it:
//!
//! 1. `slab`, `interval`, `clock`, `page`: containers, and the system calls for address ranges
//! 2. `shadow`, `memory`: the race detector's record of accesses, and physical and virtual memory
//! 3. `stream`, `event`, `work`, `graph`, `pace`, `failure`, `context`: the driver's other objects
//! 4. `state`, `order`, `run`: one machine's state, enqueueing, executing
//! 5. `machine`, `call`, `entry`: the interface for tests, and the driver functions

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
