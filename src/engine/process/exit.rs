//! The statistics file at the end of the process: at exit, and at SIGTERM.
//!
//! The handler for SIGTERM is installed when the library is first used, if the signal still has its default
//! disposition then. It holds up the thread that it interrupts and wakes another one, which writes the file
//! and lets the signal end the process as it would have. Two seconds after the signal a timer ends the
//! process in any case.

use crate::process::state;
use crate::process::stats_output::{self, path_to_write};
use crate::util::semaphore::Semaphore;
use crate::util::thread;
use std::ffi::{c_int, c_void};
use std::mem::{self, MaybeUninit};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::Relaxed};

/// The process is about to end: writes the file that `CONCERTINA_STATS` names, if it is this process's to
/// write, and prints once why it could not. May be called again, which replaces the file by newer figures.
/// Does not return while SIGTERM is ending the process.
pub fn write_at_exit() {
    if let Some(path) = path_to_write() {
        wait_if_terminating();
        stats_output::set_ending();
        stats_output::write(path, || Some(stats_output::statistics()));
    } else if let Some(path) = stats_output::path_of_unused() {
        stats_output::write(&path, || Some(stats_output::statistics()));
    }
}

/// How long the process lives after SIGTERM at most.
const TERMINATION_SECONDS: libc::time_t = 2;
/// How many pauses the interrupted thread makes before it goes on: it may hold a lock that the writing thread
/// waits for. Half a second in all, which leaves the writing thread the rest.
const PAUSES: usize = 100;

/// SIGTERM has come to this process.
static TERMINATING: AtomicBool = AtomicBool::new(false);
/// The writing thread has the text, and needs no lock any more that the interrupted thread may hold.
static HAS_TEXT: AtomicBool = AtomicBool::new(false);

/// Wakes the writing thread.
static WAKE: Semaphore = Semaphore::new();

/// Ends the process [`TERMINATION_SECONDS`] after the signal; a `timer_t`.
static TIMER: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Installs the handler, if SIGTERM has its default disposition and the thread, the semaphore and the timer
/// that it needs could be made.
pub fn handle_sigterm() {
    // A process that is the first of its container is not ended by SIGTERM's default action.
    if state::id() == 1
        || !is_default()
        || !make_semaphore_and_timer()
        || !thread::start(write_and_terminate)
    {
        return;
    }
    // SAFETY: `handle` calls only async-signal-safe functions and fits SA_SIGINFO; a zeroed sigaction with an
    // empty mask is a valid one.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = handle as *const () as usize;
        // SA_NODEFER lets the timer's signal in if the only thread is the one that pauses in `handle`.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART | libc::SA_NODEFER;
        libc::sigemptyset(&mut action.sa_mask);
        libc::sigaction(libc::SIGTERM, &action, ptr::null_mut());
    }
}

fn is_default() -> bool {
    let mut now = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: sigaction fills in the disposition when it succeeds.
    unsafe {
        libc::sigaction(libc::SIGTERM, ptr::null(), now.as_mut_ptr()) == 0
            && now.assume_init().sa_sigaction == libc::SIG_DFL
    }
}

fn make_semaphore_and_timer() -> bool {
    // SAFETY: a zeroed sigevent is a valid one.
    unsafe {
        let mut event: libc::sigevent = mem::zeroed();
        event.sigev_notify = libc::SIGEV_SIGNAL;
        event.sigev_signo = libc::SIGTERM;
        let mut timer: libc::timer_t = ptr::null_mut();
        let made =
            WAKE.start() && libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) == 0;
        TIMER.store(timer, Relaxed);
        made
    }
}

/// The handler. Everything here is async-signal-safe.
extern "C" fn handle(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: errno's location is this thread's own, the kernel hands over a valid siginfo, and the timer was
    // made before the handler was installed.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        if !state::is_owner() {
            // A child, which has neither the writing thread nor the timer.
            terminate();
        }
        if !TERMINATING.swap(true, Relaxed) {
            let mut end: libc::itimerspec = mem::zeroed();
            end.it_value.tv_sec = TERMINATION_SECONDS;
            if libc::timer_settime(TIMER.load(Relaxed), 0, &end, ptr::null_mut()) != 0
                || !WAKE.post()
            {
                terminate();
            }
            let mut pauses = 0;
            while pauses < PAUSES || HAS_TEXT.load(Relaxed) {
                pause();
                pauses += 1;
            }
        } else if (*info).si_code == libc::SI_TIMER {
            terminate();
        }
        *errno = before;
    }
}

/// The writing thread.
fn write_and_terminate() {
    WAKE.wait();
    let write_last = || {
        let Some(path) = path_to_write() else { return };
        stats_output::write(path, || {
            let text = stats_output::statistics();
            HAS_TEXT.store(true, Relaxed);
            Some(text)
        });
    };
    // A panic must not keep the process alive.
    let _ = std::panic::catch_unwind(write_last);
    terminate();
}

/// Has SIGTERM do what it does by default. Async-signal-safe.
fn terminate() -> ! {
    // SAFETY: these functions are async-signal-safe, and the zeroed structures valid.
    unsafe {
        let mut default: libc::sigaction = mem::zeroed();
        default.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(libc::SIGTERM, &default, ptr::null_mut());
        let mut term = MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(term.as_mut_ptr());
        libc::sigaddset(term.as_mut_ptr(), libc::SIGTERM);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, term.as_ptr(), ptr::null_mut());
        libc::raise(libc::SIGTERM);
        // Not reached, unless something below the C library keeps the signal away.
        libc::_exit(128 + libc::SIGTERM)
    }
}

/// Waits for the end if SIGTERM is ending the process, so that its exit status is the signal's.
fn wait_if_terminating() {
    while TERMINATING.load(Relaxed) {
        pause();
    }
}

/// Five milliseconds. Async-signal-safe.
fn pause() {
    // SAFETY: no descriptors are passed.
    unsafe { libc::poll(ptr::null_mut(), 0, 5) };
}
