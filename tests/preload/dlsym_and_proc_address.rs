//! How programs reach the driver's functions: linked symbols, `dlsym`, `dlopen`, `cuGetProcAddress`.

use crate::harness::{Case, Trial, cases, compare, compile, same};
use crate::library::{Scratch, library, standin};
use std::fs;
use std::process::Command;

cases! {
    // Of each width the first pitched allocation is the driver's own.
    runtime_linked_by_symbol_reaches_the_pool: runs "runtime_symbols", pool_serves 11, notices_broken ["dlsym", "proc_address", "pool", "pitch"];
    driver_linked_by_symbol_reaches_the_pool: runs "driver_symbols", pool_serves 5, notices_broken ["pool"];
    dlsym_of_the_drivers_functions_reaches_the_pool: runs "dlsym_driver symbols", pool_serves 4, notices_broken ["dlsym"];
    proc_address_v1_reaches_the_pool: runs "dlsym_driver v1", pool_serves 4, notices_broken ["dlsym", "proc_address"];
    proc_address_v2_reaches_the_pool: runs "dlsym_driver v2", pool_serves 4, notices_broken ["dlsym", "proc_address"];
    proc_address_by_runtime_entry_points_reaches_the_pool: runs "runtime_entry_point", pool_serves 3, notices_broken ["dlsym", "proc_address"];
    dlopen_of_the_runtime_reaches_the_pool: runs "dlopen_runtime", pool_serves 3, notices_broken ["dlsym"];
}

#[test]
fn dlsym_needs_no_memory() {
    let scratch = Scratch::new("preload-allocator");
    let program = compile(&scratch, "dlsym_in_own_allocator.c", "allocator", &[]);
    assert_eq!(same(|| Command::new(&program)), "own allocator, 0 nested\n");
}

#[test]
fn dlsym_needs_no_system_call() {
    let scratch = Scratch::new("preload-seccomp");
    let program = compile(&scratch, "dlsym_under_seccomp.c", "seccomp", &[]);
    assert_eq!(same(|| Command::new(&program)), "found\nfound\n");
}

#[test]
fn dlsym_of_other_symbols_is_the_real_one() {
    let scratch = Scratch::new("preload-dlsym");
    let shared = ["-shared", "-fPIC"];
    let local = compile(&scratch, "dlsym_library.c", "liblocal.so", &shared);
    let linked = compile(&scratch, "dlsym_library.c", "liblinked.so", &shared);
    let link = linked.to_str().expect("a path of text");
    let program = compile(&scratch, "dlsym.c", "dlsym", &["-Wl,--no-as-needed", link]);
    let said = same(|| {
        let mut command = Command::new(&program);
        command.arg(&local).arg(&linked);
        command
    });
    for line in [
        "printf next: libc.so.6, no error",
        "cuda-like: nowhere, an error",
        "next to the program: liblinked.so, no error",
        "a library's own: liblocal.so, no error",
        "a local library, next: nowhere, an error",
        "a local library, its own name: liblinked.so, no error",
        "another's: liblocal.so, no error",
    ] {
        assert!(said.lines().any(|it| it == line), "no line {line}:\n{said}");
    }
}

#[test]
fn runtime_of_cuda_12_reaches_the_pool() {
    let case = Case {
        runtime: "-l:libcudart.so.12",
        pool_serves: Some(11),
        ..Case::of("runtime_symbols")
    };
    compare("runtime_of_cuda_12_reaches_the_pool", &case);
}

/// Without a driver a program gets the same errors preloaded as bare. A file that the linker cannot load
/// stands in for `libcuda.so.1`.
#[test]
fn dlsym_without_a_driver() {
    for command in ["dlsym_driver symbols", "dlsym_driver v2", "dlopen_runtime"] {
        let case = Case::of(command);
        let trial = Trial::new("driverless", &case);
        fs::write(trial.scratch.path().join("libcuda.so.1"), "no driver\n").expect("a file");
        let hidden = trial.scratch.path().to_str().expect("text");
        let runtime = trial.scratch.path().join("libcudart.so.13");
        fs::copy(standin().join("libcudart.so.13"), runtime).expect("a library");
        let variables = [("LD_LIBRARY_PATH", hidden)];
        let (bare, _) = trial.run(None, &variables);
        let preloaded = trial.run(Some(library()), &variables);
        assert_eq!(preloaded, (bare, 0), "{command}");
    }
}
