//! The state of one machine, which one lock protects, and the checks that driver functions share.

use crate::clock::Clock;
use crate::config::Config;
use crate::context;
use crate::event::Event;
use crate::failure::Failures;
use crate::graph::{Capture, Graph, Node, Part};
use crate::memory::Memory;
use crate::pace::Pacer;
use crate::slab::Slab;
use crate::stream::{Kind, LEGACY, PER_THREAD, Streams};
use crate::work::Work;
use cudarc::driver::sys::{CUevent, CUresult, CUstream};
use std::collections::{BTreeMap, BTreeSet};

/// The result of a driver function: success, or the status that it returns.
pub(crate) type DriverResult<T = ()> = Result<T, CUresult>;

/// Violations beyond these are only counted: one mistake in a loop should not fill the memory.
const KEPT_VIOLATIONS: usize = 1000;

#[derive(Debug, Default)]
pub(crate) struct Device {
    /// How often the primary context is retained; none means it does not exist.
    pub retained: u32,
    /// The flags of the primary context, and its limits by their numbers.
    pub flags: u32,
    pub limits: [usize; 12],
    /// The pool that was chosen in place of the default one.
    pub pool: Option<u32>,
    /// Peers that the context may reach by `cuCtxEnablePeerAccess`, a bit each.
    pub peers: u64,
    /// The status that sticks after a fault.
    pub fault: Option<CUresult>,
    /// Blocking streams with work that the legacy stream has not joined yet, and streams with work
    /// since the host last waited for all of it. May name slots of other devices, now re-used.
    pub dirty: Vec<u32>,
    pub unseen: Vec<u32>,
    /// What kernels need is there.
    pub has_kernels: bool,
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
    /// Contexts that the program made, by number, and how many there ever were.
    pub made: BTreeSet<usize>,
    pub ever_made: usize,
    /// Allocations that belong to such a context.
    pub owned: BTreeMap<u64, usize>,
    pub failures: Failures,
    /// What the host knows to be complete; everything enqueued comes after it.
    pub host: Clock,
    /// Grows whenever the host learns something.
    pub host_version: u64,
    /// How many streams capture.
    pub capturing: usize,
    pub captures: Slab<Capture>,
    /// How many captures there have been.
    pub captured: u64,
    pub graphs: Slab<Graph>,
    pub executables: Slab<Graph>,
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
            made: BTreeSet::new(),
            ever_made: 0,
            owned: BTreeMap::new(),
            failures: Failures::default(),
            host: Clock::default(),
            host_version: 1,
            capturing: 0,
            captures: Slab::default(),
            captured: 0,
            graphs: Slab::default(),
            executables: Slab::default(),
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
    pub fn host_observes(&mut self, clock: &Clock) {
        if self.config.checks && self.host.join(clock) {
            self.host_version += 1;
        }
    }

    // What calls require.

    /// The device of the calling thread's context.
    pub fn device(&self) -> DriverResult<usize> {
        let number = context::current(self.machine).ok_or(CUresult::CUDA_ERROR_INVALID_CONTEXT)?;
        match self.context_exists(number) {
            true => Ok(number % context::DEVICES),
            false => Err(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED),
        }
    }

    /// Whether there is a context of this number.
    pub fn context_exists(&self, number: usize) -> bool {
        match self.devices.get(number) {
            Some(device) if number < context::DEVICES => device.retained > 0,
            _ => self.made.contains(&number),
        }
    }

    /// The number of the context that an allocation belongs to.
    pub fn owner_of(&self, address: u64, device: usize) -> usize {
        self.owned.get(&address).copied().unwrap_or(device)
    }

    /// That the device has not faulted.
    pub fn check_not_faulted(&self, device: usize) -> DriverResult {
        self.devices[device].fault.map_or(Ok(()), Err)
    }

    /// That no capture forbids the call to this thread: it would break the capture, and does.
    pub fn outside_capture(&mut self, function: &str) -> DriverResult {
        if self.capturing == 0 {
            return Ok(());
        }
        let (mode, thread) = (context::capture_mode(), context::thread());
        let real: usize = self.captures.iter().map(|(_, it)| it.parts.len()).sum();
        let mut broken = self.capturing > real;
        for (_, capture) in self.captures.iter_mut() {
            let breaks = capture.forbids(mode, thread);
            capture.invalid |= breaks;
            broken |= breaks;
        }
        match broken {
            true => self.capture_broken(function),
            false => Ok(()),
        }
    }

    /// That no stream captures: an event on a whole context breaks every capture, in whatever mode, and so
    /// does a wait for one (H100 and H200, driver 580).
    pub fn without_capture(&mut self, function: &str) -> DriverResult {
        if self.capturing == 0 {
            return Ok(());
        }
        for (_, capture) in self.captures.iter_mut() {
            capture.invalid = true;
        }
        self.capture_broken(function)
    }

    /// That a stream does not capture: waiting for it would wait for ever.
    pub fn not_captured(&mut self, function: &str, slot: u32) -> DriverResult {
        let stream = self.streams.get(slot);
        if !stream.capturing && stream.capture.is_none() {
            return Ok(());
        }
        if let Some(index) = stream.capture
            && let Some(capture) = self.captures.get_mut(index)
        {
            capture.invalid = true;
        }
        self.capture_broken(function)
    }

