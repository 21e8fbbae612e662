//! The statistics file that `CONCERTINA_STATS` asks for: its path, whether this process may write it, and
//! writing it now.
//!
//! A process that has used the GPU writes the file at a normal exit, at `os._exit` in Python, at SIGTERM
//! (`exit`) and where a setting asks for it (`stats_triggers`). One that has not writes a
//! file that says so at a normal exit, if one is expected of it ([`expect_statistics`]), and never in place
//! of another process's.

use crate::driver;
use crate::process::cuda_calls;
use crate::process::state;
use crate::process::stats;
use crate::process::stats_file;
use crate::process::stats_path::{self, Failure};
use crate::settings;
use crate::util::fork;
use crate::util::message;
use std::ffi::CStr;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

/// The variable that holds the path of the statistics.
pub const VARIABLE: &str = "CONCERTINA_STATS";

/// How long a writer waits for another writer, and for each device that another thread keeps locked.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// The value of `CONCERTINA_STATS` when the library was loaded, made absolute by the directory that was the
/// current one then.
static PATTERN: OnceLock<Vec<u8>> = OnceLock::new();
/// When the library was loaded.
static LOADED_AT: OnceLock<SystemTime> = OnceLock::new();
/// Statistics are expected of this process even if it does not use the GPU.
static EXPECTED: AtomicBool = AtomicBool::new(false);
/// The path that the pattern stood for when the library was first used. Empty if nothing is to be written.
static PATH: OnceLock<PathBuf> = OnceLock::new();
/// The last statistics of this process are being written, or have been.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Whether `CONCERTINA_STATS` was set when the library was loaded.
pub fn is_wanted() -> bool {
    PATTERN.get().is_some()
}

/// Reads `CONCERTINA_STATS`. To be called once, when the library is loaded.
pub fn read_variable() {
    if let Some(pattern) = settings::variable(VARIABLE).filter(|pattern| !pattern.is_empty()) {
        // No other code sets them.
        let _ = PATTERN.set(stats_path::absolute(pattern.into_vec()));
        let _ = LOADED_AT.set(stats_file::file_time());
        cuda_calls::start_clock();
    }
}

/// Prints what would keep the statistics from being written, if anything does.
pub fn check_path() {
    if let Some(pattern) = PATTERN.get()
        && let Err(failure) = check_pattern(pattern)
    {
        print_failure(&failure);
    }
}

/// What would keep the statistics from being written, as one line; `None` if nothing does.
pub fn path_mistake() -> Option<String> {
    let failure = check_pattern(PATTERN.get()?).err()?;
    Some(format!("{VARIABLE}: {}", failure.line))
}

/// What would keep the statistics of this process from being written to the path that `pattern` stands for.
pub fn check_pattern(pattern: &[u8]) -> Result<(), Failure> {
    stats_file::check_writable(&stats_path::expand(pattern)?)
}

/// Statistics are expected of this process even if it does not use the GPU: it was started with the library
/// on purpose, or PyTorch was attached. Others only happen to load the library, as every shell does under
/// `LD_PRELOAD`.
pub fn expect_statistics() {
    EXPECTED.store(true, Relaxed);
}

/// Expands the path when the library is first used. Whether this process will write the file.
pub fn set_path() -> bool {
    let Some(pattern) = PATTERN.get() else {
        return false;
    };
    // A child forked before the first use may not replace the file that its parent may write, too.
    if state::is_forked() && !stats_path::names_process(pattern) {
        return false;
    }
    match stats_path::expand(pattern) {
        Ok(path) => PATH.set(path).is_ok(),
        Err(failure) => {
            print_failure(&failure);
            false
        }
    }
}

/// The path of the statistics of a process that has used the GPU, if it is this one's to write.
pub fn path_to_write() -> Option<&'static PathBuf> {
    let writes = state::is_used_by_owner();
    PATH.get().filter(|_| writes)
}

/// The path of the statistics of a process that has not used the GPU, if it is to write any: never that of
/// another process's file, unless that process has ended and the file is older than this process.
pub fn path_of_unused() -> Option<PathBuf> {
    let (pattern, loaded_at) = PATTERN.get().zip(LOADED_AT.get())?;
    if !state::is_unused_by_owner() || settings::is_disabled() {
        return None;
    }
    if !EXPECTED.load(Relaxed) && !driver::is_loaded() {
        return None;
    }
    // A mistake in it was printed when the library was loaded.
    let path = stats_path::expand(pattern).ok()?;
    let free = stats_path::names_process(pattern) || stats_file::is_left_over(&path, *loaded_at);
    free.then_some(path)
}

/// Writes the file while the program runs, if it is this process's to write and the process is not ending:
/// what a thread began to write then could not be finished.
pub fn write_now() {
    let unless_ending = || (!ENDING.load(Relaxed)).then(statistics);
    if let Some(path) = path_to_write() {
        write(path, unless_ending);
    }
}

/// No thread begins to write by [`write_now`] any more.
pub fn set_ending() {
    ENDING.store(true, Relaxed);
}

/// The statistics as JSON.
pub fn statistics() -> String {
    stats::json(LOCK_TIMEOUT)
}

/// Writes `text` to `path`. Prints, once, why it could not.
pub fn write(path: &Path, text: impl FnOnce() -> Option<String>) {
    if let Err(failure) = stats_file::write(path, LOCK_TIMEOUT, text) {
        print_failure(&failure);
    }
}

/// Prints, once, why there will be no statistics.
fn print_failure(failure: &Failure) {
    static PRINTED: AtomicBool = AtomicBool::new(false);
    message::print_once(&PRINTED, || format!("{VARIABLE}: {}", failure.line));
}

/// Writes the statistics now: to the path that `pattern` stands for, or without one to the path that
/// `CONCERTINA_STATS` named when the library was loaded. Any thread may call it.
pub fn dump(pattern: Option<&CStr>) -> Result<(), Failure> {
    let failure = |errno, why: &str| Failure {
        errno,
        line: format!("statistics not written: {why}"),
    };
    if fork::in_forked_child() {
        return Err(failure(
            libc::ECHILD,
            "this process was forked from the one they are about",
        ));
    }
    let path = match (pattern, PATH.get(), PATTERN.get()) {
        (Some(pattern), ..) => &stats_path::expand(pattern.to_bytes())?,
        (None, Some(path), _) => path,
        (None, None, Some(pattern)) => &stats_path::expand(pattern)?,
        (None, None, None) => {
            return Err(failure(
                libc::EINVAL,
                "no path is given, and CONCERTINA_STATS is not set",
            ));
        }
    };
    stats_file::write(path, LOCK_TIMEOUT, || Some(statistics()))
}
