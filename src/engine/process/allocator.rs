//! The process's one allocator: its devices' pools, over one driver.

use crate::device::history::{self, Entry, Plan};
use crate::device::{Device, PoolId, trackers};
use crate::driver::Functions;
use crate::process::settings;
use crate::settings::Settings;
use crate::util::message;
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The pools of all devices of one driver. Devices are opened on first use; any thread may call anything.
pub struct Allocator {
    functions: Functions,
    settings: Settings,
    devices: Vec<OnceCell<Device>>,
    /// The devices whose failure to open has been printed.
    printed: Mutex<Vec<i32>>,
}

impl Allocator {
    /// Initialises the driver, and takes nothing from any device yet. An error is one line that says why the
    /// driver cannot be used.
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
            printed: Mutex::new(Vec::new()),
        })
    }

    /// The driver's functions.
    pub fn functions(&self) -> &Functions {
        &self.functions
    }

    /// The settings that the allocator was made with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// How many devices the driver sees.
    pub fn device_count(&self) -> usize {
        self.devices.len()
    }

    /// A device by its number, if it has been opened.
    #[inline]
    pub fn device_in_use(&self, ordinal: i32) -> Option<&Device> {
        self.devices.get(ordinal as usize)?.get()
    }

    /// A device by its number, opened if it is not yet. An error is one line that says why it cannot be used.
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
        if let Some(changed) = settings::changed_settings() {
            device.apply_settings(&changed);
        }
        if UNCACHED.load(Relaxed) {
            device.set_uncached(true);
        }
        Ok(device)
    }

    /// [`Allocator::device`], but an error is printed on standard error, once for each device.
    #[cold]
    pub fn device_or_print(&self, ordinal: i32) -> Option<&Device> {
        self.device(ordinal)
            .map_err(|why| self.print_once(ordinal, &why))
            .ok()
    }

    #[cold]
    fn print_once(&self, ordinal: i32, why: &str) {
        let mut printed = self.printed.lock();
        if !printed.contains(&ordinal) {
            printed.push(ordinal);
            message::print(why);
        }
    }

    /// The memory of all devices as PyTorch's `_snapshot`, of one private pool or of everything, and with
    /// `traces` each device's history. Stacks are numbers (`context`) in place of `frames`, and of the
    /// settings it holds those that a running program can change.
    pub fn snapshot(&self, only: Option<PoolId>, traces: bool) -> Value {
        let mut segments = Vec::new();
        let mut device_traces = Vec::new();
        for cell in &self.devices {
            let (of_device, trace) = match cell.get() {
                Some(device) => device.snapshot(only, traces),
                None => Default::default(),
            };
            segments.extend(of_device);
            device_traces.push(if trace.is_null() { json!([]) } else { trace });
        }
        json!({
            "segments": segments,
            "device_traces": device_traces,
            "external_annotations": history::annotations(),
            "graph_capture_record_stream_reuse": settings::reuses_in_captures(),
        })
    }

    /// The devices that have been opened.
    pub fn devices_in_use(&self) -> impl Iterator<Item = &Device> {
        self.devices.iter().filter_map(|cell| cell.get())
    }
}

/// The process's allocator; `None` in it if the driver cannot be used.
pub(super) static ALLOCATOR: OnceCell<Option<Allocator>> = OnceCell::new();

/// The process's allocator, if there is one yet. [`crate::process::startup::start_allocator`] makes it.
#[inline]
pub fn allocator_in_use() -> Option<&'static Allocator> {
    ALLOCATOR.get().and_then(Option::as_ref)
}

/// The devices of the process's allocator that have been opened.
pub fn devices_in_use() -> impl Iterator<Item = &'static Device> {
    allocator_in_use()
        .into_iter()
        .flat_map(|it| it.devices_in_use())
}

static UNCACHED: AtomicBool = AtomicBool::new(false);

/// Whether each allocation is one of the driver's own.
pub fn is_uncached() -> bool {
    UNCACHED.load(Relaxed)
}

/// PyTorch's `caching_allocator_enable`, inverted: with `true` each allocation is one of the driver's own
/// from now on, on every device.
pub fn set_uncached(uncached: bool) {
    UNCACHED.store(uncached, Relaxed);
    devices_in_use().for_each(|device| device.set_uncached(uncached));
}

/// PyTorch sets its settings anew while the program runs, to `text`: see [`settings::change`].
pub fn change_settings(text: &str) {
    let settings = settings::change(text);
    devices_in_use().for_each(|device| device.apply_settings(&settings));
}

/// Has `tell` called for each event of every device's memory from now on, with the device's number. No lock is
/// held then, one thread at a time is told of a device, and `tell` may allocate and unwind.
pub fn track_events(tell: fn(i32, &Entry)) {
    trackers::set_tell(tell);
    devices_in_use().for_each(Device::follow_trackers);
}

/// Records the history of every device's memory from now on as `plan` says, or nothing without one; drops
/// what was recorded before if `clear`. Devices that are opened later do the same.
pub fn record_history(plan: Option<Plan>, clear: bool) {
    history::set_plan(plan);
    devices_in_use().for_each(|device| device.follow_recording_plan(clear));
}
