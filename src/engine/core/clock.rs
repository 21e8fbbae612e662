//! How far the device's work has got.
//!
//! The clock counts the frees; an event recorded on the whole context covers all that was freed before
//! it, whichever stream used it, and even one that has been destroyed since.

use super::gpu::{Event, Gpu};
use std::collections::VecDeque;

/// How many events may be on their way. A device so far behind may be running a kernel that never ends,
/// for which nothing should wait.
const MARKS: usize = 1024;

/// More bytes than are freed between two marks: a request to mark, or to be called at every allocation
/// while blocks wait, looks like so many, and costs nothing where nobody makes one.
const ASKED: u64 = 1 << 62;
const WAITED: u64 = 1 << 63;

/// Counts what is freed on a device, and knows how much of it is done.
pub struct Clock {
    /// What was freed so far.
    pub now: u64,
    /// The work before all that was freed up to here is done.
    pub passed: u64,
    /// What passed has been made idle up to here.
    pub released: u64,
    /// Bytes freed since the last mark, [`ASKED`] if the next allocation is to mark and poll, and
    /// [`WAITED`] if blocks may wait.
    pub unmarked: u64,
    /// Bytes freed before those.
    before: u64,
    /// Events on their way, in order, and what each of them covers.
    marks: VecDeque<(Event, u64)>,
}

impl Clock {
    pub fn new() -> Self {
        Clock {
            now: 0,
            passed: 0,
            released: 0,
            unmarked: 0,
            before: 0,
            marks: VecDeque::new(),
        }
    }

    /// Counts a free. Returns what has to pass before its memory is idle.
    #[inline]
    pub fn tick(&mut self, size: u64) -> u64 {
        self.now += 1;
        self.unmarked += size;
        self.now
    }

    /// Has the next allocation that finds what it wants mark and poll, as it does where there are
    /// several streams: it knows whether its stream is in a capture.
    pub fn ask(&mut self) {
        self.unmarked |= ASKED;
    }

    /// That allocation is here. True if it was asked.
    pub fn asked(&mut self) -> bool {
        let asked = self.unmarked & ASKED != 0;
        self.unmarked &= !ASKED;
        asked
    }

    /// Whether more than so many bytes were freed since the last mark.
    pub fn has_unmarked(&self, least: u64) -> bool {
        self.unmarked & (ASKED - 1) > least
    }

    /// Nobody waits for what was freed: it is looked at again when as much more is.
    pub fn skip(&mut self) {
        self.count_on_from(0);
    }

    /// Bytes freed so far.
    pub fn freed(&self) -> u64 {
        self.before + (self.unmarked & (ASKED - 1))
    }

    /// What is unmarked is counted anew, and of the requests those in `kept` stay.
    fn count_on_from(&mut self, kept: u64) {
        self.before = self.freed();
        self.unmarked &= kept;
    }

    /// Whether blocks wait, for which every allocation is told.
    pub fn set_waited(&mut self, waited: bool) {
        self.unmarked &= !WAITED;
        self.unmarked |= if waited { WAITED } else { 0 };
    }

    /// Records an event that covers all that has been freed so far.
    pub fn mark(&mut self, gpu: &mut impl Gpu) {
        let marked = self.marks.back().map_or(self.passed, |mark| mark.1);
        if self.now > marked
            && self.marks.len() < MARKS
            && let Some(event) = gpu.record()
        {
            self.marks.push_back((event, self.now));
            self.count_on_from(WAITED);
        }
    }

    /// An event that covers all that was freed up to `until`, and what else it covers. The oldest there
    /// is, or one recorded now.
    pub fn covering(&mut self, until: u64, gpu: &mut impl Gpu) -> Option<(Event, u64)> {
        self.mark(gpu);
        let first = self.marks.partition_point(|mark| mark.1 < until);
        self.marks.get(first).copied()
    }

    /// Asks the events on their way.
    pub fn poll(&mut self, gpu: &mut impl Gpu) {
        while let Some((event, clock)) = self.marks.front().copied() {
            if !gpu.passed(event) {
                break;
            }
            gpu.forget(event);
            self.passed = clock;
            self.marks.pop_front();
        }
    }

    /// Waits for the newest event on its way. False where there is none or waiting failed.
    pub fn wait(&mut self, gpu: &mut impl Gpu) -> bool {
        match self.marks.back().copied() {
            Some((event, clock)) if gpu.wait(event) => {
                self.passed = clock;
                self.marks
                    .drain(..)
                    .for_each(|(event, _)| gpu.forget(event));
                true
            }
            _ => false,
        }
    }

    /// All work on the device is known to be done.
    pub fn settle(&mut self, gpu: &mut impl Gpu) {
        self.passed = self.now;
        self.count_on_from(0);
        self.marks
            .drain(..)
            .for_each(|(event, _)| gpu.forget(event));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_freed_is_counted_whatever_is_asked_for() {
        let mut clock = Clock::new();
        clock.tick(5);
        clock.ask();
        clock.set_waited(true);
        assert_eq!(clock.freed(), 5);
        clock.skip();
        clock.tick(7);
        clock.ask();
        assert_eq!(clock.freed(), 12);
        assert!(clock.asked() && clock.has_unmarked(6) && !clock.has_unmarked(7));
    }
}
