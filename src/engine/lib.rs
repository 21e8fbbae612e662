//! All of concertina except its C entry points, in layers that point one way:
//!
//! entry points (`src/entry`, in the shared library) → [`process`] → [`ipc`] → [`device`] → [`core`], [`driver`],
//! [`settings`] and [`util`].
//!
//! [`core`] decides which bytes are whose and neither locks nor calls CUDA; [`driver`] is the CUDA driver API as a
//! table of functions; [`device`] puts a lock and a driver around each device's pool; [`ipc`] shares its memory
//! with other processes; [`process`] has the process's one allocator and its statistics.

pub mod core;
pub mod device;
pub mod ipc;
pub mod process;
pub mod settings;
pub mod util;

pub use concertina_driver as driver;
