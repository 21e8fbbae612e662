//! Epochs: how far each stream's work has completed, counted in frees.
//!
//! Each free starts an epoch of its device. An event recorded on the stream at that very free covers the work
//! that was submitted by then and nothing later: other streams may wait for it. An event recorded at another
//! time covers later work too, and only tells that memory is idle. Where nothing can be recorded on a stream,
//! which may have been destroyed, an event of the whole device takes its place; nobody waits for that either.
//!
//! Epochs are even numbers. An odd one stands for all frees up to the even one before it: an event that
//! belongs to no single free, or free memory that was coalesced from several.

use super::event_budget::EventBudget;
use super::gpu::Gpu;
use super::ids::{ALL_STREAMS, Event, StreamKey, UNORDERED};
use std::collections::{HashMap, HashSet, VecDeque};

/// The most events in flight on a device. One that is so far behind may be running a kernel that never ends.
const MAX_EVENTS: usize = 1024;

/// The most frees of a stream that are recorded with their ranges, with an event or without.
const MAX_FREES: usize = 4096;

/// The most waits of streams for others that are remembered.
const MAX_WAITS: usize = 1024;

/// How many frees get events of their own after a miss while other streams had free memory.
const EVENTS_AFTER_MISS: u64 = 1 << 16;

/// The same at the start, before there can have been a miss.
const EVENTS_AT_FIRST: u64 = 1024;

/// Two flags in [`Epochs::freed_since_event`], above all byte counts, so that the fast path has one
/// comparison for all three: somebody asked for a poll, and frees are deferred.
const POLL_REQUESTED: u64 = 1 << 62;
const HAS_DEFERRED: u64 = 1 << 63;

/// A free that is not known to have completed, or an event that covers all before it.
struct FreeRecord {
    /// `None` where it could not be recorded, or was not worth it.
    event: Option<Event>,
    epoch: u64,
    /// The freed ranges, from start to end; none for an event that belongs to no single free.
    ranges: Vec<(u64, u64)>,
}

impl FreeRecord {
    /// The parts of a range that this free freed.
    fn overlaps(&self, (start, end): (u64, u64)) -> impl Iterator<Item = (u64, u64)> + '_ {
        let overlaps = self
            .ranges
            .iter()
            .map(move |it| (it.0.max(start), it.1.min(end)));
        overlaps.filter(|(start, end)| start < end)
    }
}

/// What is known of one stream's work.
#[derive(Default)]
struct Progress {
    /// In the order of their epochs.
    frees: VecDeque<FreeRecord>,
    /// Work before the frees up to here has completed.
    completed: u64,
    /// Frees up to here are covered by events.
    covered: u64,
    /// The last free that got no event of its own.
    uncovered: u64,
}

impl Progress {
    /// All frees up to the one at this index have completed.
    fn complete_up_to(&mut self, at: usize, gpu: &mut impl Gpu, events: &mut usize) {
        self.completed = self.completed.max(self.frees[at].epoch | 1);
        for event in self.frees.drain(..=at).filter_map(|free| free.event) {
            gpu.release_event(event);
            *events -= 1;
        }
    }

    /// Polls the events in flight, the oldest first. True if one has completed.
    fn poll(&mut self, gpu: &mut impl Gpu, events: &mut usize) -> bool {
        let mut changed = false;
        while let Some(at) = self.frees.iter().position(|free| free.event.is_some())
            && self.frees[at]
                .event
                .is_some_and(|event| gpu.has_completed(event))
        {
            self.complete_up_to(at, gpu, events);
            changed = true;
        }
        changed
    }
}

/// The frees of a device, and how far each stream's work has completed.
pub struct Epochs {
    /// The epoch of the last free.
    pub now: u64,
    /// Bytes freed since the last event, with the flags [`POLL_REQUESTED`] and [`HAS_DEFERRED`].
    pub freed_since_event: u64,
    /// Bytes freed before that.
    freed_before: u64,
    /// Frees get events of their own up to this epoch, within the budget.
    free_events_until: u64,
    budget: EventBudget,
    /// The frees being made get no events: the program made them earlier.
    pub without_events: bool,
    /// The free being made is ordered by another stream than the block's own, which gets no event.
    pub off_stream: bool,
    streams: HashMap<StreamKey, Progress>,
    /// Streams of other devices, which no event of this device covers.
    foreign: HashSet<StreamKey>,
    /// Events in flight.
    events: usize,
    /// Up to which epoch of the second stream the first one's later work waits for it.
    ordered_after: HashMap<(StreamKey, StreamKey), u64>,
    /// How often any stream was found to have completed more.
    pub advances: u64,
}