    fn capture_broken(&mut self, function: &str) -> DriverResult {
        self.violation(format!("{function} called during a capture"));
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    }

    /// That work on the stream is not ordered with a capture against its will: the legacy stream with one of
    /// a stream that synchronizes with it. That breaks the capture.
    pub fn not_implicitly_captured(&mut self, function: &str, slot: u32) -> DriverResult {
        if !self.implicitly_captured(slot) {
            return Ok(());
        }
        let streams = &self.streams;
        for (_, capture) in self.captures.iter_mut() {
            let mut parts = capture.parts.iter();
            capture.invalid |= parts.any(|it| streams.get(it.slot).kind == Kind::Blocking);
        }
        self.violation(format!("{function} on the legacy stream during a capture"));
        Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
    }

    /// Begins a capture on a stream.
    pub fn begin_capture(&mut self, slot: u32, mode: u32) {
        self.captured += 1;
        let graph = self.graphs.insert(Graph::default());
        let capture = self.captures.insert(Capture {
            graph,
            id: self.captured,
            mode,
            thread: context::thread(),
            invalid: false,
            parts: Vec::new(),
        });
        self.join_capture(slot, capture);
    }

    /// Makes a stream take part in a capture.
    pub fn join_capture(&mut self, slot: u32, index: u32) {
        let Some(capture) = self.captures.get_mut(index) else {
            return;
        };
        capture.parts.push(Part {
            slot,
            recorded: 0,
            joined: 0,
            ends: Vec::new(),
            told: Vec::new(),
        });
        let stream = self.streams.get_mut(slot);
        (stream.capture, stream.capturing) = (Some(index), true);
        self.capturing += 1;
    }

    /// Records work that a stream was given, if it takes part in a capture.
    pub fn record(&mut self, slot: u32, work: &Work) -> bool {
        let Some(index) = self.streams.get(slot).capture else {
            return false;
        };
        let Some(capture) = self.captures.get_mut(index) else {
            return false;
        };
        let graph = capture.graph;
        if let Some(part) = capture.part(slot)
            && let Some(graph) = self.graphs.get_mut(graph)
        {
            part.recorded += 1;
            let after = std::mem::replace(&mut part.ends, vec![graph.nodes.len()]);
            let work = work.clone();
            graph.nodes.push(Node { work, after });
        }
        true
    }

    /// Records a graph's nodes, each after those that it comes after, if the stream takes part in a
    /// capture.
    pub fn record_graph(&mut self, slot: u32, nodes: &[Node]) -> bool {
        // A place for all of them to come after.
        if !self.record(slot, &Work::Mark) {
            return false;
        }
        let index = self.streams.get(slot).capture;
        if let Some(capture) = index.and_then(|index| self.captures.get_mut(index))
            && let Some(graph) = self.graphs.get_mut(capture.graph)
        {
            let first = graph.nodes.len();
            graph.nodes.extend(nodes.iter().map(|node| Node {
                work: node.work.clone(),
                after: match node.after.is_empty() {
                    true => vec![first - 1],
                    false => node.after.iter().map(|it| it + first).collect(),
                },
            }));
            let all: Vec<usize> = (first..graph.nodes.len()).collect();
            capture.extend(slot, &all);
        }
        true
    }

    /// Ends a capture, whole or broken; its streams are free again.
    pub fn end_capture(&mut self, index: u32) -> Option<Capture> {
        let capture = self.captures.remove(index)?;
        for part in &capture.parts {
            let stream = self.streams.get_mut(part.slot);
            // A slot may be another stream's by now.
            if stream.capture.take_if(|it| *it == index).is_some() {
                stream.capturing = false;
                self.capturing -= 1;
            }
        }
        Some(capture)
    }

    /// Ends a stream's handle. A capture that it takes part in can't be finished any more.
    pub fn destroy_stream(&mut self, slot: u32) {
        let stream = self.streams.get_mut(slot);
        let capture = stream.capture.take();
        self.capturing -= usize::from(stream.capturing);
        if let Some(capture) = capture.and_then(|index| self.captures.get_mut(index)) {
            capture.invalid = true;
            capture.parts.retain(|part| part.slot != slot);
        }
        self.streams.destroy(slot);
    }

    /// That the machine has the virtual memory calls.
    pub fn has_virtual_memory(&self) -> DriverResult {
        match self.config.virtual_memory {
            true => Ok(()),
            false => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        }
    }

    /// The slot a stream handle means on this thread. Created streams need no current context.
    pub fn stream(&mut self, function: &str, handle: CUstream) -> DriverResult<u32> {
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

    /// The same where work of the stream's device has not failed: the driver then answers nothing about
    /// its streams (H100, driver 580).
    pub fn healthy_stream(&mut self, function: &str, handle: CUstream) -> DriverResult<u32> {
        let slot = self.stream(function, handle)?;
        self.check_not_faulted(self.streams.get(slot).device)?;
        Ok(slot)
    }

    /// The event a handle means.
    pub fn event(&mut self, function: &str, handle: CUevent) -> DriverResult<u32> {
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
    pub fn chunk(&mut self, function: &str, handle: u64) -> DriverResult<u32> {
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
