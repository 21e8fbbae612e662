//! What runs when the library is loaded, and when the process ends.

use super::panic_guard::guard;
use super::{launched_by_run, preload, python, torch};
use concertina_engine::process::allocator::check_settings;
use concertina_engine::process::allocator::say_how_by;
use concertina_engine::process::lifecycle;
use concertina_engine::settings::{self, Severity};
use std::ffi::{c_char, c_int};
use std::fs;
use std::os::unix::ffi::OsStrExt;

#[used]
#[unsafe(link_section = ".init_array")]
static START: unsafe extern "C" fn(c_int, *const *const c_char) = start;

/// The last of a process's ends to run: after every function registered with `atexit` and every
/// static destructor, where the last tensors may be freed.
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

/// The C library calls it with the arguments of `main`.
unsafe extern "C" fn start(count: c_int, arguments: *const *const c_char) {
    guard((), || {
        lifecycle::start(first_use);
        say_how_by(how);
        if !settings::is_disabled() {
            look_at_environment();
        }
        if lifecycle::wants_statistics() {
            // Some other library's end may crash before it is the turn of ours.
            // SAFETY: the function stays, as the library is never unloaded.
            unsafe { libc::atexit(end) };
        }
        python::schedule();
        // SAFETY: the arguments of `main` are so many strings, and stay.
        unsafe { launched_by_run::at_start(count, arguments) };
    });
}

/// How the process came to use the library.
fn how() -> &'static str {
    match (torch::is_attached(), preload::is_on()) {
        (true, true) => "as PyTorch's allocator and under LD_PRELOAD",
        (true, false) => "as PyTorch's allocator",
        (false, true) => "under LD_PRELOAD",
        (false, false) => "by its functions",
    }
}

/// Says now what the environment has wrong, rather than when the GPU is first used. A preloaded program
/// whose limit cannot be read does not start: without the limit it might take the memory of others.
fn look_at_environment() {
    let is_set = |name: &&str| settings::variable(name).is_some();
    let has_settings = settings::VARIABLES.iter().any(is_set);
    if !has_settings && !lifecycle::wants_statistics() {
        return;
    }
    let preloaded = preload::is_on();
    // What is set for PyTorch is none of our business yet, where any program may run.
    let worst = check_settings(preloaded);
    if preloaded && worst == Some(Severity::Unlimited) {
        // SAFETY: nothing of the program has run that could have an end.
        unsafe { libc::_exit(2) };
    }
    lifecycle::check_path();
    if lifecycle::wants_statistics() && !(preloaded && is_parent_preloaded()) {
        lifecycle::expect_statistics();
    }
}

/// Whether the process that started this one has the same libraries preloaded: then this is some helper
/// of the program that a person has started.
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

fn first_use() {
    torch::attach_unless_done();
    python::schedule();
}

extern "C" fn end() {
    guard((), lifecycle::before_exit);
}
