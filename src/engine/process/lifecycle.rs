//! Start, fork and exit: when the statistics are written, and by whom.
//!
//! ```text
//!             first_use                 fork
//!   Unused ─────────────▶ Used ─────────────────▶ Child (in the new process)
//!      ╰──── fork ───▶ Unused, with an owner of its own
//! ```
//!
//! *Unused*: loaded, never asked for memory. No thread runs, no signal is handled, and a forked child
//! is as free as its parent was. At a normal exit it writes a file that says so, if somebody may
//! expect one of it (see [`expect_statistics`]), and in nobody's place. *Used*: the owner, the process that
//! asked, writes the file that `CONCERTINA_STATS` names at a normal exit, at `os._exit` in Python
//! and at SIGTERM. *Child*: forked from a used process, whose GPU it cannot share and whose locks
//! may be held by threads that do not exist here. It takes no lock, gets no memory, writes nothing.
//!
//! A process made without `fork`'s handlers (`vfork`, `clone`) still believes that it is *Used*;
//! so whoever writes compares the process's id with the owner's first.
//!
//! SIGTERM is looked at on the first use, and left alone unless its disposition is the default one.
//! The handler holds up the thread that it interrupts and wakes a helper, which writes the file and
//! then lets the signal end the process as it would have. Two seconds after the signal a timer ends
//! the process whatever the helper does.

use crate::driver;
use crate::ipc;
use crate::process::allocator;
use crate::process::cuda_calls;
use crate::process::stats;
use crate::process::stats_file;
use crate::settings;
use crate::util::message;
use crate::util::thread;
use std::ffi::{CStr, c_int, c_void};
use std::mem::{self, MaybeUninit};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU8, Ordering};
use std::time::{Duration, SystemTime};

pub use stats_file::Failure;

/// The variable that holds the path of the statistics.
pub const VARIABLE: &str = "CONCERTINA_STATS";

/// How long a writer waits for locks that other threads hold.
const PATIENCE: Duration = Duration::from_secs(1);

const UNUSED: u8 = 0;
const USED: u8 = 1;
const CHILD: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(UNUSED);
/// The process that may write; 0 where [`start`] was never called.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// This process was forked from one that had the library loaded.
static FORKED: AtomicBool = AtomicBool::new(false);
/// What `CONCERTINA_STATS` said at the start, from the directory that was the current one then.
static PATTERN: OnceLock<Vec<u8>> = OnceLock::new();
/// When that was.
static STARTED: OnceLock<SystemTime> = OnceLock::new();
/// Statistics are expected of this process even if it does not use the GPU.
static EXPECTED: AtomicBool = AtomicBool::new(false);
/// The path that it stood for on the first use. Empty where nothing is to be written.
static PATH: OnceLock<PathBuf> = OnceLock::new();
/// The last statistics of this process are being written, or have been.
static ENDING: AtomicBool = AtomicBool::new(false);
/// The library's own functions have been called.
static ASKED: AtomicBool = AtomicBool::new(false);
/// What else is to be done then.
static ON_FIRST_USE: OnceLock<fn()> = OnceLock::new();

/// Whether this process was forked from one that had used the library. Every entry point asks this
/// before it takes a lock, unless it has a device that is at hand, which none is in such a process. One
/// relaxed load.
#[inline]
pub fn in_forked_child() -> bool {
    STATE.load(Ordering::Relaxed) == CHILD
}

/// Says once why a forked child gets no memory.
#[cold]
pub fn explain_forked_child() {
    static SAID: AtomicBool = AtomicBool::new(false);
    message::print_once(&SAID, || {
        "no memory: this process was forked from one that already used the GPU, which a child \
         cannot share; start it with spawn or forkserver"
    });
}

/// Whether `CONCERTINA_STATS` was set when the library was loaded.
pub fn wants_statistics() -> bool {
    PATTERN.get().is_some()
}

/// Takes up its post: to be called once, when the library is loaded. Registers with `fork`, reads
/// `CONCERTINA_STATS`, and does nothing else. `on_first_use` is called on the first use.
pub fn start(on_first_use: fn()) {
    OWNER.store(process(), Ordering::Relaxed);
    // SAFETY: the handler is a plain function, and the library is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
    // Nobody else sets them.
    let _ = ON_FIRST_USE.set(on_first_use);
    if let Some(pattern) = settings::variable(VARIABLE).filter(|pattern| !pattern.is_empty()) {
        let _ = PATTERN.set(stats_file::absolute(pattern.into_vec()));
        let _ = STARTED.set(stats_file::file_time());
        cuda_calls::set_epoch();
    }
}

/// Says now what would keep the statistics from being written.
pub fn check_path() {
    if let Some(pattern) = PATTERN.get()
        && let Err(failure) = check_pattern(pattern)
    {
        complain(&failure);
    }
}

