//! The library preloaded into programs: those that never touch CUDA run as without it.

mod library;

use library::{Scratch, library, output};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Compiles a program of `tests/programs/preload`, or with `-shared` a library.
fn compile(scratch: &Scratch, source: &str, name: &str, options: &[&str]) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = scratch.path().join(name);
    output(
        Command::new("cc")
            .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"])
            .arg(root.join("tests/programs/preload").join(source))
            .arg("-o")
            .arg(&file)
            .args(options)
            .args(["-ldl", "-pthread"]),
    );
    file
}

/// Runs a command, with the library preloaded or bare.
fn run(command: &mut Command, preload: Option<&Path>) -> Output {
    for name in [
        "CONCERTINA_CONF",
        "CONCERTINA_STATS",
        "CONCERTINA_DISABLE",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "LD_PRELOAD",
    ] {
        command.env_remove(name);
    }
    if let Some(preload) = preload {
        command.env("LD_PRELOAD", preload);
    }
    command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// What `command` makes leaves with the same status and says the same, preloaded as bare; returns
/// what it says.
#[track_caller]
fn same(mut command: impl FnMut() -> Command) -> String {
    let bare = run(&mut command(), None);
    let preloaded = run(&mut command(), Some(library()));
    assert_eq!(preloaded, bare, "{:?}", command());
    assert!(bare.status.success(), "{bare:?}");
    String::from_utf8(bare.stdout).expect("text")
}

#[test]
fn ordinary_programs_run_as_without_it() {
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
fn a_look_up_needs_no_memory() {
    let scratch = Scratch::new("preload-allocator");
    let program = compile(&scratch, "allocator.c", "allocator", &[]);
    assert_eq!(same(|| Command::new(&program)), "own allocator, 0 nested\n");
}

#[test]
fn a_look_up_needs_no_system_call() {
    let scratch = Scratch::new("preload-seccomp");
    let program = compile(&scratch, "seccomp.c", "seccomp", &[]);
    assert_eq!(same(|| Command::new(&program)), "found\nfound\n");
}

#[test]
fn other_look_ups_reach_the_real_dlsym_from_who_made_them() {
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
