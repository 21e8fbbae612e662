//! Runs the C program of `tests/programs/process.c`, or Python, with the library, and reads what it leaves.

use crate::library::{Scratch, library, output, standin};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;

pub const SIGTERM: i32 = 15;

/// `tests/programs/process.c`, compiled once.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<(Scratch, PathBuf)> = OnceLock::new();
    let (_, program) = PROGRAM.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let scratch = Scratch::new("process-program");
        let program = scratch.path().join("process");
        output(
            Command::new("cc")
                .args([
                    "-std=gnu11",
                    "-O1",
                    "-Wall",
                    "-Wextra",
                    "-Werror",
                    "-pthread",
                    "-I",
                ])
                .arg(root.join("include"))
                .arg(root.join("tests/programs/process.c"))
                .arg("-o")
                .arg(&program)
                .arg("-ldl"),
        );
        (scratch, program)
    });
    program
}

/// Sets the environment of a process, with statistics written to `stats`.
pub fn environment<'a>(command: &'a mut Command, stats: &Path) -> &'a mut Command {
    for name in [
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "LD_PRELOAD",
        "RANK",
    ] {
        command.env_remove(name);
    }
    command
        .env_remove("CONCERTINA_CONF")
        .env("LD_LIBRARY_PATH", standin())
        .env("CONCERTINA_STATS", stats)
}

/// The C program, ready to run `case`.
pub fn c(case: &str, stats: &Path) -> Command {
    let mut command = Command::new(program());
    environment(command.arg(library()).arg(case).arg(stats), stats);
    command
}

/// Python, ready to run `text` with the library as `concertina`, and `get` and `free` for a MiB.
pub fn python(text: &str, stats: &Path) -> Command {
    const PRELUDE: &str = "
import ctypes, os, signal, sys
concertina = ctypes.CDLL(sys.argv[1])
concertina.concertina_malloc.restype = ctypes.c_void_p
def get():
    block = concertina.concertina_malloc(ctypes.c_size_t(1 << 20), 0, None)
    assert block
    return ctypes.c_void_p(block)
def free(block):
    concertina.concertina_free(block, ctypes.c_size_t(1 << 20), 0, None)
";
    let mut command = Command::new("python3");
    let text = format!("{PRELUDE}{text}");
    environment(command.arg("-c").arg(text).arg(library()), stats);
    command
}

pub fn run(mut command: Command) -> Output {
    command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Runs `command`, asserts that it exits with `code`, and returns what it prints on standard error.
#[track_caller]
pub fn exits(command: Command, code: i32) -> String {
    let output = run(command);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(
        output.status.code(),
        Some(code),
        "{}\n{errors}",
        output.status
    );
    errors
}

/// Runs `command` until it prints `ready`, sends it SIGTERM, and returns its status and output.
#[track_caller]
pub fn terminate(mut command: Command) -> (ExitStatus, String) {
    let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    assert_eq!(lines.next().expect("a line").expect("text"), "ready");
    let kill = Command::new("kill")
        .arg("-TERM")
        .arg(child.id().to_string())
        .status();
    assert!(kill.expect("kill runs").success());
    let sent = Instant::now();
    let status = child.wait().expect("it ends");
    assert!(
        sent.elapsed() < Duration::from_secs(3),
        "it took {:?}",
        sent.elapsed()
    );
    (status, lines.map_while(Result::ok).collect())
}

/// The statistics in `file`, which has to be complete.
#[track_caller]
pub fn read(file: &Path) -> Value {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    assert!(text.ends_with("}\n"), "{text}");
    let stats: Value = serde_json::from_str(&text).expect("JSON");
    assert!(stats["schema_version"].is_u64(), "{text}");
    stats
}

/// Allocated bytes of all devices, by the statistics in `file`.
#[track_caller]
pub fn allocated(file: &Path) -> u64 {
    let stats = read(file);
    let devices = stats["devices"].as_array().expect("a list of devices");
    let bytes = |device: &Value| {
        device["memory_stats"]["allocated_bytes.all.current"]
            .as_u64()
            .unwrap_or_else(|| panic!("{stats}"))
    };
    devices.iter().map(bytes).sum()
}

/// The names of the files in `directory`.
pub fn files(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(directory)
        .expect("a directory")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    names.sort();
    names
}

/// The path of `name`, which has to be the only file in `scratch`: no temporary one may be left.
#[track_caller]
pub fn only(scratch: &Scratch, name: &str) -> PathBuf {
    assert_eq!(files(scratch.path()), [name]);
    scratch.path().join(name)
}

/// A directory for a test, and the path of the statistics file in it.
macro_rules! scratch {
    ($name:ident, $file:ident) => {
        let module = module_path!().replace("::", "-");
        let $name = $crate::library::Scratch::new(&format!("{module}-{}", line!()));
        let $file = $name.path().join("stats.json");
    };
}
pub(crate) use scratch;

/// Asserts that the statistics in `file` say that no GPU was used.
#[track_caller]
pub fn is_unused(file: &Path) -> Value {
    let stats = read(file);
    assert_eq!(stats["used_gpu"], false, "{stats}");
    assert_eq!(stats["devices"].as_array().map(Vec::len), Some(0));
    stats
}
