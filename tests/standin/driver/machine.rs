//! The process's one machine: made from the settings before the first call, looked at after the last.

use crate::settings::Settings;
use concertina_sim::{FUNCTIONS, Machine, Pace};
use cudarc::driver::sys::CUresult;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// What is left of the settings once the machine is made from them.
struct Made {
    /// Whether every call lets the machine's clock advance.
    ticks: bool,
    devices: usize,
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
    if MADE.get_or_init(make).ticks {
        Machine::current().tick();
    }
    Ok(())
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
