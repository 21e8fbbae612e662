//! What any layer may use: locks, threads, messages, memory from the system.

pub mod fork;
pub mod hash;
pub(crate) mod lock;
pub mod message;
pub mod reentrancy;
pub mod secret;
pub(crate) mod semaphore;
pub(crate) mod single_flight;
pub mod thread;
pub(crate) mod zeroed;
