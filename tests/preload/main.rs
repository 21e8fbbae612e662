//! The library preloaded into programs (`LD_PRELOAD`, `concertina run`).
//!
//! The programs of `tests/programs/preload` run bare and preloaded, against stand-ins for CUDA's libraries,
//! and have to print the same, but for addresses and time. Each also runs with a library in which the
//! behaviour that it guards is broken, and has to print something else then. Programs that do not use CUDA
//! run unchanged.

mod captures;
mod cuda_malloc;
mod dlsym_and_proc_address;
mod driver_failures;
mod fork_and_exit;
mod free_relaxed;
mod harness;
mod ipc;
#[path = "../library/mod.rs"]
mod library;
mod limits;
mod malloc_async;
mod mem_info;
mod out_of_memory;
mod pointer_attributes;
mod programs_without_cuda;
mod purge;
mod run_command;
mod several_gpus;
mod soak;
mod statistics;
mod teardown_and_reset;
mod threads;
mod vmm_cache;

use std::fs;
use std::path::Path;

/// `scripts/test-preload.sh` runs on a GPU what the programs say in their first lines (`Run:`): the rows of
/// all tables here.
#[test]
fn program_run_lines_agree_with_the_tables() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/preload");
    let mut said = Vec::new();
    for entry in fs::read_dir(directory).expect("a directory") {
        let text = fs::read_to_string(entry.expect("an entry").path()).expect("text");
        let run = |line: &str| Some(line.split_once("* Run: ")?.1.to_string());
        said.extend(text.lines().filter_map(run));
    }
    let tables = [
        captures::runs(),
        cuda_malloc::runs(),
        dlsym_and_proc_address::runs(),
        fork_and_exit::runs(),
        ipc::runs(),
        malloc_async::runs(),
        mem_info::runs(),
        out_of_memory::runs(),
        pointer_attributes::runs(),
        purge::runs(),
        several_gpus::runs(),
        statistics::runs(),
        teardown_and_reset::runs(),
        threads::runs(),
        vmm_cache::runs(),
    ];
    let mut run = tables.concat();
    run.sort();
    run.dedup();
    said.sort();
    assert_eq!(said, run);
}
