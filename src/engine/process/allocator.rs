//! The process's one allocator, and its devices.

use crate::device::driver_gpu;
use crate::device::history::{self, Plan};
use crate::device::{Device, PoolId};
use crate::driver::sys::CUstreamCaptureMode;
use crate::driver::{self, Functions};
use crate::process::cuda_calls;
use crate::process::purge_timer;
use crate::process::stats_triggers;
use crate::settings::{self, Diagnostic, Settings, Severity};
use crate::util::message;
use once_cell::sync::{Lazy, OnceCell};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::ptr;
use std::sync::atomic::{
    AtomicBool, AtomicPtr,
    Ordering::{Acquire, Relaxed, Release},
};

/// The pools of any number of devices, over one driver.
pub struct Allocator {
    functions: Functions,
    settings: Settings,
    devices: Vec<OnceCell<Device>>,
    /// Why a device could not be taken up, said once.
    complained: Mutex<Vec<i32>>,
}

impl Allocator {
    /// Initialises the driver. Takes nothing from any device yet. One line says why it cannot.
    pub fn new(functions: Functions, settings: Settings) -> Result<Self, String> {
        let mut count = 0;
        // SAFETY: `count` outlives the calls.
        let status = unsafe {
            match (functions.cuInit)(0) {
                0 => (functions.cuDeviceGetCount)(&mut count),
                status => status,
            }
        };
        match (status, count) {
            (0, 1..) => {}
            (0, _) => return Err("the CUDA driver sees no device".into()),
            _ => {
                let name = functions.error_name(status);
                return Err(format!("the CUDA driver does not start: {name}"));
            }
        }
        let devices = (0..count).map(|_| OnceCell::new()).collect();
        Ok(Allocator {
            functions,
            settings,
            devices,
            complained: Mutex::new(Vec::new()),
        })
    }

    /// The driver's functions.
    pub fn functions(&self) -> &Functions {
        &self.functions
    }

    /// For a thread of ours: what it calls may be called while other threads' streams are captured, as
    /// it is no part of what they do.
    pub(crate) fn allow_calls_in_captures(&self) {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: `mode` outlives the call.
        unsafe { (self.functions.cuThreadExchangeStreamCaptureMode)(&mut mode) };
    }

    /// The settings that the allocator was made with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// A device by its number, if it has been taken up.
    #[inline]
    pub fn device_in_use(&self, ordinal: i32) -> Option<&Device> {
        self.devices.get(ordinal as usize)?.get()
    }

    /// A device by its number, taken up on first use.
    #[inline]
    pub fn device(&self, ordinal: i32) -> Result<&Device, String> {
        match self.devices.get(ordinal as usize) {
            Some(cell) => match cell.get() {
                Some(device) => Ok(device),
                None => cell.get_or_try_init(|| self.open(ordinal)),
            },
            None => Err(format!(
                "there is no device {ordinal}: the driver sees {}, numbered from 0",
                self.devices.len()
            )),
        }
    }

    #[cold]
    fn open(&self, ordinal: i32) -> Result<Device, String> {
        let device = Device::open(
            self.functions,
            ordinal,
            self.devices.len() as i32,
            &self.settings,
        )?;
        if let Some(changed) = &*CHANGED.lock() {
            device.follow(changed);
        }
        if UNCACHED.load(Relaxed) {
            device.set_uncached(true);
        }
        Ok(device)
    }

    /// The same, saying why not on standard error, once for each device.
    #[cold]
    pub fn device_or_print(&self, ordinal: i32) -> Option<&Device> {
        self.device(ordinal)
            .map_err(|why| self.complain(ordinal, &why))
            .ok()
    }

    #[cold]
    fn complain(&self, ordinal: i32, why: &str) {
        let mut complained = self.complained.lock();
        if !complained.contains(&ordinal) {
            complained.push(ordinal);
            message::print(why);
        }
    }

    /// All segments, of one private pool or of all memory, and with `traces` each device's history:
    /// PyTorch's `_snapshot`, with numbers of places (`context`) for stacks (`frames`), and of the settings
    /// what a running program may have changed.
    pub fn snapshot(&self, only: Option<PoolId>, traces: bool) -> Value {
        let mut segments = Vec::new();
        let mut device_traces = Vec::new();
        for cell in &self.devices {
            let (here, trace) = match cell.get() {
                Some(device) => device.snapshot(only, traces),
                None => Default::default(),
            };
            segments.extend(here);
            device_traces.push(if trace.is_null() { json!([]) } else { trace });
        }
        json!({
            "segments": segments,
            "device_traces": device_traces,
            "external_annotations": history::annotations(),
            "graph_capture_record_stream_reuse": reuses_in_captures(),
        })
    }

