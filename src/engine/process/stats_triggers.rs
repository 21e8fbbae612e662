//! Statistics of a program that runs on: when a signal comes that the settings name, and at intervals.
//!
//! The signal's handler wakes a thread, which writes the file, and calls the handler that the program
//! had for the signal before. One that the program installs later takes the place of ours. A process
//! forked from this one has no such thread: there the program's own handler is called, and nothing
//! else is done.

use crate::process::state;
use crate::process::stats_output;
use crate::settings::Settings;
use crate::util::message;
use crate::util::semaphore::Semaphore;
use crate::util::thread;
use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::{self, MaybeUninit};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;

/// Starts what the settings ask for, once a process.
pub fn start(settings: &Settings) {
    static STARTED: AtomicBool = AtomicBool::new(false);
    let interval = settings.stats_interval;
    let asked = [
        ("stats_signal", settings.stats_signal.is_some()),
        ("stats_interval_s", !interval.is_zero()),
    ];
    let asked = asked.iter().filter(|(_, is_asked)| *is_asked);
    let asked: Vec<_> = asked.map(|(key, _)| *key).collect();
    if asked.is_empty() || STARTED.swap(true, Ordering::Relaxed) {
        return;
    }
    let no_effect = |keys: &str, why: &str| message::print(&format!("{keys} has no effect{why}"));
    if !stats_output::is_wanted() {
        let without = format!(" without {}", stats_output::VARIABLE);
        return no_effect(&asked.join(", "), &without);
    }
    if let Some(signal) = settings.stats_signal
        && !listen(signal)
    {
        no_effect("stats_signal", ": no thread could be started");
    }
    let report = move || {
        loop {
            sleep(interval);
            stats_output::write_now();
        }
    };
    if !interval.is_zero() && !thread::start(report) {
        no_effect("stats_interval_s", ": no thread could be started");
    }
}

/// Wakes the thread that writes.
static WAKE: Semaphore = Semaphore::new();

/// What the program had done about the signal.
struct Before(UnsafeCell<MaybeUninit<libc::sigaction>>);
// SAFETY: it is written once, before the handler that reads it is installed.
unsafe impl Sync for Before {}
static BEFORE: Before = Before(UnsafeCell::new(MaybeUninit::uninit()));

/// The program's handler was for one signal only, and has had it.
static SPENT: AtomicBool = AtomicBool::new(false);

fn listen(signal: c_int) -> bool {
    let write = || {
        loop {
            WAKE.wait();
            stats_output::write_now();
        }
    };
    if !WAKE.start() || !thread::start(write) {
        return false;
    }
    // SAFETY: `handle` fits SA_SIGINFO and calls only async-signal-safe functions besides the
    // program's own handler. Nobody reads `BEFORE` before the second call to `sigaction`.
    unsafe {
        let before = BEFORE.0.get().cast::<libc::sigaction>();
        if libc::sigaction(signal, ptr::null(), before) != 0 {
            return false;
        }
        let mut action: libc::sigaction = mem::zeroed();
        libc::sigemptyset(&mut action.sa_mask);
        action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
        if is_function((*before).sa_sigaction) {
            // Its own handler runs as it would have: what it blocks, on which stack, and so on.
            action = *before;
            action.sa_flags &= !libc::SA_RESETHAND;
        }
        action.sa_sigaction = handle as *const () as usize;
        action.sa_flags |= libc::SA_SIGINFO;
        libc::sigaction(signal, &action, ptr::null_mut()) == 0
    }
}

fn is_function(handler: libc::sighandler_t) -> bool {
    handler != libc::SIG_DFL && handler != libc::SIG_IGN
}

/// The handler.
extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: errno's location is this thread's own.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        if state::is_owner() {
            WAKE.post();
        }
        *errno = before;
    }
    // SAFETY: it was written before this handler was installed, and not since.
    let before = unsafe { (*BEFORE.0.get()).assume_init_ref() };
    let spent = before.sa_flags & libc::SA_RESETHAND != 0 && SPENT.swap(true, Ordering::Relaxed);
    if !is_function(before.sa_sigaction) || spent {
        return;
    }
    // SAFETY: the program installed this function for the signal, of the kind that its flags say.
    unsafe {
        if before.sa_flags & libc::SA_SIGINFO != 0 {
            let chained = mem::transmute::<
                libc::sighandler_t,
                extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void),
            >(before.sa_sigaction);
            chained(signal, info, context);
        } else {
            let chained =
                mem::transmute::<libc::sighandler_t, extern "C" fn(c_int)>(before.sa_sigaction);
            chained(signal);
        }
    }
}