impl Epochs {
    pub fn new() -> Self {
        Epochs {
            now: 0,
            freed_since_event: 0,
            freed_before: 0,
            free_events_until: 2 * EVENTS_AT_FIRST,
            budget: EventBudget::new(),
            without_events: false,
            off_stream: false,
            streams: HashMap::new(),
            foreign: HashSet::new(),
            events: 0,
            ordered_after: HashMap::new(),
            advances: 0,
        }
    }

    /// Counts a free of `size` bytes. Returns its epoch.
    #[inline]
    pub fn tick(&mut self, size: u64) -> u64 {
        self.now += 2;
        self.freed_since_event += size;
        self.now
    }

    /// Has the next allocation that hits record and poll events: it knows whether its stream is in a capture.
    pub fn request_poll(&mut self) {
        self.freed_since_event |= POLL_REQUESTED;
    }

    /// Whether a poll was requested; clears the request.
    pub fn take_poll_request(&mut self) -> bool {
        let requested = self.freed_since_event & POLL_REQUESTED != 0;
        self.freed_since_event &= !POLL_REQUESTED;
        requested
    }

    /// Whether more than `least` bytes were freed since the last event.
    pub fn has_freed_since_event(&self, least: u64) -> bool {
        self.freed_since_event & (POLL_REQUESTED - 1) > least
    }

    /// Bytes ever freed.
    pub fn freed(&self) -> u64 {
        self.freed_before + (self.freed_since_event & (POLL_REQUESTED - 1))
    }

    /// Sets the bytes since the last event to 0; of the flags [`HAS_DEFERRED`] stays.
    pub fn reset_freed_since_event(&mut self) {
        self.freed_before = self.freed();
        self.freed_since_event &= HAS_DEFERRED;
    }

    /// Sets whether frees are deferred, so that each allocation sees whether to poll.
    pub fn set_deferred(&mut self, deferred: bool) {
        self.freed_since_event &= !HAS_DEFERRED;
        self.freed_since_event |= if deferred { HAS_DEFERRED } else { 0 };
    }

    /// A stream misses while others have free memory: frees get events of their own for a while, which it
    /// could wait for. False where the budget does not allow them.
    pub fn request_free_events(&mut self, gpu: &impl Gpu) -> bool {
        let allowed = self.budget.allows(gpu.now());
        if allowed {
            self.free_events_until = self.now + 2 * EVENTS_AFTER_MISS;
        }
        allowed
    }

    /// Whether frees get events of their own now.
    pub fn records_free_events(&self) -> bool {
        self.now < self.free_events_until
    }

    /// The stream has completed its work before its frees up to this epoch.
    pub fn completed(&self, key: StreamKey) -> u64 {
        if key == UNORDERED {
            // Its blocks are freed only once nothing uses them.
            return u64::MAX;
        }
        self.latest(key, |it| it.completed)
    }

    /// Whether the stream has no event in flight.
    pub fn has_no_event(&self, key: StreamKey) -> bool {
        self.completed(key) >= self.covered(key)
    }

    fn covered(&self, key: StreamKey) -> u64 {
        self.latest(key, |it| it.covered)
    }

    /// A figure of the stream, or the device's if that is later and covers the stream.
    fn latest(&self, key: StreamKey, what: impl Fn(&Progress) -> u64) -> u64 {
        let of = |key: &StreamKey| self.streams.get(key).map_or(0, &what);
        match self.foreign.contains(&key) {
            true => of(&key),
            false => of(&key).max(of(&ALL_STREAMS)),
        }
    }

    /// The stream is another device's.
    pub fn add_foreign_stream(&mut self, key: StreamKey) {
        self.foreign.insert(key);
    }

    /// Whether the stream is another device's.
    pub fn is_foreign(&self, key: StreamKey) -> bool {
        self.foreign.contains(&key)
    }