/// What would keep them from being written, if anything does.
pub fn path_mistake() -> Option<String> {
    let failure = check_pattern(PATTERN.get()?).err()?;
    Some(format!("{VARIABLE}: {}", failure.line))
}

/// What would keep the statistics of this process from being written to what `pattern` stands for.
pub fn check_pattern(pattern: &[u8]) -> Result<(), Failure> {
    stats_file::check_writable(&stats_file::expand(pattern)?)
}

/// The process is one of which statistics are expected even if it does not use the GPU: it was started
/// or fitted for that. Others only happen to have the library, as every shell has under `LD_PRELOAD`.
pub fn expect_statistics() {
    EXPECTED.store(true, Ordering::Relaxed);
}

/// Runs in the new process, on its only thread, before `fork` returns: it may do only what a signal's
/// handler may.
unsafe extern "C" fn after_fork() {
    ipc::stop_listening();
    allocator::remove_ready_devices();
    FORKED.store(true, Ordering::Relaxed);
    match STATE.load(Ordering::Relaxed) {
        UNUSED => OWNER.store(process(), Ordering::Relaxed),
        _ => STATE.store(CHILD, Ordering::Relaxed),
    }
}

/// The library has been asked for memory by its own functions, or told to initialise. To be called
/// before the first lock is taken; every call but the first returns at once.
#[inline]
pub fn first_use() {
    if !ASKED.load(Ordering::Relaxed) {
        first_use_ever();
    }
}

#[cold]
fn first_use_ever() {
    begin();
    if !ASKED.swap(true, Ordering::Relaxed)
        && !in_forked_child()
        && let Some(also) = ON_FIRST_USE.get()
    {
        also();
    }
}

/// The same where it is not the library's own functions that were called: nothing else is done.
pub fn begin() {
    let first = STATE.compare_exchange(UNUSED, USED, Ordering::Relaxed, Ordering::Relaxed);
    if first.is_err() {
        return;
    }
    let Some(pattern) = PATTERN.get() else {
        return;
    };
    // A child that began afresh may not write over what its parent may want to write, too.
    if FORKED.load(Ordering::Relaxed) && !stats_file::names_process(pattern) {
        return;
    }
    match stats_file::expand(pattern) {
        Ok(path) => {
            let _ = PATH.set(path);
            term::install();
        }
        Err(failure) => complain(&failure),
    }
}

/// The path of the statistics, if they are this process's to write.
fn path_to_write() -> Option<&'static PathBuf> {
    let mine = STATE.load(Ordering::Relaxed) == USED && is_owner();
    PATH.get().filter(|_| mine)
}

/// Whether this is the process that may write. Async-signal-safe.
pub(crate) fn is_owner() -> bool {
    OWNER.load(Ordering::Relaxed) == process()
}

/// Writes the file that `CONCERTINA_STATS` names, if it is this process's to write, unless it is about
/// to end: what was begun then could not be finished.
pub(crate) fn write_now() {
    let unless_ending = || (!ENDING.load(Ordering::Relaxed)).then(|| stats::json(PATIENCE));
    if let Some(path) = path_to_write() {
        write(path, unless_ending);
    }
}

/// The process is about to end: writes the file that `CONCERTINA_STATS` names, if it is this
/// process's to write, and says once on standard error why it could not. May be called again, for a
/// newer state of things. Does not return to a process that SIGTERM is ending.
pub fn before_exit() {
    if let Some(path) = path_to_write() {
        term::give_way();
        ENDING.store(true, Ordering::Relaxed);
        write(path, || Some(stats::json(PATIENCE)));
    } else if let Some(path) = path_of_unused() {
        write(&path, || Some(stats::json(PATIENCE)));
    }
}

/// The path of the statistics of a process that has not used the GPU, if it is to write any. It takes
/// the place of no other process's, unless that is long over.
fn path_of_unused() -> Option<PathBuf> {
    let (pattern, started) = PATTERN.get().zip(STARTED.get())?;
    let unused = STATE.load(Ordering::Relaxed) == UNUSED && is_owner();
    if !unused || FORKED.load(Ordering::Relaxed) || settings::is_disabled() {
        return None;
    }
    if !EXPECTED.load(Ordering::Relaxed) && !driver::is_loaded() {
        return None;
    }
    // What is wrong with it was said at the start.
    let path = stats_file::expand(pattern).ok()?;
    let free = stats_file::names_process(pattern) || stats_file::is_left_over(&path, *started);
    free.then_some(path)
}

fn write(path: &Path, text: impl FnOnce() -> Option<String>) {
    if let Err(failure) = stats_file::write(path, PATIENCE, text) {
        complain(&failure);
    }
}

/// Says once why there will be no statistics.
fn complain(failure: &Failure) {
    static SAID: AtomicBool = AtomicBool::new(false);
    message::print_once(&SAID, || format!("{VARIABLE}: {}", failure.line));
}

