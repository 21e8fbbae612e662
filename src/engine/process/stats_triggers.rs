//! Writes the statistics file while the program runs: at a signal (`stats_signal`) and at intervals
//! (`stats_interval_s`).
//!
//! The signal's handler wakes a thread, which writes the file, and then calls the handler that the program
//! had installed for the signal before. One that the program installs later replaces ours. A forked child has
//! no such thread: there only the program's own handler is called.

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

/// Starts the threads that the settings ask for, once a process. Prints which settings have no effect, and
/// why.
pub fn start(settings: &Settings) {
    static STARTED: AtomicBool = AtomicBool::new(false);
    let interval = settings.stats_interval;
    let keys = [
        ("stats_signal", settings.stats_signal.is_some()),
        ("stats_interval_s", !interval.is_zero()),
    ];
    let keys = keys.iter().filter(|(_, is_set)| *is_set);
    let keys: Vec<_> = keys.map(|(key, _)| *key).collect();
    if keys.is_empty() || STARTED.swap(true, Ordering::Relaxed) {
        return;
    }
    let no_effect = |keys: &str, why: &str| message::print(&format!("{keys} has no effect{why}"));
    if !stats_output::is_wanted() {
        let without = format!(" without {}", stats_output::VARIABLE);
        return no_effect(&keys.join(", "), &without);
    }
    if let Some(signal) = settings.stats_signal
        && !install_handler(signal)
    {
        no_effect("stats_signal", ": no thread could be started");
    }
    let write_at_intervals = move || {
        loop {
            sleep(interval);
            stats_output::write_now();
        }
    };
    if !interval.is_zero() && !thread::start(write_at_intervals) {
        no_effect("stats_interval_s", ": no thread could be started");
    }
}

/// Wakes the thread that writes.
static WAKE: Semaphore = Semaphore::new();

/// The program's own action for the signal.
struct ProgramAction(UnsafeCell<MaybeUninit<libc::sigaction>>);
// SAFETY: it is written once, before the handler that reads it is installed.
unsafe impl Sync for ProgramAction {}
static PROGRAM_ACTION: ProgramAction = ProgramAction(UnsafeCell::new(MaybeUninit::uninit()));

/// The program's handler was for one signal only (`SA_RESETHAND`), and has been called.
static USED_UP: AtomicBool = AtomicBool::new(false);

fn install_handler(signal: c_int) -> bool {
    let write_at_signals = || {
        loop {
            WAKE.wait();
            stats_output::write_now();
        }
    };
    if !WAKE.start() || !thread::start(write_at_signals) {
        return false;
    }
    // SAFETY: `handle` fits SA_SIGINFO and calls only async-signal-safe functions besides the
    // program's own handler. No code reads `PROGRAM_ACTION` before the second call to `sigaction`.
    unsafe {
        let before = PROGRAM_ACTION.0.get().cast::<libc::sigaction>();
        if libc::sigaction(signal, ptr::null(), before) != 0 {
            return false;
        }
        let mut action: libc::sigaction = mem::zeroed();
        libc::sigemptyset(&mut action.sa_mask);
        action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
        if is_function((*before).sa_sigaction) {
            // Its own handler runs with the same signal mask, stack and flags as before.
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
    let before = unsafe { (*PROGRAM_ACTION.0.get()).assume_init_ref() };
    let used_up =
        before.sa_flags & libc::SA_RESETHAND != 0 && USED_UP.swap(true, Ordering::Relaxed);
    if !is_function(before.sa_sigaction) || used_up {
        return;
    }
    // SAFETY: the program installed this function for the signal, of the signature that its flags say.
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
