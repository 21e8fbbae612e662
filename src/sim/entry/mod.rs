//! The driver functions, by subject. Each checks its arguments in the real driver's order, acts on the
//! machine, and writes its outputs only on success.
//!
//! # Safety
//! All of them ask of their callers what the CUDA driver API asks: outputs are null or may be
//! written, inputs may be read, host memory of a copy stays good until the copy is done, and a host
//! function may be called with its argument from any thread that uses the machine, even within a
//! driver call, and calls no driver function itself.
#![allow(non_snake_case, clippy::missing_safety_doc)]

mod context;
mod copy;
mod device;
mod event;
mod fill;
mod graph;
mod host;
mod mapping;
mod memory;
mod module;
mod pointer;
mod pool;
mod share;
mod stream;
mod work;

pub use context::*;
pub use copy::*;
pub use device::*;
pub use event::*;
pub use fill::*;
pub use graph::*;
pub use host::*;
pub use mapping::*;
pub use memory::*;
pub use module::*;
pub use pointer::*;
pub use pool::*;
pub use share::*;
pub use stream::*;
pub use work::*;
