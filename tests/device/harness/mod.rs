//! What the tests share: a GPU, random numbers, random programs, and a second account of the counters.

pub mod accounts;
pub mod gpu;
pub mod random;
pub mod random_program;
