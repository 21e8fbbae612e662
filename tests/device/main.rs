//! The pool on a GPU: what it promises, at the level of a device.
//!
//! Built once, the binary runs on the simulated GPU and, with `CONCERTINA_TEST_DRIVER=cuda`, on the
//! cards of the machine (`scripts/test-gpu.sh`). Tests in modules called `sim_only` need what no
//! card has: failures on demand, control over lateness, a detector of races; the script leaves them
//! out. Each test ends with the pool's invariants holding and all memory back.

mod address_lookup;
mod capture_reuse;
mod captures;
mod counters;
mod cross_stream;
mod device_reset;
mod driver_failures;
mod empty_cache;
mod expandable_segments_off;
mod fit_and_coalesce;
mod free_relaxed;
mod harness;
mod limit_never_exceeded;
mod limits;
mod many_private_pools;
mod misuse;
mod out_of_memory;
mod preallocate;
mod private_pool_driver_failures;
mod private_pools;
mod purge;
mod random_runs;
mod record_stream;
mod remap;
mod remap_under_a_limit;
mod restore;
mod stream_cache;
mod stream_handles;
mod supplier;
