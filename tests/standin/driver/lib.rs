//! A stand-in for `libcuda.so.1`: the functions of the simulated GPU under the driver's own names,
//! for programs that are to run unchanged on a machine without a GPU. `scripts/standin.sh` links it.
//!
//! Copies and fills move bytes; kernels only have their place in a stream's order. What a machine is
//! like comes from the environment; `settings.rs` lists the variables.

mod function;
mod lookup;
mod machine;
mod settings;
