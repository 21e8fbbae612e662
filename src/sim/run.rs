//! Executing queued work.

use crate::clock::Clock;
use crate::context;
use crate::graph::Node;
use crate::machine::Inner;
use crate::pace::Pace;
use crate::state::{DriverResult, State};
use crate::stream::{Kind, PER_THREAD};
use crate::work::{Fault, Work};
use cudarc::driver::sys::CUresult;
use parking_lot::MutexGuard;
use std::cell::Cell;
use std::ffi::c_void;

thread_local! {
    /// Whether this thread is in a function of `cuLaunchHostFunc`.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

pub(crate) fn in_host_function() -> bool {
    IN_HOST_FUNCTION.get()
}

/// A machine that this thread has locked. The lock is released only while a host function runs and while
/// waiting for one that another thread runs.
pub(crate) struct Session<'a> {
    inner: &'a Inner,
    pub state: MutexGuard<'a, State>,
}

impl<'a> Session<'a> {
    pub fn new(inner: &'a Inner) -> Session<'a> {
        Session {
            inner,
            state: inner.state.lock(),
        }
    }

    /// Enqueues work and executes it if the pace says so. A stream that captures records it instead.
    pub fn enqueue(&mut self, slot: u32, work: Work, wait: Option<(u32, u64)>) {
        if self.state.record(slot, &work) {
            return;
        }
        let sequence = self.state.submit(slot, work, wait);
        self.advance(slot, sequence);
    }

    /// Executes work that was submitted just now if the pace says so.
    pub fn advance(&mut self, slot: u32, sequence: u64) {
        match self.state.pacer.pace {
            Pace::Immediate => self.finish(slot, sequence),
            Pace::Late(_) => self.run_due(),
            Pace::Held | Pace::Random(_) => {}
        }
    }

    /// Enqueues a graph's nodes, each after its dependencies. Nodes that are not ordered go to internal
    /// streams, so that they may execute in any order.
    pub fn launch(&mut self, slot: u32, nodes: &[Node]) {
        if self.state.record_graph(slot, nodes) {
            return;
        }
        let (device, checks) = (
            self.state.streams.get(slot).device,
            self.state.config.checks,
        );
        // Each lane is a stream and the node enqueued there last; each node has a place, and what comes
        // before the end of it.
        let mut lanes: Vec<(u32, Option<usize>)> = vec![(slot, None)];
        let mut places: Vec<(u32, u64, Clock)> = Vec::new();
        let start = self.mark(slot);
        for (number, node) in nodes.iter().enumerate() {
            let follows = |last: Option<usize>| match last {
                None => node.after.is_empty(),
                Some(last) => node.after.contains(&last),
            };
            let lane = lanes.iter().position(|(_, last)| follows(*last));
            let lane = lane.unwrap_or_else(|| {
                let host = checks.then(|| self.state.host.clone());
                let streams = &mut self.state.streams;
                lanes.push((
                    streams.create(device, Kind::NonBlocking, host.as_ref()),
                    None,
                ));
                lanes.len() - 1
            });
            let on = lanes[lane].0;
            let before = node.after.iter().map(|number| &places[*number]);
            let first = node.after.is_empty().then_some(&start);
            let others = before.chain(first).filter(|place| place.0 != on);
            for place in others.cloned().collect::<Vec<_>>() {
                self.join(on, &place);
            }
            let sequence = self.state.submit(on, node.work.clone(), None);
            self.advance(on, sequence);
            places.push((on, sequence, self.state.streams.get(on).clock.clone()));
            lanes[lane].1 = Some(number);
        }
        for (lane, _) in lanes.into_iter().skip(1).rev() {
            let end = self.mark(lane);
            self.join(slot, &end);
            self.state.streams.destroy(lane);
        }
        self.mark(slot);
    }

    /// A place on a stream, and what comes before it.
    fn mark(&mut self, slot: u32) -> (u32, u64, Clock) {
        let sequence = self.state.submit(slot, Work::Mark, None);
        self.advance(slot, sequence);
        (slot, sequence, self.state.streams.get(slot).clock.clone())
    }

    /// A stream's later work comes after a place on another.
    fn join(&mut self, slot: u32, (other, place, clock): &(u32, u64, Clock)) {
        if self.state.config.checks {
            self.state.streams.get_mut(slot).clock.join(clock);
        }
        let sequence = self.state.submit(slot, Work::Mark, Some((*other, *place)));
        self.advance(slot, sequence);
    }

    /// Has a piece of work done, and first all that comes before it.
    pub fn finish(&mut self, slot: u32, sequence: u64) {
        if in_host_function() {
            // Waiting here could wait for ourselves. Driver calls were refused already.
            return;
        }
        // What is to be done, the most urgent last: no recursion, however long the chain.
        let mut goals = vec![(slot, sequence)];
        while let Some(&(slot, sequence)) = goals.last() {
            if self.state.streams.done(slot, sequence) {
                goals.pop();
                continue;
            }
            let stream = self.state.streams.get(slot);
            if stream.running {
                self.inner.progress.wait(&mut self.state);
                continue;
            }
            let Some(item) = stream.queue.front() else {
                goals.pop();
                continue;
            };
            let streams = &self.state.streams;
            match item
                .after
                .iter()
                .find(|(slot, sequence)| !streams.done(*slot, *sequence))
            {
                Some(&blocker) => goals.push(blocker),
                None => self.execute(slot),
            }
        }
    }

    /// Executes the head of a stream if nothing stands in its way; says whether it did.
    pub fn step(&mut self, slot: u32) -> bool {
        let streams = &self.state.streams;
        let stream = streams.get(slot);
        let ready = stream.queue.front().is_some_and(|item| {
            item.after
                .iter()
                .all(|(slot, sequence)| streams.done(*slot, *sequence))
        });
        let step = ready && !stream.running && !in_host_function();
        if step {
            self.execute(slot);
        }
        step
    }

    /// Has all work of a device done, or of every device, that is enqueued by now.
    pub fn finish_all(&mut self, device: Option<usize>) {
        let streams = &self.state.streams;
        let here = |slot: &u32| device.is_none_or(|device| streams.get(*slot).device == device);
        let goals = streams.active().iter().copied().filter(here);
        let goals: Vec<_> = goals
            .map(|slot| (slot, streams.get(slot).enqueued))
            .collect();
        for (slot, sequence) in goals {
            self.finish(slot, sequence);
        }
    }

    /// Waits as a synchronise of the device does: all its work is done, and the host knows.
    pub fn synchronise_device(&mut self, device: usize) -> DriverResult {
        // Taken first: while a host function runs, other threads may enqueue more.
        let mut known = Clock::default();
        let state = &mut *self.state;
        for slot in std::mem::take(&mut state.devices[device].unseen) {
            let stream = state.streams.get_mut(slot);
            if stream.device == device {
                stream.unseen = false;
                known.join(&stream.clock);
            }
        }
        self.finish_all(Some(device));
        self.state.host_observes(&known);
        self.state.check_not_faulted(device)
    }

    /// Waits as a synchronise of the stream does.
    pub fn synchronise_stream(&mut self, slot: u32) -> DriverResult {
        if self.state.streams.get(slot).kind == Kind::Legacy {
            // An action of the legacy stream: it waits for the blocking streams first.
            let mark = self.state.submit(slot, Work::Mark, None);
            self.finish(slot, mark);
        }
        let (sequence, device) = {
            let stream = self.state.streams.get(slot);
            (stream.enqueued, stream.device)
        };
        let known = self.state.streams.get(slot).clock.clone();
        self.finish(slot, sequence);
        self.state.host_observes(&known);
        self.state.check_not_faulted(device)
    }

    /// Whether a stream has nothing left to do; if so the host knows it.
    pub fn query_stream(&mut self, slot: u32) -> DriverResult {
        let streams = &self.state.streams;
        let stream = streams.get(slot);
        let (device, kind) = (stream.device, stream.kind);
        self.state.check_not_faulted(device)?;
        let busy = |slot: &u32| {
            let other = streams.get(*slot);
            other.device == device && other.kind != Kind::NonBlocking
        };
        let waits = match kind {
            Kind::Legacy => streams.active().iter().any(busy),
            _ => stream.done < stream.enqueued,
        };
        if waits {
            return Err(CUresult::CUDA_ERROR_NOT_READY);
        }
        self.synchronise_stream(slot)
    }

    /// Has everything done whose tick has come.
    pub fn run_due(&mut self) {
        while let Some((slot, sequence)) = self.state.pacer.take_due() {
            self.finish(slot, sequence);
        }
    }

    /// Under [`Pace::Random`], lets some streams advance by some steps.
    pub fn advance_randomly(&mut self) {
        if !matches!(self.state.pacer.pace, Pace::Random(_)) {
            return;
        }
        let active = self.state.streams.active().len() as u64;
        let draws = if active == 0 {
            0
        } else {
            self.state.pacer.random() % (active + 1)
        };
        for _ in 0..draws {
            let steps = self.state.pacer.random() % 4;
            let choice = self.state.pacer.random() as usize;
            let active = self.state.streams.active();
            let Some(&slot) = active.get(choice % active.len().max(1)) else {
                break;
            };
            for _ in 0..steps {
                if !self.step(slot) {
                    break;
                }
            }
        }
    }

    /// Changes the pace; what is queued follows the new one from now on.
    pub fn set_pace(&mut self, pace: Pace) {
        self.state.pacer.set(pace);
        if let Pace::Immediate = pace {
            self.finish_all(None);
        }
        if let Pace::Late(_) = pace {
            let state = &mut *self.state;
            let mut queued: Vec<(u64, u32, u64)> = Vec::new();
            for &slot in state.streams.active() {
                let items = state.streams.get(slot).queue.iter();
                queued.extend(items.map(|item| (item.ordinal, slot, item.sequence)));
            }
            queued.sort_unstable();
            for (_, slot, sequence) in queued {
                state.pacer.schedule(slot, sequence);
            }
            self.run_due();
        }
    }

    /// Executes the head of a stream, which has one.
    fn execute(&mut self, slot: u32) {
        let state = &mut *self.state;
        let stream = state.streams.get_mut(slot);
        let Some(item) = stream.queue.pop_front() else {
            return;
        };
        let device = stream.device;
        // After a fault nothing runs any more, host functions included; waits still end.
        if state.devices[device].fault.is_none() {
            if let Work::Call { function, argument } = item.work {
                stream.running = true;
                MutexGuard::unlocked(&mut self.state, || call_host(function, argument));
                self.state.streams.get_mut(slot).running = false;
                self.inner.progress.notify_all();
            } else if let Err(Fault(at)) = item.work.execute(&mut state.memory, device) {
                state.devices[device].fault = Some(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
                let (label, work) = (state.streams.label(slot), item.work.describe());
                state.violation(format!(
                    "work on {label} touched unmapped memory at {at:#x}: {work}"
                ));
            }
        }
        self.state.streams.finish(slot, item.sequence);
    }

    /// The slot that a handle means to a test, which may have no current context.
    pub fn test_stream(&mut self, handle: u64) -> Option<u32> {
        let device = context::current(self.state.machine).unwrap_or(0) % context::DEVICES;
        match handle {
            0 | crate::stream::LEGACY => Some(self.state.streams.legacy(device)),
            PER_THREAD => Some(self.state.streams.per_thread(context::thread(), device)),
            handle => self.state.streams.named(handle),
        }
    }
}

/// Runs a host function, marked as such.
fn call_host(function: unsafe extern "C" fn(*mut c_void), argument: usize) {
    IN_HOST_FUNCTION.set(true);
    // SAFETY: whoever enqueued promised that the function may be called once with this argument.
    unsafe { function(argument as *mut c_void) };
    IN_HOST_FUNCTION.set(false);
}
