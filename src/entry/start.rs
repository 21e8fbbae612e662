//! The library's constructor and destructor: what runs when it is loaded, and at the end of the process.

use super::panic_guard::guard;
use super::{attached, launched_by_run, preload, python, torch};
use concertina_engine::process::exit;
use concertina_engine::process::settings::check_settings;
use concertina_engine::process::startup::{self, Callbacks};
use concertina_engine::process::stats_output;
use concertina_engine::settings::{self, Severity};
use std::ffi::{c_char, c_int};
use std::fs;
use std::os::unix::ffi::OsStrExt;

#[used]
#[unsafe(link_section = ".init_array")]
static LOAD: unsafe extern "C" fn(c_int, *const *const c_char) = load;

/// Runs after all functions registered with `atexit` and all static destructors, in which the last tensors
/// may be freed.
#[used]
#[unsafe(link_section = ".fini_array")]
static UNLOAD: extern "C" fn() = write_statistics;

/// The constructor; the C library calls it with the arguments of `main`.
unsafe extern "C" fn load(count: c_int, arguments: *const *const c_char) {
    guard((), || {
        startup::load(Callbacks {
            on_first_call,
            attachment,
        });
        if !settings::is_disabled() {
            check_environment();
        }
        if stats_output::is_wanted() {
            // Another library's destructor may crash before ours runs.
            // SAFETY: the function stays, as the library is never unloaded.
            unsafe { libc::atexit(write_statistics) };
        }
        schedule_scripts();
        // SAFETY: the arguments of `main`: `count` strings, which stay.
        unsafe { launched_by_run::check_arguments(count, arguments, preload::is_on) };
    });
}

/// How the process came to use the library, for `verbose`.
fn attachment() -> &'static str {
    match (attached::is_attached(), preload::is_on()) {
        (true, true) => "as PyTorch's allocator and under LD_PRELOAD",
        (true, false) => "as PyTorch's allocator",
        (false, true) => "under LD_PRELOAD",
        (false, false) => "by its functions",
    }
}

/// Prints mistakes in the environment now, rather than when the GPU is first used. A preloaded program whose
/// limit is a mistake does not start: without a limit it might take memory that others need.
fn check_environment() {
    let is_set = |name: &&str| settings::variable(name).is_some();
    let has_settings = settings::VARIABLES.iter().any(is_set);
    if !has_settings && !stats_output::is_wanted() {
        return;
    }
    let preloaded = preload::is_on();
    // Any program may be preloaded: PyTorch's variables do not matter until PyTorch is attached.
    let worst = check_settings(preloaded);
    if preloaded && worst == Some(Severity::LimitMistake) {
        // SAFETY: nothing of the program has run yet that would have to be ended.
        unsafe { libc::_exit(2) };
    }
    stats_output::check_path();
    if stats_output::is_wanted() && !(preloaded && is_parent_preloaded()) {
        stats_output::expect_statistics();
    }
}

/// Whether the parent process has the same libraries preloaded: then this one is a helper of the program that
/// the user started, from which no statistics are expected.
fn is_parent_preloaded() -> bool {
    const VARIABLE: &str = "LD_PRELOAD";
    let Some(own) = settings::variable(VARIABLE) else {
        return false;
    };
    // SAFETY: getppid has no preconditions.
    let parent = unsafe { libc::getppid() };
    let environment = fs::read(format!("/proc/{parent}/environ")).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(|variable| {
        let value = variable.strip_prefix(VARIABLE.as_bytes());
        value.and_then(|value| value.strip_prefix(b"=")) == Some(own.as_bytes())
    })
}

fn on_first_call() {
    torch::attach_unless_done();
    schedule_scripts();
}

/// Has the interpreter, if the process has one, run the scripts that wrap `os._exit` and attach to PyTorch.
/// May be called again, from any thread.
fn schedule_scripts() {
    python::schedule_exit_hook();
    torch::ATTACH.schedule();
}

extern "C" fn write_statistics() {
    guard((), exit::write_at_exit);
}
