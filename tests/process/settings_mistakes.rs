//! Mistakes in settings and paths: said once, at the start, in one line each.

use crate::harness::{c, exits, files, python, scratch};
use crate::library::{library, output};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

/// A mistake is said once, when the library is loaded, also by a process that does not use it.
#[test]
fn settings_mistakes_are_said_at_the_start() {
    scratch!(scratch, file);
    let missing = scratch.path().join("no/such/file.json");
    for (settings, stats, said) in [
        ("limt:8", &file, "CONCERTINA_CONF: limt:8 makes no sense: "),
        (
            "free:lazy",
            &file,
            "CONCERTINA_CONF: free:lazy makes no sense: ",
        ),
        (
            "backend:cudaMallocAsync",
            &file,
            "CONCERTINA_CONF: backend:cuda",
        ),
        (
            "",
            &missing,
            "CONCERTINA_STATS: statistics cannot be written to ",
        ),
    ] {
        for preload in [false, true] {
            let mut command = c("unused", stats);
            command.env("CONCERTINA_CONF", settings);
            let mut code = 0;
            if preload {
                command.env("LD_PRELOAD", library());
                // Rather than without a limit it does not start.
                code = if settings.contains("lim") { 2 } else { 0 };
            }
            let errors = exits(command, code);
            assert_eq!(errors.lines().count(), 1, "{errors}");
            assert!(
                errors.starts_with(&format!("concertina: {said}")),
                "{errors}"
            );
        }
    }
    // Once: not again when the GPU is used.
    let mut command = c("exit", &file);
    command.env("CONCERTINA_CONF", "free:lazy");
    assert_eq!(exits(command, 3).lines().count(), 1);
    // What is set for PyTorch is nothing to a preloaded program.
    let mut command = c("unused", &file);
    command.env("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:2");
    command.env("LD_PRELOAD", library());
    assert_eq!(exits(command, 0), "");
}

/// A program that calls the library's functions gets no memory, rather than memory without the limit.
#[test]
fn settings_mistakes_in_a_limit_refuse_all_memory() {
    scratch!(scratch, file);
    let text = "assert concertina.concertina_malloc(ctypes.c_size_t(1 << 20), 0, None) is None";
    let mut command = python(text, &file);
    command.env("CONCERTINA_CONF", "limit:8Q");
    let errors = exits(command, 0);
    let lines: Vec<_> = errors.lines().collect();
    assert!(lines[0].starts_with("concertina: CONCERTINA_CONF: limit:8Q makes no sense"));
    assert_eq!(
        lines[1..],
        ["concertina: no memory can be had: the limit that is set makes no sense"]
    );
    drop(scratch);
}

/// A wrong `CONCERTINA_STATS` prints one line, and does not change the exit status.
#[track_caller]
fn complains(stats: &Path, about: &str) {
    let errors = exits(c("exit", stats), 3);
    let lines: Vec<_> = errors.lines().collect();
    assert_eq!(lines.len(), 1, "{errors}");
    assert!(
        lines[0].starts_with("concertina: CONCERTINA_STATS: "),
        "{errors}"
    );
    assert!(lines[0].contains(about), "{errors}");
}

#[test]
fn settings_mistakes_in_the_statistics_path_are_one_line() {
    scratch!(scratch, _file);
    complains(
        &scratch.path().join("no/such/directory.json"),
        "No such file or directory",
    );
    complains(scratch.path(), "it is a directory");
    complains(&scratch.path().join("%q.json"), "%q means nothing");
    complains(&scratch.path().join("100%"), "single %");
    let pipe = scratch.path().join("pipe");
    output(Command::new("mkfifo").arg(&pipe));
    complains(&pipe, "not a regular file");
    assert_eq!(files(scratch.path()), ["pipe"]);
}

#[test]
fn settings_mistakes_a_symbolic_link_as_statistics_path_is_refused() {
    scratch!(scratch, file);
    let victim = scratch.path().join("victim");
    fs::write(&victim, "precious").expect("ours");
    symlink(&victim, &file).expect("ours");
    complains(&file, "symbolic link");
    assert_eq!(fs::read_to_string(&victim).expect("there"), "precious");
    assert_eq!(files(scratch.path()), ["stats.json", "victim"]);
}