/// Writes the statistics now: to the path that `pattern` stands for, or to the one that
/// `CONCERTINA_STATS` named when the library was loaded.
pub fn dump(pattern: Option<&CStr>) -> Result<(), Failure> {
    let failure = |errno, why: &str| Failure {
        errno,
        line: format!("statistics not written: {why}"),
    };
    if in_forked_child() {
        return Err(failure(
            libc::ECHILD,
            "this process was forked from the one they are about",
        ));
    }
    let path = match (pattern, PATH.get(), PATTERN.get()) {
        (Some(pattern), ..) => &stats_file::expand(pattern.to_bytes())?,
        (None, Some(path), _) => path,
        (None, None, Some(pattern)) => &stats_file::expand(pattern)?,
        (None, None, None) => {
            return Err(failure(
                libc::EINVAL,
                "no path is given, and CONCERTINA_STATS is not set",
            ));
        }
    };
    stats_file::write(path, PATIENCE, || Some(stats::json(PATIENCE)))
}

fn process() -> i32 {
    // SAFETY: getpid has no preconditions.
    unsafe { libc::getpid() }
}

/// SIGTERM.
mod term {
    use super::*;
    use crate::util::semaphore::Semaphore;

    /// How long the process lives on at most.
    const LAST_SECONDS: libc::time_t = 2;
    /// How many naps the interrupted thread takes before it asks itself whether it is what the
    /// helper waits for: half a second, which leaves the helper time enough.
    const NAPS: usize = 100;

    /// SIGTERM has come to this process.
    static CAME: AtomicBool = AtomicBool::new(false);
    /// The helper has the text, and needs nothing more that another thread may hold.
    static HAS_TEXT: AtomicBool = AtomicBool::new(false);

    /// Wakes the helper.
    static WAKE: Semaphore = Semaphore::new();

    /// Ends the process when its last seconds are over; a `timer_t`.
    static TIMER: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

    /// Installs the handler, if SIGTERM has its default disposition and all that the handler needs
    /// can be had.
    pub fn install() {
        // A process that is the first of its container is not ended by SIGTERM's default action.
        if process() == 1 || !is_default() || !make_tools() || !thread::start(help) {
            return;
        }
        // SAFETY: `handle` calls only async-signal-safe functions and fits SA_SIGINFO; a zeroed
        // sigaction with an empty mask is a valid one.
        unsafe {
            let mut action: libc::sigaction = mem::zeroed();
            action.sa_sigaction = handle as *const () as usize;
            // SA_NODEFER lets the timer in where the only thread is the one that naps in `handle`.
            action.sa_flags =
                libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART | libc::SA_NODEFER;
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

    fn make_tools() -> bool {
        // SAFETY: a zeroed sigevent is a valid one.
        unsafe {
            let mut event: libc::sigevent = mem::zeroed();
            event.sigev_notify = libc::SIGEV_SIGNAL;
            event.sigev_signo = libc::SIGTERM;
            let mut timer: libc::timer_t = ptr::null_mut();
            let made = WAKE.start()
                && libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) == 0;
            TIMER.store(timer, Ordering::Relaxed);
            made
        }
    }

    /// The handler. Everything here is async-signal-safe.
    extern "C" fn handle(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
        // SAFETY: errno's location is this thread's own, the kernel hands over a valid siginfo, and
        // the timer was made before the handler was installed.
        unsafe {
            let errno = libc::__errno_location();
            let before = *errno;
            if !is_owner() {
                // A child, which has neither helper nor timer.
                die();
            }
            if !CAME.swap(true, Ordering::Relaxed) {
                let mut end: libc::itimerspec = mem::zeroed();
                end.it_value.tv_sec = LAST_SECONDS;
                if libc::timer_settime(TIMER.load(Ordering::Relaxed), 0, &end, ptr::null_mut()) != 0
                    || !WAKE.post()
                {
                    die();
                }
                let mut naps = 0;
                while naps < NAPS || HAS_TEXT.load(Ordering::Relaxed) {
                    nap();
                    naps += 1;
                }
            } else if (*info).si_code == libc::SI_TIMER {
                die();
            }
            *errno = before;
        }
    }

    /// The helper's life.
    fn help() {
        WAKE.wait();
        let write_last = || {
            let Some(path) = path_to_write() else { return };
            write(path, || {
                let text = stats::json(PATIENCE);
                HAS_TEXT.store(true, Ordering::Relaxed);
                Some(text)
            });
        };
        // A panic must not keep the process alive.
        let _ = std::panic::catch_unwind(write_last);
        die();
    }

    /// Lets SIGTERM do what it does by default. Async-signal-safe.
    fn die() -> ! {
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

    /// A process that SIGTERM is ending does not end itself first.
    pub fn give_way() {
        while CAME.load(Ordering::Relaxed) {
            nap();
        }
    }

    /// Five milliseconds. Async-signal-safe.
    fn nap() {
        // SAFETY: no descriptors are passed.
        unsafe { libc::poll(ptr::null_mut(), 0, 5) };
    }
}