    /// The devices taken up so far.
    pub fn devices_in_use(&self) -> impl Iterator<Item = &Device> {
        self.devices.iter().filter_map(|cell| cell.get())
    }
}

/// Only `CONCERTINA_CONF` is read.
static OWN_SETTINGS: AtomicBool = AtomicBool::new(false);

/// From now on PyTorch's variables are not read: for a process whose PyTorch, if it has one, is a
/// program like any other. No effect once the allocator has been made.
pub fn ignore_pytorch_variables() {
    OWN_SETTINGS.store(true, Relaxed);
}

/// A limit was asked for, and cannot be told from what the settings say.
static LIMIT_UNKNOWN: AtomicBool = AtomicBool::new(false);

static SETTINGS: Lazy<Settings> = Lazy::new(|| {
    let own = OWN_SETTINGS.load(Relaxed);
    let (settings, complaints) = Settings::from_lookup(|variable| {
        settings::variable_text(variable).filter(|_| !own || variable == settings::VARIABLES[0])
    });
    complaints.iter().for_each(say_of_settings);
    let unlimited = |complaint: &Diagnostic| complaint.severity == Severity::Unlimited;
    LIMIT_UNKNOWN.store(complaints.iter().any(unlimited), Relaxed);
    settings
});

/// Says what is wrong with the settings, once: they are looked at when the library is loaded and again
/// when they are first needed, and the program may have changed its environment in between.
fn say_of_settings(complaint: &Diagnostic) {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let mut said = SAID.lock();
    if !said.contains(&complaint.line) {
        message::print(&complaint.line);
        said.push(complaint.line.clone());
    }
}

/// Says now what is wrong with the settings in the environment, of which `own` is `CONCERTINA_CONF`
/// alone, and answers the worst of it.
pub fn check_settings(own: bool) -> Option<Severity> {
    let (_, complaints) = Settings::from_lookup(|variable| {
        settings::variable_text(variable).filter(|_| !own || variable == settings::VARIABLES[0])
    });
    complaints.iter().for_each(say_of_settings);
    complaints.iter().map(|complaint| complaint.severity).max()
}

/// The settings of this process, as the environment says; complaints are made on the first call.
pub fn process_settings() -> &'static Settings {
    &SETTINGS
}

/// The settings since the running program has set some anew, which devices that are taken up later
/// follow, too.
static CHANGED: Mutex<Option<Settings>> = Mutex::new(None);

/// Whether blocks are reused within captures that other streams have used, as was set last.
fn reuses_in_captures() -> bool {
    let changed = CHANGED.lock();
    let settings = changed.as_ref().unwrap_or_else(|| process_settings());
    settings.graph_capture_record_stream_reuse
}

static UNCACHED: AtomicBool = AtomicBool::new(false);

/// Whether each block is the driver's own.
pub fn is_uncached() -> bool {
    UNCACHED.load(Relaxed)
}

/// Whether each block is the driver's own from now on, on every device: PyTorch's
/// `caching_allocator_enable`.
pub fn set_uncached(uncached: bool) {
    UNCACHED.store(uncached, Relaxed);
    let devices = allocator_in_use()
        .into_iter()
        .flat_map(|it| it.devices_in_use());
    devices.for_each(|device| device.set_uncached(uncached));
}

/// The running program has set PyTorch's settings anew, as `text` says. How sizes are rounded up follows
/// it, and where it is named, whether captures reuse blocks, but for what `CONCERTINA_CONF` says; what
/// does not is named, once.
pub fn change_settings(text: &str) {
    let own = settings::VARIABLES[0];
    let (mut settings, mut complaints) = Settings::from_lookup(|variable| match variable {
        it if it == own => settings::variable_text(own),
        it if it == settings::VARIABLES[1] => Some(text.into()),
        _ => None,
    });
    complaints.retain(|complaint| !complaint.line.starts_with(own));
    // As in PyTorch: a key that is not named stays as it was, but for rounding.
    if !text.contains("graph_capture_record_stream_reuse") {
        settings.graph_capture_record_stream_reuse = reuses_in_captures();
    }
    let named = text.contains("expandable_segments");
    if named && settings.expandable_segments != process_settings().expandable_segments {
        let line = "expandable_segments has no effect here while the program runs: it is set in its \
                    environment";
        complaints.push(Diagnostic {
            line: line.into(),
            severity: Severity::Note,
        });
    }
    complaints.iter().for_each(say_of_settings);
    *CHANGED.lock() = Some(settings.clone());
    let devices = allocator_in_use()
        .into_iter()
        .flat_map(|it| it.devices_in_use());
    devices.for_each(|device| device.follow(&settings));
}

