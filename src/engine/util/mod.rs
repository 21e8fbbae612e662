//! Tools for all layers: locks, threads, messages, zeroed memory, hashing, the state after a fork.

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
