//! The shared library `libconcertina.so`: C entry points over the crate `concertina-engine`.
//!
//! The layers, each of which imports only from those to its right (`tests/layers.rs` checks it):
//!
//! ```text
//! entry ──▶ process ──▶ ipc ──▶ device ──▶ core, settings, util
//!                                  ╰─────▶ driver
//! ```
//!
//! *entry* (here) validates what C passes, calls the engine, maps the result and lets no panic out. *process* has the
//! one allocator of the process, its settings and statistics, start, fork and exit; *ipc* shares device
//! memory with other processes; *device* puts a lock and a driver around each device's pool; *core* is the
//! pool: policy, without locks and CUDA calls; *driver* is the table of the CUDA driver's functions. The
//! command and the tests link the engine without the entry points, which interpose nothing in their
//! processes.

mod entry;
