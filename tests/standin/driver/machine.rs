//! The process's one machine: made from the settings before the first call, looked at after the last.

use crate::function::address_of;
use crate::settings::Settings;
use concertina_sim::{FUNCTIONS, Machine, Pace};
use cudarc::driver::sys::CUresult;
use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::io::Write;
use std::mem::transmute;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// What is left of the settings once the machine is made from them.
struct Made {
    /// Whether every call lets the machine's clock advance.
    ticks: bool,
    devices: usize,
    /// Whether every call makes calls of its own.
    nested: bool,
    /// Where violations are written at exit.
    violations: Option<PathBuf>,
    /// Where calls and what is left are written at exit.
    report: Option<PathBuf>,
}

static MADE: OnceLock<Made> = OnceLock::new();

/// Whether this process was forked from one that had called the driver.
static FORKED: AtomicBool = AtomicBool::new(false);

/// What every call needs first: the machine. A child of a process that used the driver cannot use
/// it, as with the real one.
#[inline]
pub(crate) fn ready() -> Result<(), u32> {
    if FORKED.load(Ordering::Relaxed) {
        return Err(CUresult::CUDA_ERROR_NOT_INITIALIZED as u32);
    }
    let made = MADE.get_or_init(make);
    if made.ticks {
        Machine::current().tick();
    }
    if made.nested {
        nest();
    }
    Ok(())
}

/// Takes and gives back memory by the functions that the program would find by name, whoever's they are,
/// and keeps to those of others once it has seen them; whether that succeeds is nobody's business.
#[cold]
fn nest() {
    type Allocate = extern "C" fn(*mut u64, usize) -> u32;
    type Free = extern "C" fn(u64) -> u32;
    thread_local!(static INSIDE: Cell<bool> = const { Cell::new(false) });
    static FOUND: OnceLock<(Allocate, Free)> = OnceLock::new();
    if INSIDE.replace(true) {
        return;
    }
    let found = FOUND.get().copied().or_else(|| {
        // SAFETY: the driver's functions of these names have these signatures; null is none.
        let found = unsafe {
            let find = |name: &CStr| libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
            let allocate = transmute::<*mut c_void, Option<Allocate>>(find(c"cuMemAlloc_v2"));
            let free = transmute::<*mut c_void, Option<Free>>(find(c"cuMemFree_v2"));
            allocate.zip(free)
        };
        let is_own = |it: &(Allocate, Free)| address_of("cuMemAlloc_v2") == Some(it.0 as usize);
        if let Some(others) = found.filter(|it| !is_own(it)) {
            let _ = FOUND.set(others);
        }
        found
    });
    if let Some((allocate, free)) = found {
        let mut address = 0;
        if allocate(&mut address, 512) == 0 {
            free(address);
        }
    }
    INSIDE.set(false);
}

#[cold]
fn make() -> Made {
    let settings = Settings::read().unwrap_or_else(|mistake| {
        let _ = writeln!(std::io::stderr(), "stand-in driver: {mistake}");
        std::process::abort();
    });
    let devices = settings.config.devices;
    let machine = Machine::new(settings.config);
    machine.set_pace(settings.pace);
    for (function, nth, status) in settings.failures {
        match nth {
            Some(nth) => machine.fail(&function, nth, status),
            None => machine.fail_every(&function, status),
        }
    }
    Machine::make_default(machine);
    // SAFETY: both functions only touch statics, and stay: the library is never unloaded.
    unsafe {
        libc::pthread_atfork(None, None, Some(forked));
        libc::atexit(ended);
    }
    Made {
        ticks: matches!(settings.pace, Pace::Late(_)),
        devices,
        nested: settings.nested,
        violations: settings.violations,
        report: settings.report,
    }
}

extern "C" fn forked() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Writes the violations, if there were any, and the report.
extern "C" fn ended() {
    if FORKED.load(Ordering::Relaxed) {
        return;
    }
    let Some(made) = MADE.get() else {
        return;
    };
    let machine = Machine::current();
    let violations = machine.violations();
    if let Some(path) = made.violations.as_ref().filter(|_| !violations.is_empty()) {
        write(path, &(violations.join("\n") + "\n"));
    }
    if let Some(path) = &made.report {
        write(path, &report(&machine, made.devices));
    }
}

/// What was called, and what was not given back, a line each.
fn report(machine: &Machine, devices: usize) -> String {
    let calls = FUNCTIONS.iter().map(|name| (*name, machine.calls(name)));
    let left = [
        ("most", (0..devices).map(|it| machine.most_used(it)).sum()),
        ("bytes", (0..devices).map(|it| machine.used(it)).sum()),
        ("handles", machine.handles() as u64),
        ("mappings", machine.mappings() as u64),
        ("addresses", machine.reserved_addresses()),
    ];
    let lines = calls.filter(|(_, count)| *count > 0).chain(left);
    lines
        .map(|(name, count)| format!("{name} {count}\n"))
        .collect()
}

fn write(path: &Path, text: &str) {
    if let Err(error) = std::fs::write(path, text) {
        let _ = writeln!(std::io::stderr(), "stand-in driver: {path:?}: {error}");
    }
}
