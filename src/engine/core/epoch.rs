//! Epochs: how far each stream's work has got, counted in frees.
//!
//! Each free ends an epoch of its device. An event recorded on a stream at that very free covers all work
//! that the stream had been given by then, and nothing later: others may be made to wait for it. An event
//! recorded at any other time covers later work too, and only tells that memory is idle. Where a stream
//! cannot be recorded on (it may be gone), an event of the whole device takes its place, which nobody waits
//! for either.
//!
//! Epochs are even numbers. An odd one stands for all up to the even one before it: an event of no free in
//! particular, or free memory that was joined from several.

use super::event_budget::EventBudget;
use super::gpu::{Event, Gpu};
use super::stream_lists::{ALL_STREAMS, StreamKey, UNORDERED};
use std::collections::{HashMap, HashSet, VecDeque};

/// How many events may be under way on a device. One so far behind may be running a kernel that never ends.
const MAX_EVENTS: usize = 1024;

/// How many frees of a stream are remembered with their ranges, those without an event included.
const MAX_FREES: usize = 4096;

/// How many waits put on streams are remembered.
const MAX_WAITS: usize = 1024;

/// For how many frees exact events are recorded after memory was wanted while other streams had some.
const WANTED_FOR: u64 = 1 << 16;

/// For how many frees they are recorded before anybody can have wanted any.
const WANTED_AT_FIRST: u64 = 1024;

/// More bytes than are freed between two events: a request to record, or to be called at every allocation
/// while blocks are deferred, looks like as many, and costs nothing where nobody makes one.
const POLL_REQUESTED: u64 = 1 << 62;
const HAS_DEFERRED: u64 = 1 << 63;

/// A free of a stream's that is not known to be done, or an event that covers all before it.
struct Mark {
    /// None where it could not be recorded, or was not worth it.
    event: Option<Event>,
    epoch: u64,
    /// Where the memory lies that was freed, from starts to ends; nowhere for an event of no free in particular.
    ranges: Vec<(u64, u64)>,
}

impl Mark {
    /// The overlaps of a range that were freed.
    fn overlaps(&self, (start, end): (u64, u64)) -> impl Iterator<Item = (u64, u64)> + '_ {
        let overlaps = self.ranges.iter();
        let overlaps = overlaps.map(move |it| (it.0.max(start), it.1.min(end)));
        overlaps.filter(|(start, end)| start < end)
    }
}

/// What is known of one stream.
#[derive(Default)]
struct Progress {
    /// In the order of their epochs.
    marks: VecDeque<Mark>,
    /// The work before what was freed up to here is done.
    completed: u64,
    /// Up to here an event covers what was freed.
    covered: u64,
    /// The last free that has no event of its own.
    uncovered: u64,
}

impl Progress {
    /// Forgets what is done up to a mark's place.
    fn complete_up_to(&mut self, at: usize, gpu: &mut impl Gpu, events: &mut usize) {
        self.completed = self.completed.max(self.marks[at].epoch | 1);
        for event in self.marks.drain(..=at).filter_map(|mark| mark.event) {
            gpu.release_event(event);
            *events -= 1;
        }
    }

    /// Asks the events under way, the oldest first. True if one has passed.
    fn poll(&mut self, gpu: &mut impl Gpu, events: &mut usize) -> bool {
        let mut changed = false;
        while let Some(at) = self.marks.iter().position(|mark| mark.event.is_some())
            && self.marks[at]
                .event
                .is_some_and(|event| gpu.has_completed(event))
        {
            self.complete_up_to(at, gpu, events);
            changed = true;
        }
        changed
    }
}

/// Counts what is freed on a device, and knows how much of it is done.
pub struct Epochs {
    /// The epoch of the last free.
    pub now: u64,
    /// Bytes freed since the last event, [`POLL_REQUESTED`] if the next allocation is to record and poll, and
    /// [`HAS_DEFERRED`] if blocks are deferred.
    pub freed_since_event: u64,
    /// Bytes freed before those.
    freed_before: u64,
    /// Frees get an event of their own up to this epoch, as far as there is time for that.
    free_events_until: u64,
    budget: EventBudget,
    /// What is freed just now was given back by the program earlier.
    pub without_events: bool,
    /// It was given back in the order of another stream than its own, which gets no event for it.
    pub off_stream: bool,
    streams: HashMap<StreamKey, Progress>,
    /// Streams of other devices, of which an event of this one tells nothing.
    foreign: HashSet<StreamKey>,
    /// Events under way.
    events: usize,
    /// Up to which epoch of the second stream the first one's work comes after it.
    ordered_after: HashMap<(StreamKey, StreamKey), u64>,
    /// How often some stream was found to have got further.
    pub advances: u64,
}

