//! The built library and what the tests of it share.
#![allow(dead_code, reason = "each test uses its part")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The shared library of the profile that the test was built with. Cargo does not build a cdylib for
/// the tests beside it, so this does, once a process.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| build(None))
}

/// The same with the deliberate mistakes in it that `CONCERTINA_BREAK` chooses from.
pub fn breakable_library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| build(Some("breaks")))
}

/// Builds the library; with a feature, beside the ordinary one.
fn build(feature: Option<&str>) -> PathBuf {
    // target/PROFILE/deps/TEST
    let test = std::env::current_exe().expect("a test has a path");
    let profile = test.ancestors().nth(2).expect("target/PROFILE/deps/TEST");
    let name = profile
        .file_name()
        .and_then(|name| name.to_str())
        .expect("a profile's name");
    let mut target = profile.parent().expect("a target directory").to_path_buf();
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--lib", "--profile"]);
    build.arg(if name == "debug" { "dev" } else { name });
    if let Some(feature) = feature {
        target.push(feature);
        build.args(["--features", feature]);
    }
    build
        .arg("--target-dir")
        .arg(&target)
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    assert!(
        build.status().expect("cargo runs").success(),
        "the library could not be built"
    );
    let library = target.join(name).join("libconcertina.so");
    assert!(library.is_file(), "{library:?} is not there");
    library
}

/// The directory with the stand-ins for `libcuda.so.1` and `libcudart.so`, built once a process.
pub fn standin() -> &'static Path {
    static STANDIN: OnceLock<PathBuf> = OnceLock::new();
    STANDIN.get_or_init(|| {
        let test = std::env::current_exe().expect("a test has a path");
        // target/PROFILE/deps/TEST
        let target = test.ancestors().nth(3).expect("a target directory");
        let mut script = Command::new("scripts/standin.sh");
        script
            .env("CARGO_TARGET_DIR", target)
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        PathBuf::from(output(&mut script).trim())
    })
}

/// The names in `tests/exports.txt`: what the library exports, and nothing else.
pub fn exports() -> Vec<&'static str> {
    include_str!("../exports.txt")
        .lines()
        .filter(|line| !line.is_empty())
        .collect()
}

/// What `command` prints; it has to succeed.
pub fn output(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{errors}",
        output.status
    );
    String::from_utf8(output.stdout).expect("text")
}

/// A directory for one test's files, empty at first and removed at the end.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a directory under target/tmp");
        Scratch(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What a failed test left is worth looking at.
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}