    /// Records the free of a range that was just made, with an `event` on the stream if there can be one.
    /// False where too many are recorded.
    pub fn record_free(
        &mut self,
        key: StreamKey,
        (start, end): (u64, u64),
        event: bool,
        gpu: &mut impl Gpu,
    ) -> bool {
        let mut recorded = None;
        if event && !self.without_events && self.events < MAX_EVENTS {
            let began = gpu.now();
            let idle = gpu.is_idle(key);
            if !idle {
                recorded = gpu.record_event(key);
            }
            let now = gpu.now();
            self.budget.spend(now - began, now);
            if !self.budget.allows(now) {
                self.free_events_until = 0;
            }
            if idle {
                self.complete_stream(key, gpu);
                return true;
            }
        }
        let event = recorded;
        let epoch = self.now;
        let progress = self.streams.entry(key).or_default();
        match event {
            Some(_) => {
                self.events += 1;
                progress.covered = epoch | 1;
            }
            None => progress.uncovered = epoch,
        }
        let has_space = event.is_some() || progress.frees.len() < MAX_FREES;
        if has_space {
            progress.frees.push_back(FreeRecord {
                event,
                epoch,
                ranges: vec![(start, end)],
            });
        }
        has_space
    }

    /// The stream has completed all its work.
    fn complete_stream(&mut self, key: StreamKey, gpu: &mut impl Gpu) {
        let now = self.now | 1;
        let progress = self.streams.entry(key).or_default();
        for event in progress.frees.drain(..).filter_map(|free| free.event) {
            gpu.release_event(event);
            self.events -= 1;
        }
        (progress.completed, progress.covered) = (now, now);
        self.advances += 1;
    }

    /// Has an event cover the stream's work up to a free, and up to its frees without events: one in flight,
    /// or one recorded now, on the stream or else on the whole device. False where none can be recorded.
    pub fn cover(&mut self, key: StreamKey, until: u64, gpu: &mut impl Gpu) -> bool {
        let uncovered = self.streams.get(&key).map_or(0, |it| it.uncovered);
        if self.covered(key) >= until.max(uncovered) {
            return true;
        }
        if gpu.is_idle(key) {
            self.complete_stream(key, gpu);
            return true;
        }
        if self.events >= MAX_EVENTS {
            return false;
        }
        let recorded = gpu.record_event(key).map(|event| (key, event));
        let foreign = self.foreign.contains(&key);
        let recorded = match recorded {
            None if !foreign => gpu
                .record_event(ALL_STREAMS)
                .map(|event| (ALL_STREAMS, event)),
            own => own,
        };
        let Some((key, event)) = recorded else {
            return false;
        };
        self.events += 1;
        let epoch = self.now | 1;
        let progress = self.streams.entry(key).or_default();
        progress.covered = epoch;
        progress.frees.push_back(FreeRecord {
            event: Some(event),
            epoch,
            ranges: Vec::new(),
        });
        true
    }

    /// Has events cover the frees without events of all streams.
    pub fn cover_uncovered(&mut self, gpu: &mut impl Gpu) {
        let uncovered = self.streams.iter();
        let uncovered = uncovered.filter(|(key, it)| it.uncovered > self.covered(**key));
        let uncovered: Vec<StreamKey> = uncovered.map(|(key, _)| *key).collect();
        for key in uncovered {
            self.cover(key, 0, gpu);
        }
    }

    /// Polls all events in flight.
    pub fn poll(&mut self, gpu: &mut impl Gpu) {
        if self.events == 0 {
            return;
        }
        for progress in self.streams.values_mut() {
            self.advances += u64::from(progress.poll(gpu, &mut self.events));
        }
    }

    /// Polls the events of one stream, and of the whole device.
    pub fn poll_stream(&mut self, key: StreamKey, gpu: &mut impl Gpu) {
        for key in [key, ALL_STREAMS] {
            if let Some(progress) = self.streams.get_mut(&key) {
                self.advances += u64::from(progress.poll(gpu, &mut self.events));
            }
        }
    }

    /// The last free of any part of a free range on a stream; 0 where all have completed. `unrecorded` is the
    /// stream's last free that is not recorded. `None` where not every free up to it has an event of its own.
    pub fn last_free(
        &self,
        key: StreamKey,
        (start, end): (u64, u64),
        unrecorded: u64,
    ) -> Option<u64> {
        let completed = self.completed(key);
        let frees = || {
            let frees = self.streams.get(&key).into_iter().flat_map(|it| &it.frees);
            frees.filter(|it| it.epoch > completed && it.overlaps((start, end)).next().is_some())
        };
        let mut whole = frees().filter(|it| it.overlaps((start, end)).any(|it| it == (start, end)));
        let whole = whole.next_back().map_or(0, |it| it.epoch);
        if unrecorded > completed.max(whole) {
            return None;
        }
        let mut last = frees().filter(|it| it.epoch >= whole);
        last.try_fold(0, |_, it| it.event.map(|_| it.epoch))
    }

