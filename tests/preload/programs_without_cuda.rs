//! Programs that do not use CUDA, and programs in which the library is disabled.

use crate::harness::same;
use crate::harness::{Case, Trial};
use crate::library::library;
use std::process::Command;

#[test]
fn programs_without_cuda_run_unchanged() {
    for (program, arguments) in [
        ("ls", ["/", "-a"]),
        ("bash", ["-c", "echo $((6 * 7)); exec true"]),
        (
            "python3",
            [
                "-c",
                "import ctypes, subprocess, threading\n\
                 print(ctypes.CDLL(None).getppid() > 0)\n\
                 print(subprocess.run(['echo', 'child'], capture_output=True).stdout)",
            ],
        ),
    ] {
        let said = same(|| {
            let mut command = Command::new(program);
            command.args(arguments);
            command
        });
        assert!(!said.is_empty(), "{program}");
    }
}

#[test]
fn disabled_library_serves_nothing() {
    let case = Case::of("runtime_symbols");
    let trial = Trial::new("disabled", &case);
    let (bare, _) = trial.run(None, &[]);
    let disabled = [("CONCERTINA_DISABLE", "1")];
    assert_eq!(trial.run(Some(library()), &disabled), (bare.clone(), 0));
    let enabled = [("CONCERTINA_DISABLE", "0")];
    assert_eq!(trial.run(Some(library()), &enabled), (bare, 11));
}
