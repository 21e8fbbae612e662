//! The pool on a GPU: what it promises, at the level of a device.
//!
//! Built once, the binary runs on the simulated GPU and, with `CONCERTINA_TEST_DRIVER=cuda`, on the
//! cards of the machine (`scripts/test-gpu.sh`). Tests in modules called `sim_only` need what no
//! card has: failures on demand, control over lateness, a detector of races; the script leaves them
//! out. Each test ends with the pool's invariants holding and all memory back.

mod allocations;
mod aside;
mod basics;
mod branches;
mod checkpoint;
mod counters;
mod cross_stream;
mod faults;
mod gpu;
mod idle;
mod limits;
mod many_pools;
mod never_exceeded;
mod plain;
mod private;
mod random;
mod random_runs;
mod red;
mod reset;
mod runner;
mod shelves;
mod streams;
mod supplied;
mod unseen;
