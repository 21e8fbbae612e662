//! What any layer may use: locks, threads, messages, memory from the system.

pub(crate) mod lock;
pub mod message;
pub mod reentrancy;
pub(crate) mod semaphore;
pub(crate) mod single_flight;
pub(crate) mod thread;
pub(crate) mod zeroed;
