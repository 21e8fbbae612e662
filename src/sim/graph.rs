//! Graphs: work recorded while streams capture, to be launched as a whole.

use crate::work::Work;

/// Recorded work, in an order that keeps every dependency; with it what executables are made of.
#[derive(Clone, Debug, Default)]
pub(crate) struct Graph {
    pub nodes: Vec<Node>,
    /// Allocations that were recorded; they live as long as the graph's executable.
    pub owned: Vec<u64>,
    /// An executable was made, which has taken over what the graph owned.
    pub instantiated: bool,
}

/// A piece of recorded work.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub work: Work,
    /// The nodes that it comes after, by number; all of them are smaller than its own.
    pub after: Vec<usize>,
}

/// A capture under way.
#[derive(Debug)]
pub(crate) struct Capture {
    /// The graph that grows.
    pub graph: u32,
    /// A number that no other capture ever has.
    pub id: u64,
    /// What other calls it forbids (`CUstreamCaptureMode`), and to which thread.
    pub mode: u32,
    pub thread: u64,
    /// A call broke it.
    pub invalid: bool,
    /// The streams that take part, that which began it first.
    pub parts: Vec<Part>,
}

/// A stream in a capture.
#[derive(Debug)]
pub(crate) struct Part {
    pub slot: u32,
    /// How much the stream has recorded, and how much of that another stream has waited for.
    pub recorded: u64,
    pub joined: u64,
    /// The nodes that the next one comes after.
    pub ends: Vec<usize>,
    /// Their handles, where the program was told them last.
    pub told: Vec<u64>,
}

/// What an event stands for that was recorded within a capture.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// The capture's number.
    pub capture: u64,
    pub slot: u32,
    /// How much the stream had recorded, and the nodes that its next one came after.
    pub recorded: u64,
    pub ends: Vec<usize>,
}

/// `CUstreamCaptureMode`.
pub(crate) const GLOBAL: u32 = 0;
pub(crate) const THREAD_LOCAL: u32 = 1;
pub(crate) const RELAXED: u32 = 2;

impl Capture {
    /// Whether a thread that allows itself calls by its `mode` may not synchronise or allocate.
    pub fn forbids(&self, mode: u32, thread: u64) -> bool {
        let mine = self.thread == thread && self.mode != RELAXED;
        match mode {
            RELAXED => false,
            THREAD_LOCAL => mine,
            _ => mine || self.mode == GLOBAL,
        }
    }

    pub fn part(&mut self, slot: u32) -> Option<&mut Part> {
        self.parts.iter_mut().find(|part| part.slot == slot)
    }

    /// The next node of a stream's comes after these, too.
    pub fn extend(&mut self, slot: u32, more: &[usize]) {
        if let Some(part) = self.part(slot) {
            part.ends.extend(more);
            part.ends.sort_unstable();
            part.ends.dedup();
        }
    }

    /// Whether a stream other than the first has recorded what nobody waited for.
    pub fn unjoined(&self) -> bool {
        let loose = |part: &Part| part.joined < part.recorded;
        self.parts.iter().skip(1).any(loose)
    }
}
