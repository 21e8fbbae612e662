//! The stand-ins for CUDA's libraries keep CUDA's promises towards a C program, however late the
//! simulated GPU works.

mod library;

use library::{Scratch, output, standin};
use std::path::Path;
use std::process::Command;

/// Runs a C program of `tests/standin` with the runtime of each CUDA, at several paces.
fn as_promised(name: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let scratch = Scratch::new(name);
    for major in ["12", "13"] {
        let program = scratch.path().join("program");
        output(
            Command::new("cc")
                .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"])
                .arg(format!("-DVERSION={major}000"))
                .arg(root.join(format!("tests/standin/{name}.c")))
                .arg("-o")
                .arg(&program)
                .arg("-L")
                .arg(standin())
                .arg(format!("-l:libcudart.so.{major}"))
                .arg("-lcuda"),
        );
        for pace in ["held", "late:1000000"] {
            let said = output(
                Command::new(&program)
                    .env("LD_LIBRARY_PATH", standin())
                    .env("STANDIN_DEVICES", "2")
                    .env("STANDIN_MEMORY_MB", "64")
                    .env("STANDIN_PACE", pace),
            );
            assert_eq!(said, "as promised\n", "CUDA {major}, pace {pace}");
        }
    }
}

#[test]
fn a_c_program_finds_cuda_as_promised() {
    as_promised("check");
}

#[test]
fn two_processes_share_memory() {
    as_promised("share");
}

#[test]
fn a_mistake_in_the_settings_ends_the_process() {
    let check = |name: &str, value: &str, expected: &str| {
        let answer = Command::new("python3")
            .args(["-c", "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)"])
            .env("LD_LIBRARY_PATH", standin())
            .env(name, value)
            .output()
            .expect("python3 runs");
        let said = String::from_utf8_lossy(&answer.stderr).into_owned();
        assert!(!answer.status.success(), "{name}={value} was accepted");
        assert!(said.contains(expected), "{name}={value}: {said}");
    };
    check("STANDIN_DEVICES", "65", "from 0 to 64");
    check("STANDIN_PACE", "slow", "late:N");
    check("STANDIN_FAIL", "cuNothing:1:2", "cuNothing:1:2");
}
