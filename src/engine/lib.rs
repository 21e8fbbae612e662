//! All of concertina except its C entry points, in layers that point one way:
//!
//! entry points (`src/entry`, in the shared library) → [`runtime`] → [`core`] and [`driver`].
//!
//! [`core`] decides which bytes are whose and neither locks nor calls CUDA; [`driver`] is the CUDA
//! driver API as a table of functions, real or simulated; [`runtime`] puts a lock and a driver
//! around each device's pool, reads the settings and writes the statistics.
//! `array` and `zeroed` are memory from the system (`pages`) for the pool's own lists.

mod array;
pub mod core;
pub mod driver;
mod pages;
pub mod runtime;
mod zeroed;
