//! `attach.py`, which replaces PyTorch's Python functions of memory, and the functions that it calls.
//!
//! It runs in the interpreter when the library is loaded. It sets PyTorch's hooks on every allocator that is
//! made of this library's functions, and calls [`attach`] when PyTorch changes to such a one.

use super::attach::attach;
use super::json::{self, JsonCallback};
use super::pluggable::{
    allocate, concertina_base_alloc, concertina_begin_allocate_to_pool, concertina_empty_cache,
    concertina_end_allocate_to_pool, concertina_free, concertina_init, concertina_malloc,
    concertina_memory_fraction, concertina_record_stream, concertina_release_pool, release,
};
use super::{
    cxx_snapshot, device_stats, gpu_trace, memory_history, memory_stats, oom_observer, pool_state,
    profiler, tracebacks, vtable,
};
use crate::entry::panic_guard::guard;
use crate::entry::python::{Script, source};
use concertina_engine::process::settings::check_settings;
use concertina_engine::process::stats_output;
use concertina_engine::settings::{self, Settings, Severity};
use serde_json::{Value, json};
use std::ffi::CStr;

/// The script.
pub static ATTACH: Script = Script::new(
    c"<concertina: attach.py>",
    source!("attach.py"),
    functions,
    "PyTorch's memory functions could not be replaced: they fail as under any pluggable allocator",
);

macro_rules! functions {
    ($($name:literal: $function:expr;)*) => {
        fn functions() -> Vec<(&'static CStr, usize)> {
            vec![$(($name, $function as *const () as usize),)*]
        }
    };
}

functions! {
    c"concertina_malloc": concertina_malloc;
    c"concertina_free": concertina_free;
    c"allocate": allocate;
    c"release": release;
    c"init": concertina_init;
    c"empty_cache": concertina_empty_cache;
    c"memory_fraction": concertina_memory_fraction;
    c"base_alloc": concertina_base_alloc;
    c"record_stream": concertina_record_stream;
    c"begin_allocate_to_pool": concertina_begin_allocate_to_pool;
    c"end_allocate_to_pool": concertina_end_allocate_to_pool;
    c"release_pool": concertina_release_pool;
    c"attach": attach;
    c"is_disabled": is_disabled;
    c"mistakes": mistakes;
    c"run_again": run_again;
    c"memory_stats": memory_stats::memory_stats;
    c"private_pool_bytes": memory_stats::private_pool_bytes;
    c"reset_peaks": memory_stats::reset_peaks;
    c"reset_accumulated": memory_stats::reset_accumulated;
    c"fraction": memory_stats::fraction;
    c"change_settings": memory_stats::change_settings;
    c"record": memory_history::record;
    c"actions": memory_history::actions;
    c"is_recorded": memory_history::is_recorded;
    c"keep_tracebacks": tracebacks::keep_tracebacks;
    c"snapshot": memory_history::snapshot;
    c"set_called_by_script": cxx_snapshot::set_called_by_script;
    c"set_test_pattern": device_stats::set_test_pattern;
    c"restore_class_functions": vtable::restore_class_functions;
    c"set_metadata": memory_history::set_metadata;
    c"start_gpu_trace": gpu_trace::start_gpu_trace;
    c"is_gpu_traced": gpu_trace::is_gpu_traced;
    c"set_observer": oom_observer::set_observer;
    c"set_profiling": profiler::set_profiling;
    c"pool_blocks": pool_state::pool_blocks;
    c"restore": pool_state::restore;
    c"swap_owner": pool_state::swap_owner;
}

/// Fits PyTorch's Python functions to the library now, in a process whose Python was started, or has
/// imported torch, after the library was loaded, as it is under LD_PRELOAD. Does nothing where that is
/// done, and without Python or torch.
///
/// Any thread may call it, and waits for the interpreter's lock if it does not hold it.
#[unsafe(no_mangle)]
pub extern "C" fn concertina_attach() {
    guard((), || ATTACH.run_now());
}

extern "C" fn is_disabled() -> bool {
    guard(false, settings::is_disabled)
}

/// Prints the mistakes of the environment that were not printed before, and sends a list of all: each line,
/// and whether the mistake lifts a limit.
extern "C" fn mistakes(callback: JsonCallback) {
    guard((), || {
        check_settings(false);
        stats_output::check_path();
        let (_, complaints) = Settings::from_environment();
        let mistakes = complaints.iter().filter(|complaint| complaint.is_mistake());
        let mut all: Vec<Value> = mistakes
            .map(|it| json!([it.line, it.severity == Severity::LimitMistake]))
            .collect();
        all.extend(stats_output::path_mistake().map(|line| json!([line, false])));
        json::send(&Value::Array(all), callback);
    });
}

/// PyTorch is not loaded yet: the script is to run again later.
extern "C" fn run_again() {
    ATTACH.reset();
}