static ALLOCATOR: OnceCell<Option<Allocator>> = OnceCell::new();

/// How this process came to use the library, in a few words.
static HOW: OnceCell<fn() -> &'static str> = OnceCell::new();

/// To be called once, when the library is loaded; `how` is asked when the allocator has been made.
pub fn say_how_by(how: fn() -> &'static str) {
    // Nobody else sets it.
    let _ = HOW.set(how);
}

/// Says that the library is on, and with what.
fn announce(allocator: &Allocator) {
    static SAID: AtomicBool = AtomicBool::new(false);
    message::print_once(&SAID, || {
        let gib = |bytes: usize| bytes as f64 / (1 << 30) as f64;
        let Settings {
            limit,
            per_process_memory_fraction: share,
            changed,
            ..
        } = allocator.settings();
        let devices = (0..allocator.devices.len() as i32).map(|ordinal| {
            let (name, bytes) = driver_gpu::name_and_bytes(&allocator.functions, ordinal);
            format!("{ordinal} {name} ({:.1} GiB)", gib(bytes))
        });
        let limit = match (limit, *share < 1.0) {
            (None, false) => "none".into(),
            (None, true) => format!("{share} of each device"),
            (Some(bytes), false) => format!("{:.3} GiB on each device", gib(*bytes)),
            (Some(bytes), true) => format!("{:.3} GiB or {share} of each device", gib(*bytes)),
        };
        format!(
            "{} is on, {}; devices: {}; limit: {limit}; settings: {}",
            env!("CARGO_PKG_VERSION"),
            HOW.get().map_or("by its functions", |how| how()),
            devices.collect::<Vec<_>>().join(", "),
            changed.join(","),
        )
    });
}

/// Devices whose numbers are below this can be at hand.
const AT_HAND: usize = 64;

/// The process's devices that were asked for memory by the library's own functions, by number. What stands
/// here lies in `ALLOCATOR`, which is made once.
static READY: [AtomicPtr<Device>; AT_HAND] = [const { AtomicPtr::new(ptr::null_mut()) }; AT_HAND];

/// A device that [`add_ready_device`] was told of, if this process may use it.
#[inline(always)]
pub fn ready_device(ordinal: i32) -> Option<&'static Device> {
    let ready = READY.get(ordinal as usize)?.load(Acquire);
    // SAFETY: null, or a device in a static that is never changed again.
    unsafe { ready.as_ref() }
}

/// Has a device found at once from now on: nothing is left to be done or asked before it is used.
#[cold]
pub fn add_ready_device(device: &'static Device) {
    if let Some(ready) = READY.get(device.ordinal() as usize) {
        ready.store(ptr::from_ref(device).cast_mut(), Release);
    }
}

/// In a process that was forked, which may use no device. Only what a signal's handler may do.
pub(crate) fn remove_ready_devices() {
    for ready in &READY {
        ready.store(ptr::null_mut(), Relaxed);
    }
}

/// The process's allocator, made on the first call as the environment says. Where there is no
/// driver the answer is `None`, and one line on standard error says why.
#[inline]
pub fn allocator() -> Option<&'static Allocator> {
    match ALLOCATOR.get() {
        Some(allocator) => allocator.as_ref(),
        None => first(),
    }
}

#[cold]
fn first() -> Option<&'static Allocator> {
    let make = || {
        let allocator = match LIMIT_UNKNOWN.load(Relaxed) {
            true => Err("the limit that is set makes no sense".into()),
            false => driver::cuda().and_then(|it| Allocator::new(it, SETTINGS.clone())),
        };
        match allocator {
            Ok(allocator) => Some(allocator),
            Err(why) => {
                message::print(&format!("no memory can be had: {why}"));
                None
            }
        }
    };
    let allocator = ALLOCATOR.get_or_init(make).as_ref();
    if let Some(allocator) = allocator {
        if allocator.settings().verbose {
            announce(allocator);
        }
        purge_timer::start(allocator);
        stats_triggers::start(allocator.settings());
        if allocator.settings().stats_callers {
            cuda_calls::count_by_caller();
        }
    }
    allocator
}

/// The process's allocator if it has been made; for statistics, which make none.
#[inline]
pub fn allocator_in_use() -> Option<&'static Allocator> {
    ALLOCATOR.get().and_then(Option::as_ref)
}

/// Records the history of every device's memory from now on as planned, and nothing if there is no
/// plan; drops what was recorded before if `clear`. Devices that are taken up later follow.
pub fn record_history(plan: Option<Plan>, clear: bool) {
    history::set_plan(plan);
    allocator_in_use()
        .into_iter()
        .flat_map(|it| it.devices_in_use())
        .for_each(|device| device.follow_plan(clear));
}
