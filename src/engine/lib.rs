//! All of concertina except its C entry points, in layers that import in one direction:
//!
//! entry points (`src/entry`, in the shared library) → [`process`] → [`ipc`] → [`device`] → [`core`],
//! [`driver`], [`settings`] and [`util`].
//!
//! [`core`] is the pool of one device: policy only, it neither locks nor calls CUDA. [`driver`] is the CUDA
//! driver API as a table of functions. [`device`] puts a lock and a driver around each device's pool. [`ipc`]
//! shares device memory with other processes. [`process`] has the process's one allocator, its settings and
//! statistics, start and exit.

pub mod core;
pub mod device;
pub mod ipc;
pub mod process;
pub mod settings;
pub mod util;

pub use concertina_driver as driver;
