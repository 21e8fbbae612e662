//! All of concertina except its C entry points, in layers that point one way:
//!
//! entry points (`src/entry`, in the shared library) → [`runtime`] → [`core`] and [`driver`].
//!
//! [`core`] decides which bytes are whose and neither locks nor calls CUDA; [`driver`] is the CUDA
//! driver API as a table of functions, real or simulated; [`runtime`] puts a lock and a driver
//! around each device's pool, reads the settings and writes the statistics.
//! `zeroed` is memory from the system for the pool's own lists.

pub mod core;
pub mod driver;
pub mod runtime;
mod zeroed;
