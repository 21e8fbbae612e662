//! Makes PyTorch and the library fit, from the moment that PyTorch's allocator is ours.
//!
//! `attach.py` is run in the interpreter when the library is loaded. It sets PyTorch's hooks on every
//! allocator that is made of our functions, and when such a one becomes PyTorch's present allocator it
//! calls [`attach`] here, which fits the object itself (`table`), and puts functions of ours in place of
//! those that PyTorch's memory functions call. Where nobody was there to see the allocator change, the
//! first allocation looks whether it did.

use super::symbols::Library;
use super::vtable::{self, Object};
use super::{
    allocate, concertina_base_alloc, concertina_begin_allocate_to_pool, concertina_empty_cache,
    concertina_end_allocate_to_pool, concertina_free, concertina_init, concertina_malloc,
    concertina_memory_fraction, concertina_record_stream, concertina_release_pool, cxx_snapshot,
    exceptions, gpu_trace, memory_history, memory_stats, pool_state, profiler, release,
};
use crate::entry::panic_guard::guard;
use crate::entry::python::{Script, source};
use concertina_engine::device::captures;
use concertina_engine::device::{self, Device};
use concertina_engine::process::settings::check_settings;
use concertina_engine::process::stats_output;
use concertina_engine::settings::{self, Settings, Severity};
use concertina_engine::util::message;
use serde_json::{Value, json};
use std::ffi::{CStr, c_int, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// PyTorch's present allocator is ours.
static ATTACHED: AtomicBool = AtomicBool::new(false);

pub fn is_attached() -> bool {
    ATTACHED.load(Ordering::Relaxed)
}

pub static ATTACH: Script = Script::new(
    c"<concertina: attach.py>",
    source!("attach.py"),
    functions,
    "PyTorch's memory functions could not be fitted: they fail as under any pluggable allocator",
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
    c"later": later;
    c"memory_stats": memory_stats::memory_stats;
    c"reset_peaks": memory_stats::reset_peaks;
    c"reset_accumulated": memory_stats::reset_accumulated;
    c"fraction": memory_stats::fraction;
    c"change_settings": memory_stats::change_settings;
    c"record": memory_history::record;
    c"actions": memory_history::actions;
    c"is_recorded": memory_history::is_recorded;
    c"reading": memory_history::reading;
    c"snapshot": memory_history::tell_all;
    c"follows": cxx_snapshot::follows;
    c"number_stats": vtable::number_stats;
    c"withdraw_objects": vtable::withdraw_objects;
    c"set_metadata": memory_history::set_metadata;
    c"trace_gpu": gpu_trace::trace_gpu;
    c"is_gpu_traced": gpu_trace::is_gpu_traced;
    c"set_observer": set_observer;
    c"profiling": profiler::profiling;
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

/// The library is used for the first time. That may be by PyTorch, and nobody saw how it came to it.
pub fn attach_unless_done() {
    if !crate::entry::preload::is_on() && Library::loaded(c"libc10_cuda.so").is_some() {
        // Other libraries of the process may capture by CUDA's own calls.
        captures::expect_unseen();
    }
    attach(false);
}

extern "C" fn is_disabled() -> bool {
    guard(false, settings::is_disabled)
}

/// Says what the environment has wrong, unless that was said, and hands over a list of the lines, each
/// with whether it lifts a limit.
extern "C" fn mistakes(take: memory_stats::Take) {
    guard((), || {
        check_settings(false);
        stats_output::check_path();
        let (_, complaints) = Settings::from_environment();
        let mistakes = complaints.iter().filter(|complaint| complaint.is_mistake());
        let mut all: Vec<Value> = mistakes
            .map(|it| json!([it.line, it.severity == Severity::Unlimited]))
            .collect();
        all.extend(stats_output::path_mistake().map(|line| json!([line, false])));
        memory_stats::hand_over(&Value::Array(all), take);
    });
}

/// Fits PyTorch's present allocator if it is ours, which the caller may know. Answers whether it is.
/// One line says what could not be fitted.
extern "C" fn attach(known: bool) -> bool {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    guard(false, || {
        let _lock = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        if is_attached() {
            return true;
        }
        let object = Object::current();
        let ours = object.as_ref().is_some_and(Object::is_ours);
        if !ours && !known {
            return false;
        }
        ATTACHED.store(true, Ordering::Relaxed);
        device::set_torch_allocator();
        stats_output::expect_statistics();
        let mut missing = Vec::new();
        let mut unexpected = String::from("this PyTorch is not built as expected");
        match object {
            Some(object) => {
                missing = object.fit();
                match object.release() {
                    None => {
                        unexpected = "this release of PyTorch is not known, and its C++ objects \
                                      are left alone"
                            .into();
                    }
                    Some(release) if !release.strings => {
                        unexpected = "this PyTorch has the std::string of before GCC 5, which is \
                                      left alone"
                            .into();
                    }
                    Some(release) if release.snapshot.is_none() => {
                        let (major, minor) = release.version;
                        unexpected = format!("PyTorch {major}.{minor} is fitted in part");
                    }
                    Some(_) => {}
                }
                if register(&object).is_none() {
                    missing.push("torch.accelerator.memory");
                }
            }
            None => missing.push("torch.backends.cudnn.benchmark, torch.cuda.MemPool"),
        }
        if !exceptions::can_say_out_of_memory() {
            missing.push("torch.OutOfMemoryError (RuntimeError is raised in its place)");
        }
        if !profiler::find() {
            missing.push("torch.profiler with profile_memory=True");
        }
        if !missing.is_empty() {
            message::print(&format!(
                "{unexpected}; what works as under any pluggable allocator only: {}",
                missing.join(", ")
            ));
        }
        true
    })
}

/// Tells PyTorch that the object is the allocator of all CUDA devices, also where it is asked for by
/// the kind of device.
fn register(object: &Object) -> Option<()> {
    type SetAllocator = unsafe extern "C-unwind" fn(i8, *mut c_void, u8);
    /// `c10::DeviceType::CUDA`.
    const CUDA: i8 = 1;
    /// That of PyTorch's own, which a lower one does not replace: 0 up to 2.11, and 1 from then on.
    const PRIORITY: u8 = 1;
    let set = Library::loaded(c"libc10.so")?
        .symbol(c"_ZN3c1012SetAllocatorENS_10DeviceTypeEPNS_9AllocatorEh")?;
    // SAFETY: the mangled name says what it takes; the object is an allocator that is never freed.
    unsafe { transmute::<*mut c_void, SetAllocator>(set)(CUDA, object.address(), PRIORITY) };
    Some(())
}

/// Called when memory has run out, with the device, the bytes asked for, the most that may be held
/// there and the bytes that are free. Python, which it calls, may end the thread there.
type Observer = extern "C-unwind" fn(c_int, u64, u64, u64);

static OBSERVER: Mutex<Option<Observer>> = Mutex::new(None);

extern "C" fn set_observer(observer: Observer) {
    *OBSERVER.lock().unwrap_or_else(PoisonError::into_inner) = Some(observer);
}

/// Tells whoever attached an observer, with no lock held: it may do anything.
pub fn observe(device: &Device, asked: usize, most: u64, free: u64) {
    let observer = *OBSERVER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(observer) = observer {
        observer(device.ordinal(), asked as u64, most, free);
    }
}

/// PyTorch is not loaded yet: the script is to be run again.
extern "C" fn later() {
    ATTACH.reset();
}
