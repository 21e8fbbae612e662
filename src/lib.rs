//! The shared library: C entry points, and nothing else.
//!
//! Layers, each of which knows only those to its right:
//!
//! ```text
//! entry ──▶ runtime ──▶ core
//!              ╰──────▶ driver
//! ```
//!
//! *entry* (here) checks what C hands over, calls, maps the result and lets no panic out. *runtime*
//! holds devices, locks, settings, statistics, start and exit; *core* is the pool, which neither
//! locks nor calls CUDA; *driver* is the table of the driver's functions. These three are the crate
//! `concertina-engine`, which the command and the tests link as well: entry points stay out of their
//! processes.

mod entry;
