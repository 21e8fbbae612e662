//! A lock and a driver around each device's pool; settings, statistics, start and exit.

mod asked;
pub mod calls;
pub mod capture;
mod device;
pub mod dump;
mod gpu;
mod graph;
mod helper;
pub mod history;
mod idle;
pub mod inside;
pub mod kept;
mod lasting;
mod ledger;
pub mod lifecycle;
pub mod likely;
pub mod live_streams;
mod lock;
pub mod message;
mod registry;
mod semaphore;
pub mod settings;
pub mod sharing;
mod shelf;
pub mod stats;
mod together;

pub use crate::core::Tuning;
pub use crate::core::{Allocation, Found, Refusal, Shortage, StreamKey};
pub use device::{
    Device, Figures, NotRestored, OutOfMemory, PoolId, Route, Shared, Supplier, UnknownPointer,
    Usage,
};
pub use gpu::thread_number;
pub use lasting::Lasting;
pub use ledger::{Call, CallFigures};
pub use registry::{
    Allocator, allocator, allocator_in_use, at_hand, change_settings, check_settings, is_uncached,
    keep_at_hand, process_settings, record_history, say_how_by, set_uncached, use_own_settings,
};