impl Epochs {
    pub fn new() -> Self {
        Epochs {
            now: 0,
            freed_since_event: 0,
            freed_before: 0,
            free_events_until: 2 * WANTED_AT_FIRST,
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

    /// Counts a free. Returns its epoch.
    #[inline]
    pub fn tick(&mut self, size: u64) -> u64 {
        self.now += 2;
        self.freed_since_event += size;
        self.now
    }

    /// Has the next allocation that finds what it wants record and poll, as it does where there are
    /// several streams: it knows whether its stream is in a capture.
    pub fn request_poll(&mut self) {
        self.freed_since_event |= POLL_REQUESTED;
    }

    /// That allocation is here. True if it was asked.
    pub fn take_poll_request(&mut self) -> bool {
        let asked = self.freed_since_event & POLL_REQUESTED != 0;
        self.freed_since_event &= !POLL_REQUESTED;
        asked
    }

    /// Whether more than this many bytes were freed since the last event.
    pub fn has_freed_since_event(&self, least: u64) -> bool {
        self.freed_since_event & (POLL_REQUESTED - 1) > least
    }

    /// Bytes freed so far.
    pub fn freed(&self) -> u64 {
        self.freed_before + (self.freed_since_event & (POLL_REQUESTED - 1))
    }

    /// What is freed_since_event is counted anew, and of the requests [`HAS_DEFERRED`] stays.
    pub fn reset_freed_since_event(&mut self) {
        self.freed_before = self.freed();
        self.freed_since_event &= HAS_DEFERRED;
    }

    /// Whether blocks are deferred, for which every allocation is told.
    pub fn set_deferred(&mut self, deferred: bool) {
        self.freed_since_event &= !HAS_DEFERRED;
        self.freed_since_event |= if deferred { HAS_DEFERRED } else { 0 };
    }

    /// A stream wants memory, and others have some: frees get events of their own for a while, which it could
    /// wait for. False where they take too much time.
    pub fn request_free_events(&mut self, gpu: &impl Gpu) -> bool {
        let allowed = self.budget.allows(gpu.now());
        if allowed {
            self.free_events_until = self.now + 2 * WANTED_FOR;
        }
        allowed
    }

    /// Whether frees get events of their own.
    pub fn records_free_events(&self) -> bool {
        self.now < self.free_events_until
    }

    /// The work before what was freed up to here is done, on this stream.
    pub fn completed(&self, key: StreamKey) -> u64 {
        if key == UNORDERED {
            // It gets a block back only once nothing uses it.
            return u64::MAX;
        }
        self.latest(key, |it| it.completed)
    }

    /// Whether the stream has no event under way.
    pub fn has_no_event(&self, key: StreamKey) -> bool {
        self.completed(key) >= self.covered(key)
    }

    fn covered(&self, key: StreamKey) -> u64 {
        self.latest(key, |it| it.covered)
    }

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

    /// Notes a free that took place just now, and where: with an event of the stream's own if there can be
    /// one. False where there is no room for it.
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
        let room = event.is_some() || progress.marks.len() < MAX_FREES;
        if room {
            progress.marks.push_back(Mark {
                event,
                epoch,
                ranges: vec![(start, end)],
            });
        }
        room
    }

    /// The stream has done all that it was given.
    fn complete_stream(&mut self, key: StreamKey, gpu: &mut impl Gpu) {
        let done = self.now | 1;
        let progress = self.streams.entry(key).or_default();
        for event in progress.marks.drain(..).filter_map(|mark| mark.event) {
            gpu.release_event(event);
            self.events -= 1;
        }
        (progress.completed, progress.covered) = (done, done);
        self.advances += 1;
    }

    /// Has an event cover the stream's work up to a free, and what was freed without an event of its own:
    /// one recorded now, on the stream or else on the whole device. False where none can be recorded.
    pub fn cover(&mut self, key: StreamKey, until: u64, gpu: &mut impl Gpu) -> bool {
        let wanted = self.streams.get(&key).map_or(0, |it| it.uncovered);
        if self.covered(key) >= until.max(wanted) {
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
        progress.marks.push_back(Mark {
            event: Some(event),
            epoch,
            ranges: Vec::new(),
        });
        true
    }

    /// The same for every stream that frees without events are known of.
    pub fn cover_uncovered(&mut self, gpu: &mut impl Gpu) {
        let wanted = self.streams.iter();
        let wanted = wanted.filter(|(key, it)| it.uncovered > self.covered(**key));
        let wanted: Vec<StreamKey> = wanted.map(|(key, _)| *key).collect();
        for key in wanted {
            self.cover(key, 0, gpu);
        }
    }

    /// Asks the events under way.
    pub fn poll(&mut self, gpu: &mut impl Gpu) {
        if self.events == 0 {
            return;
        }
        for progress in self.streams.values_mut() {
            self.advances += u64::from(progress.poll(gpu, &mut self.events));
        }
    }

    /// Asks those of one stream, and of the whole device.
    pub fn poll_stream(&mut self, key: StreamKey, gpu: &mut impl Gpu) {
        for key in [key, ALL_STREAMS] {
            if let Some(progress) = self.streams.get_mut(&key) {
                self.advances += u64::from(progress.poll(gpu, &mut self.events));
            }
        }
    }

    /// The epoch after which a stream was last given back part of this range, which is free; 0 where it is
    /// done with all of it. `unplaced` is its last free whose place is not noted. None where not all of the
    /// work that was submitted by then has an event of its own.
    pub fn last_free(
        &self,
        key: StreamKey,
        (start, end): (u64, u64),
        unplaced: u64,
    ) -> Option<u64> {
        let completed = self.completed(key);
        let marks = || {
            let marks = self.streams.get(&key).into_iter().flat_map(|it| &it.marks);
            marks.filter(|it| it.epoch > completed && it.overlaps((start, end)).next().is_some())
        };
        let mut whole = marks().filter(|it| it.overlaps((start, end)).any(|it| it == (start, end)));
        let whole = whole.next_back().map_or(0, |it| it.epoch);
        if unplaced > completed.max(whole) {
            return None;
        }
        let mut last = marks().filter(|it| it.epoch >= whole);
        last.try_fold(0, |_, it| it.event.map(|_| it.epoch))
    }

    /// Where the frees begin and end that lie in a range and are not known to be done.
    pub fn free_boundaries(&self, key: StreamKey, (start, end): (u64, u64)) -> Vec<u64> {
        let completed = self.completed(key);
        let marks = self.streams.get(&key).into_iter().flat_map(|it| &it.marks);
        let inside = marks.filter(|it| it.epoch > completed);
        let overlaps = inside.flat_map(|it| it.overlaps((start, end)));
        overlaps.flat_map(|it| [it.0, it.1]).collect()
    }

    /// What the stream freed in a range lies somewhere else from now on.
    pub fn note_remapped(&mut self, key: StreamKey, (start, end): (u64, u64), to: u64) {
        let completed = self.completed(key);
        let marks = self.streams.get_mut(&key).map(|it| it.marks.iter_mut());
        for mark in marks.into_iter().flatten() {
            if mark.epoch > completed {
                let overlaps: Vec<(u64, u64)> = mark.overlaps((start, end)).collect();
                let moved = overlaps
                    .iter()
                    .map(|it| (it.0 - start + to, it.1 - start + to));
                mark.ranges.extend(moved);
            }
        }
    }

    /// The stream's work from now on runs after what another one had been given by the free of this epoch.
    /// False where it cannot be made to.
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

    /// Whether the stream can wait_for the other one's work up to a free, or need not.
    pub fn can_wait_for(&self, stream: StreamKey, other: StreamKey, epoch: u64) -> bool {
        self.is_after(stream, other, epoch) || self.event_of(other, epoch).is_some()
    }

    /// Whether the stream's work comes after the other one's up to a free already.
    fn is_after(&self, stream: StreamKey, other: StreamKey, epoch: u64) -> bool {
        let ordered_after = self.ordered_after.get(&(stream, other));
        epoch <= self.completed(other) || ordered_after.is_some_and(|it| *it >= epoch)
    }

    /// The event that was recorded on a stream at the free of this epoch.
    fn event_of(&self, key: StreamKey, epoch: u64) -> Option<Event> {
        let marks = &self.streams.get(&key)?.marks;
        let at = marks.partition_point(|mark| mark.epoch < epoch);
        marks.get(at).filter(|mark| mark.epoch == epoch)?.event
    }

    /// All work on the device is known to be done, and that of other devices' streams that use its memory.
    /// Those that are `recorded` on blocks in use go on using them.
    pub fn complete_all(&mut self, gpu: &mut impl Gpu, recorded: impl Fn(&StreamKey) -> bool) {
        self.reset_freed_since_event();
        for (_, progress) in self.streams.drain() {
            progress
                .marks
                .into_iter()
                .filter_map(|mark| mark.event)
                .for_each(|event| gpu.release_event(event));
        }
        self.events = 0;
        self.ordered_after.clear();
        self.advances += 1;
        let done = self.now | 1;
        let all = Progress {
            completed: done,
            covered: done,
            ..Progress::default()
        };
        self.streams.insert(ALL_STREAMS, all);
        // They were waited for as well; the others are named again with their next use.
        self.foreign.retain(recorded);
        gpu.retain_foreign(&self.foreign);
        for key in &self.foreign {
            let progress = self.streams.entry(*key).or_default();
            (progress.completed, progress.covered) = (done, done);
        }
    }

    /// Forgets streams of which nothing is under way, once there are many.
    pub fn drop_finished_streams(&mut self) {
        const KEPT: usize = 256;
        if self.streams.len() > KEPT {
            let device = self.completed(ALL_STREAMS);
            self.streams.retain(|key, it| {
                *key == ALL_STREAMS
                    || self.foreign.contains(key)
                    || !it.marks.is_empty()
                    || it.completed > device
                    || it.uncovered > device
            });
        }
    }
}
