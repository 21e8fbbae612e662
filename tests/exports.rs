//! What the library shows to the dynamic linker, and what it wants from it.

mod library;

use library::{exports, library, output};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// The symbols that `file` defines for others.
fn defined(file: &Path) -> BTreeSet<String> {
    let text = output(
        Command::new("nm")
            .args(["--dynamic", "--defined-only"])
            .arg(file),
    );
    let name = |line: &str| line.split_whitespace().last().map(String::from);
    text.lines().filter_map(name).collect()
}

#[test]
fn the_library_exports_what_the_list_says() {
    let expected: BTreeSet<String> = exports().into_iter().map(String::from).collect();
    assert!(exports().is_sorted(), "tests/exports.txt is to be sorted");
    assert_eq!(defined(library()), expected);
}

#[test]
fn the_library_needs_no_cuda() {
    let dynamic = output(
        Command::new("readelf")
            .args(["--dynamic", "--wide"])
            .arg(library()),
    );
    let needed: Vec<_> = dynamic
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .collect();
    assert!(!needed.is_empty(), "readelf shows nothing:\n{dynamic}");
    for library in &needed {
        let library = library.to_lowercase();
        assert!(
            !library.contains("cuda") && !library.contains("nvidia"),
            "{library}"
        );
    }
    assert!(
        dynamic.contains("NODELETE"),
        "not linked with -z nodelete:\n{dynamic}"
    );
}

#[test]
fn the_library_has_no_simulated_gpu_in_it() {
    let names_simulator = |file: &Path| {
        let symbols = output(Command::new("nm").arg(file));
        assert!(
            symbols.contains("concertina_engine"),
            "{file:?} has no symbols"
        );
        let name = b"concertina_sim";
        let bytes = std::fs::read(file).expect("a file");
        symbols.contains("concertina_sim") || bytes.windows(name.len()).any(|it| it == name)
    };
    let command = Path::new(env!("CARGO_BIN_EXE_concertina"));
    assert!(names_simulator(command), "the command replays on it");
    assert!(!names_simulator(library()));
}

/// Whether a binary that defines `symbol` puts itself between a program and CUDA.
fn interposes(symbol: &str) -> bool {
    let name = symbol.split('@').next().unwrap_or(symbol);
    let driver = name.strip_prefix("cuda").or(name.strip_prefix("cu"));
    name.starts_with("concertina_")
        || matches!(
            name,
            "dlsym" | "dlvsym" | "dlopen" | "malloc" | "free" | "calloc" | "realloc"
        )
        || driver.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
}

#[test]
fn the_command_and_the_tests_interpose_nothing() {
    let command = Path::new(env!("CARGO_BIN_EXE_concertina"));
    let test = std::env::current_exe().expect("a test has a path");
    for file in [command, &test] {
        let symbols = defined(file);
        let bad: Vec<_> = symbols.iter().filter(|symbol| interposes(symbol)).collect();
        assert!(bad.is_empty(), "{file:?} defines {bad:?}");
    }
    for name in [
        "cuMemAlloc_v2",
        "cudaMalloc::libcudart.so.13",
        "dlsym",
        "concertina_malloc",
    ] {
        assert!(interposes(name), "{name}");
    }
    assert!(!interposes("cudnnCreate") && !interposes("custom"));
}
