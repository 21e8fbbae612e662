//! The state of one machine, under its one lock, and what every call asks of it.

use crate::clock::Clock;
use crate::config::Config;
use crate::context;
use crate::event::Event;
use crate::failure::Failures;
use crate::memory::Memory;
use crate::ordered::Pools;
use crate::pace::Pacer;
use crate::slab::Slab;
use crate::stream::{Kind, LEGACY, PER_THREAD, Streams};
use cudarc::driver::sys::{CUevent, CUresult, CUstream};

/// Success, or the status that the driver function answers with.
pub(crate) type Answer<T = ()> = Result<T, CUresult>;

/// Violations beyond these are only counted: one mistake in a loop should not fill the memory.
const KEPT_VIOLATIONS: usize = 1000;

#[derive(Debug, Default)]
pub(crate) struct Device {
    /// How often the primary context is retained; none means it does not exist.
    pub retained: u32,
    /// The flags of the primary context, and its limits by their numbers.
    pub flags: u32,
    pub limits: [usize; 12],
    /// Peers that the context may reach by `cuCtxEnablePeerAccess`, a bit each.
    pub peers: u64,
    /// The status that sticks after a fault.
    pub fault: Option<CUresult>,
    /// Blocking streams with work that the legacy stream has not joined yet, and streams with work
    /// since the host last waited for all of it. May name slots of other devices, now re-used.
    pub dirty: Vec<u32>,
    pub unseen: Vec<u32>,
}

#[derive(Debug)]
pub(crate) struct State {
    /// The machine's number, which tells its contexts from other machines'.
    pub machine: u64,
    pub config: Config,
    pub initialised: bool,
    pub devices: Vec<Device>,
    pub memory: Memory,
    pub streams: Streams,
    pub events: Slab<Event>,
    pub pacer: Pacer,
    pub pools: Pools,
    pub failures: Failures,
    /// What the host knows to be complete; everything enqueued comes after it.
    pub host: Clock,
    /// Grows whenever the host learns something.
    pub host_version: u64,
    /// How many streams capture.
    pub capturing: usize,
    /// Items enqueued so far.
    pub ordinal: u64,
    /// Once something was claimed, accesses to what has no owner are violations, unless allowed.
    pub claims: bool,
    pub unclaimed_ok: bool,
    violations: Vec<String>,
    further_violations: u64,
}

impl State {
    pub fn new(machine: u64, config: Config) -> State {
        State {
            machine,
            initialised: false,
            devices: (0..config.devices).map(|_| Device::default()).collect(),
            memory: Memory::new(&config),
            streams: Streams::new(config.devices),
            events: Slab::default(),
            pacer: Pacer::default(),
            pools: Pools::default(),
            failures: Failures::default(),
            host: Clock::default(),
            host_version: 1,
            capturing: 0,
            ordinal: 0,
            claims: false,
            unclaimed_ok: false,
            violations: Vec::new(),
            further_violations: 0,
            config,
        }
    }

    /// Records a violation.
    pub fn violation(&mut self, text: String) {
        if self.violations.len() < KEPT_VIOLATIONS {
            self.violations.push(text);
        } else {
            self.further_violations += 1;
        }
    }

    pub fn take_violations(&mut self) -> Vec<String> {
        let mut taken = std::mem::take(&mut self.violations);
        let further = std::mem::take(&mut self.further_violations);
        if further > 0 {
            taken.push(format!("{further} further violations"));
        }
        taken
    }

    /// The host learns that all of `clock` is complete.
    pub fn host_learns(&mut self, clock: &Clock) {
        if self.config.checks && self.host.join(clock) {
            self.host_version += 1;
        }
    }

    // What calls require.

    /// The device of the calling thread's context.
    pub fn device(&self) -> Answer<usize> {
        let device = context::current(self.machine).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        match self.devices[device].retained {
            0 => Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED),
            _ => Ok(device),
        }
    }

    /// That the device has not faulted.
    pub fn healthy(&self, device: usize) -> Answer {
        self.devices[device].fault.map_or(Ok(()), Err)
    }

    /// That no stream captures: the call would break the capture.
    pub fn outside_capture(&mut self, function: &str) -> Answer {
        if self.capturing == 0 {
            return Ok(());
        }
        self.violation(format!("{function} called during a capture"));
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    }

    /// That the machine has the virtual memory calls.
    pub fn has_virtual_memory(&self) -> Answer {
        match self.config.virtual_memory {
            true => Ok(()),
            false => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        }
    }

    /// The slot a stream handle means on this thread. Created streams need no current context.
    pub fn stream(&mut self, function: &str, handle: CUstream) -> Answer<u32> {
        match handle as u64 {
            0 | LEGACY => {
                let device = self.device()?;
                Ok(self.streams.legacy(device))
            }
            PER_THREAD => {
                let device = self.device()?;
                Ok(self.streams.per_thread(context::thread(), device))
            }
            handle => self.streams.named(handle).ok_or_else(|| {
                let stale = "of a stream that was destroyed or never created";
                self.violation(format!("{function} with handle {handle:#x} {stale}"));
                CUresult::CUDA_ERROR_INVALID_HANDLE
            }),
        }
    }

    /// The event a handle means.
    pub fn event(&mut self, function: &str, handle: CUevent) -> Answer<u32> {
        self.events.index(handle as u64).ok_or_else(|| {
            let (handle, stale) = (
                handle as u64,
                "of an event that was destroyed or never created",
            );
            self.violation(format!("{function} with handle {handle:#x} {stale}"));
            CUresult::CUDA_ERROR_INVALID_HANDLE
        })
    }

    /// The chunk a memory handle means.
    pub fn chunk(&mut self, function: &str, handle: u64) -> Answer<u32> {
        self.memory.chunk_of(handle).ok_or_else(|| {
            let stale = "of memory that was released or never created";
            self.violation(format!("{function} with handle {handle:#x} {stale}"));
            CUresult::CUDA_ERROR_INVALID_VALUE
        })
    }

    /// Whether a stream is in the midst of a capture that it takes part in against its will.
    pub fn implicitly_captured(&self, slot: u32) -> bool {
        let stream = self.streams.get(slot);
        let captures = |slot: &u32| {
            let other = self.streams.get(*slot);
            other.capturing && other.kind == Kind::Blocking
        };
        self.capturing > 0
            && stream.kind == Kind::Legacy
            && self.streams.created(stream.device).iter().any(captures)
    }
}