    /// The starts and ends, in a range, of frees that are not known to have completed.
    pub fn free_boundaries(&self, key: StreamKey, (start, end): (u64, u64)) -> Vec<u64> {
        let completed = self.completed(key);
        let frees = self.streams.get(&key).into_iter().flat_map(|it| &it.frees);
        let inside = frees.filter(|it| it.epoch > completed);
        let overlaps = inside.flat_map(|it| it.overlaps((start, end)));
        overlaps.flat_map(|it| [it.0, it.1]).collect()
    }

    /// A range was remapped to another address: the stream's frees in it count there too.
    pub fn note_remapped(&mut self, key: StreamKey, (start, end): (u64, u64), to: u64) {
        let completed = self.completed(key);
        let frees = self.streams.get_mut(&key).map(|it| it.frees.iter_mut());
        for free in frees.into_iter().flatten() {
            if free.epoch > completed {
                let overlaps: Vec<(u64, u64)> = free.overlaps((start, end)).collect();
                let remapped = overlaps
                    .iter()
                    .map(|it| (it.0 - start + to, it.1 - start + to));
                free.ranges.extend(remapped);
            }
        }
    }

    /// Makes the stream's later work wait on the GPU for another one's work up to a free. False where that is
    /// not possible.
    pub fn wait_for(
        &mut self,
        stream: StreamKey,
        other: StreamKey,
        epoch: u64,
        gpu: &mut impl Gpu,
    ) -> bool {
        if self.is_after(stream, other, epoch) {
            return true;
        }
        let event = self.event_of(other, epoch);
        if !event.is_some_and(|event| gpu.stream_wait_event(event, stream)) {
            return false;
        }
        if self.ordered_after.len() >= MAX_WAITS {
            self.ordered_after.clear();
        }
        self.ordered_after.insert((stream, other), epoch);
        true
    }

    /// Whether the stream can wait for the other one's work up to a free, or need not.
    pub fn can_wait_for(&self, stream: StreamKey, other: StreamKey, epoch: u64) -> bool {
        self.is_after(stream, other, epoch) || self.event_of(other, epoch).is_some()
    }

    /// Whether the stream's later work comes after the other one's up to a free already.
    fn is_after(&self, stream: StreamKey, other: StreamKey, epoch: u64) -> bool {
        let ordered_after = self.ordered_after.get(&(stream, other));
        epoch <= self.completed(other) || ordered_after.is_some_and(|it| *it >= epoch)
    }

    /// The event that was recorded on a stream at the free of this epoch.
    fn event_of(&self, key: StreamKey, epoch: u64) -> Option<Event> {
        let frees = &self.streams.get(&key)?.frees;
        let at = frees.partition_point(|free| free.epoch < epoch);
        frees.get(at).filter(|free| free.epoch == epoch)?.event
    }

    /// All work of the device has completed, and that of other devices' streams that use its memory. Streams
    /// that are `recorded` on live or pending blocks stay known.
    pub fn complete_all(&mut self, gpu: &mut impl Gpu, recorded: impl Fn(&StreamKey) -> bool) {
        self.reset_freed_since_event();
        for (_, progress) in self.streams.drain() {
            progress
                .frees
                .into_iter()
                .filter_map(|free| free.event)
                .for_each(|event| gpu.release_event(event));
        }
        self.events = 0;
        self.ordered_after.clear();
        self.advances += 1;
        let now = self.now | 1;
        let all = Progress {
            completed: now,
            covered: now,
            ..Progress::default()
        };
        self.streams.insert(ALL_STREAMS, all);
        // They were waited for as well; those not retained are recorded again with their next use.
        self.foreign.retain(recorded);
        gpu.retain_foreign(&self.foreign);
        for key in &self.foreign {
            let progress = self.streams.entry(*key).or_default();
            (progress.completed, progress.covered) = (now, now);
        }
    }

    /// Drops the streams that have nothing in flight, once there are many.
    pub fn drop_finished_streams(&mut self) {
        const KEPT: usize = 256;
        if self.streams.len() > KEPT {
            let device = self.completed(ALL_STREAMS);
            self.streams.retain(|key, it| {
                *key == ALL_STREAMS
                    || self.foreign.contains(key)
                    || !it.frees.is_empty()
                    || it.completed > device
                    || it.uncovered > device
            });
        }
    }
}
