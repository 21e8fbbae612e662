//! Start-up: what happens when the library is loaded, when the process first uses it, when its allocator is
//! made, and in a forked child. The only file of this folder that starts threads.

use crate::device::context;
use crate::driver;
use crate::ipc;
use crate::process::allocator::{ALLOCATOR, Allocator, allocator_in_use, devices_in_use};
use crate::process::cuda_calls;
use crate::process::exit;
use crate::process::purge_timer;
use crate::process::ready_devices;
use crate::process::settings::{is_limit_unknown, process_settings};
use crate::process::state;
use crate::process::stats_output;
use crate::process::stats_triggers;
use crate::settings::Settings;
use crate::util::fork;
use crate::util::message;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What the entry points contribute; set once, when the library is loaded.
pub struct Callbacks {
    /// Called once, when the library's own functions are first called.
    pub on_first_call: fn(),
    /// How the process came to use the library, in a few words for the line that `verbose` prints.
    pub attachment: fn() -> &'static str,
}

static CALLBACKS: OnceLock<Callbacks> = OnceLock::new();

/// To be called once, when the library is loaded: registers the handler for `fork` and reads
/// `CONCERTINA_STATS`. Starts no thread and does not touch the GPU.
pub fn load(callbacks: Callbacks) {
    state::set_owner();
    // SAFETY: the handler is a plain function, and the library is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
    // No other code sets them.
    let _ = CALLBACKS.set(callbacks);
    stats_output::read_variable();
}

/// The handler of `fork`, in the new process and on its only thread: it may do only what a signal's handler
/// may.
unsafe extern "C" fn after_fork() {
    ipc::stop_listening();
    ready_devices::remove_ready_devices();
    state::after_fork();
}

/// The process begins to use the library, by whatever way: installs what the end of the process needs. Before
/// the first lock is taken; every call but the first returns at once.
pub fn initialize() {
    if state::set_used() && stats_output::set_path() {
        exit::handle_sigterm();
    }
}

/// The library's own functions have been called at least once.
static CALLED: AtomicBool = AtomicBool::new(false);

/// [`initialize`] for the library's own functions, as opposed to CUDA's: the first call also runs
/// [`Callbacks::on_first_call`]. One relaxed load on every other call.
#[inline]
pub fn initialize_on_call() {
    if !CALLED.load(Relaxed) {
        initialize_on_first_call();
    }
}

#[cold]
fn initialize_on_first_call() {
    initialize();
    if !CALLED.swap(true, Relaxed)
        && !fork::in_forked_child()
        && let Some(callbacks) = CALLBACKS.get()
    {
        (callbacks.on_first_call)();
    }
}

/// The process's allocator. The first call makes it from the environment's settings and starts the threads
/// that the settings ask for. `None` if the driver cannot be used, and a line on standard error says why.
#[inline]
pub fn start_allocator() -> Option<&'static Allocator> {
    match ALLOCATOR.get() {
        Some(allocator) => allocator.as_ref(),
        None => make_allocator(),
    }
}

#[cold]
fn make_allocator() -> Option<&'static Allocator> {
    let make = || {
        let allocator = match is_limit_unknown() {
            true => Err("the limit that is set makes no sense".into()),
            false => driver::cuda().and_then(|it| Allocator::new(it, process_settings().clone())),
        };
        match allocator {
            Ok(allocator) => {
                ipc::set_devices(*allocator.functions(), || devices_in_use().collect());
                Some(allocator)
            }
            Err(why) => {
                message::print(&format!("no memory can be had: {why}"));
                None
            }
        }
    };
    ALLOCATOR.get_or_init(make);
    let allocator = allocator_in_use()?;
    let settings = allocator.settings();
    if settings.verbose {
        announce(allocator);
    }
    purge_timer::start(allocator);
    stats_triggers::start(settings);
    if settings.stats_callers {
        cuda_calls::count_by_caller();
    }
    Some(allocator)
}

/// Prints, once, that the library is on, and with which devices and settings.
fn announce(allocator: &Allocator) {
    static PRINTED: AtomicBool = AtomicBool::new(false);
    message::print_once(&PRINTED, || {
        let gib = |bytes: usize| bytes as f64 / (1 << 30) as f64;
        let Settings {
            limit,
            per_process_memory_fraction: share,
            changed,
            ..
        } = allocator.settings();
        let devices = (0..allocator.device_count() as i32).map(|ordinal| {
            let (name, bytes) = context::name_and_bytes(allocator.functions(), ordinal);
            format!("{ordinal} {name} ({:.1} GiB)", gib(bytes))
        });
        let limit = match (limit, *share < 1.0) {
            (None, false) => "none".into(),
            (None, true) => format!("{share} of each device"),
            (Some(bytes), false) => format!("{:.3} GiB on each device", gib(*bytes)),
            (Some(bytes), true) => format!("{:.3} GiB or {share} of each device", gib(*bytes)),
        };
        let attachment = CALLBACKS.get().map(|it| it.attachment);
        format!(
            "{} is on, {}; devices: {}; limit: {limit}; settings: {}",
            env!("CARGO_PKG_VERSION"),
            attachment.map_or("by its functions", |attachment| attachment()),
            devices.collect::<Vec<_>>().join(", "),
            changed.join(","),
        )
    });
}
