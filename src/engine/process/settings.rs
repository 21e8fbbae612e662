//! The settings of this process: those of its environment, and what PyTorch changes while the program runs.

use crate::settings::{self, Diagnostic, Settings, Severity, VARIABLES};
use crate::util::message;
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Only `CONCERTINA_CONF` is read.
static IGNORE_PYTORCH: AtomicBool = AtomicBool::new(false);

/// From now on PyTorch's variables are not read: for a process in which the library is not PyTorch's
/// allocator. No effect once the settings have been read.
pub fn ignore_pytorch_variables() {
    IGNORE_PYTORCH.store(true, Relaxed);
}

/// A limit is set, but its value is a mistake.
static LIMIT_UNKNOWN: AtomicBool = AtomicBool::new(false);

static SETTINGS: Lazy<Settings> = Lazy::new(|| {
    let (settings, diagnostics) = read_environment(IGNORE_PYTORCH.load(Relaxed));
    let unlimited = |it: &Diagnostic| it.severity == Severity::LimitMistake;
    LIMIT_UNKNOWN.store(diagnostics.iter().any(unlimited), Relaxed);
    settings
});

/// Reads the settings and prints what is wrong with them; with `own_only`, those of `CONCERTINA_CONF` alone.
fn read_environment(own_only: bool) -> (Settings, Vec<Diagnostic>) {
    let (settings, diagnostics) = Settings::from_lookup(|variable| {
        settings::variable_text(variable).filter(|_| !own_only || variable == VARIABLES[0])
    });
    diagnostics.iter().for_each(print_diagnostic);
    (settings, diagnostics)
}

/// Prints a diagnostic, each line once: the settings are read when the library is loaded and again when they
/// are first needed, and the program may have changed its environment in between.
fn print_diagnostic(diagnostic: &Diagnostic) {
    static PRINTED: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let mut printed = PRINTED.lock();
    if !printed.contains(&diagnostic.line) {
        message::print(&diagnostic.line);
        printed.push(diagnostic.line.clone());
    }
}

/// Prints what is wrong with the settings in the environment, with `own_only` with those of `CONCERTINA_CONF`
/// alone. Returns the worst of it.
pub fn check_settings(own_only: bool) -> Option<Severity> {
    let (_, diagnostics) = read_environment(own_only);
    diagnostics.iter().map(|it| it.severity).max()
}

/// The settings of this process's environment, read on the first call.
pub fn process_settings() -> &'static Settings {
    &SETTINGS
}

/// Whether a limit is set whose value is a mistake: then the process gets no memory, rather than any amount.
pub fn is_limit_unknown() -> bool {
    Lazy::force(&SETTINGS);
    LIMIT_UNKNOWN.load(Relaxed)
}

/// The settings since PyTorch last changed some of them while the program runs; devices that are opened later
/// start with them.
static CHANGED: Mutex<Option<Settings>> = Mutex::new(None);

/// The settings that PyTorch has changed while the program runs, if it has.
pub fn changed_settings() -> Option<Settings> {
    CHANGED.lock().clone()
}

/// `graph_capture_record_stream_reuse` as it was set last.
pub fn reuses_in_captures() -> bool {
    let changed = CHANGED.lock();
    let settings = changed.as_ref().unwrap_or_else(|| process_settings());
    settings.graph_capture_record_stream_reuse
}

/// PyTorch sets its settings anew while the program runs, to `text`. Returns what devices have to follow: the
/// rounding of sizes, and `graph_capture_record_stream_reuse` where `text` names it. `CONCERTINA_CONF` still
/// decides what it names; what has no effect is printed, once.
pub fn change(text: &str) -> Settings {
    let own = VARIABLES[0];
    let (mut settings, mut diagnostics) = Settings::from_lookup(|variable| match variable {
        it if it == own => settings::variable_text(own),
        it if it == VARIABLES[1] => Some(text.into()),
        _ => None,
    });
    diagnostics.retain(|it| !it.line.starts_with(own));
    // As in PyTorch: a key that is not named stays as it was, but for rounding.
    if !text.contains("graph_capture_record_stream_reuse") {
        settings.graph_capture_record_stream_reuse = reuses_in_captures();
    }
    let named = text.contains("expandable_segments");
    if named && settings.expandable_segments != process_settings().expandable_segments {
        let line = "expandable_segments has no effect here while the program runs: it is set in its \
                    environment";
        diagnostics.push(Diagnostic {
            line: line.into(),
            severity: Severity::Note,
        });
    }
    diagnostics.iter().for_each(print_diagnostic);
    *CHANGED.lock() = Some(settings.clone());
    settings
}
