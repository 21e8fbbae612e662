//! Streams: whose holes are whose, and how far each stream's work has got.
//!
//! A hole belongs to the *slot* of the stream that freed it: that stream may take it at once,
//! because its own later work runs after its earlier work. Slot 0 is *idle*: holes whose old work
//! is known to be done, which any stream may take. Each slot counts the memory freed on it; an
//! event recorded on the stream covers all that was freed before, and moves it to idle once it
//! has passed.

use super::bins::Bins;
use super::block::{BlockId, Blocks, NONE};
use super::gpu::{Event, Gpu};
use std::collections::VecDeque;

/// What names a stream. A handle alone does not: the driver hands the handle of a destroyed
/// stream out again while the old work still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamKey {
    /// The driver's handle (`CUstream`).
    pub handle: u64,
    /// The driver's id for the stream (`cuStreamGetId`), never used twice; 0 where unknown.
    pub id: u64,
}

/// The slot of idle memory.
pub const IDLE: u16 = 0;

/// A stream that the pool has seen, and its holes.
pub struct Slot {
    pub key: StreamKey,
    pub bins: Bins,
    /// Counts what was freed on the stream.
    pub clock: u64,
    /// What was freed up to here is done.
    pub passed: u64,
    /// Events on their way and the clock that each of them covers, in order.
    marks: VecDeque<(Event, u64)>,
    /// Bytes freed since the last mark.
    pub unmarked: u64,
    /// The slot's holes in the order of being freed.
    oldest: BlockId,
    newest: BlockId,
    /// Blocks handed out, or freed but still used elsewhere, that will come back to the slot.
    pub live: u64,
    /// The stream is gone: no event can be recorded on it any more.
    pub dead: bool,
}

impl Slot {
    fn new(key: StreamKey) -> Self {
        Slot {
            key,
            bins: Bins::new(),
            clock: 0,
            passed: 0,
            marks: VecDeque::new(),
            unmarked: 0,
            oldest: NONE,
            newest: NONE,
            live: 0,
            dead: false,
        }
    }

    /// Takes a hole in as the newest.
    #[inline]
    pub fn insert(&mut self, blocks: &mut Blocks, id: BlockId) {
        blocks[id].older = self.newest;
        blocks[id].newer = NONE;
        match self.newest {
            NONE => self.oldest = id,
            newest => blocks[newest].newer = id,
        }
        self.newest = id;
        self.bins.insert(blocks, id);
    }

    #[inline]
    pub fn remove(&mut self, blocks: &mut Blocks, id: BlockId) {
        let (older, newer) = (blocks[id].older, blocks[id].newer);
        match older {
            NONE => self.oldest = newer,
            _ => blocks[older].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            _ => blocks[newer].older = older,
        }
        self.bins.remove(blocks, id);
    }

    pub fn oldest(&self) -> Option<BlockId> {
        (self.oldest != NONE).then_some(self.oldest)
    }

    /// Whether a mark would cover anything that none covers yet.
    pub fn wants_mark(&self) -> bool {
        !self.dead && self.clock > self.marks.back().map_or(self.passed, |mark| mark.1)
    }

    /// Records an event that covers all that has been freed on the stream so far.
    pub fn mark(&mut self, gpu: &mut impl Gpu) {
        if self.wants_mark()
            && let Some(event) = gpu.record(self.key)
        {
            self.marks.push_back((event, self.clock));
            self.unmarked = 0;
        }
    }

    /// Asks the events on their way; true if any has passed.
    pub fn poll(&mut self, gpu: &mut impl Gpu) -> bool {
        let before = self.passed;
        while let Some((event, clock)) = self.marks.front().copied() {
            if !gpu.passed(event) {
                break;
            }
            gpu.forget(event);
            self.passed = clock;
            self.marks.pop_front();
        }
        self.passed != before
    }

    /// Waits for the newest event on its way. False where there is none or waiting failed.
    pub fn wait(&mut self, gpu: &mut impl Gpu) -> bool {
        match self.marks.back().copied() {
            Some((event, clock)) if gpu.wait(event) => {
                self.passed = clock;
                self.marks.drain(..).for_each(|(event, _)| gpu.forget(event));
                true
            }
            _ => false,
        }
    }

    /// All work on the device is known to be done.
    pub fn settle(&mut self, gpu: &mut impl Gpu) {
        self.passed = self.clock;
        self.unmarked = 0;
        self.marks.drain(..).for_each(|(event, _)| gpu.forget(event));
    }
}

/// Every slot; the first is idle memory's.
pub struct Slots {
    list: Vec<Slot>,
    last: u16,
    by_key: std::collections::HashMap<StreamKey, u16>,
    by_handle: std::collections::HashMap<u64, u16>,
}

impl Slots {
    pub fn new() -> Self {
        let idle = Slot::new(StreamKey { handle: u64::MAX, id: u64::MAX });
        Slots {
            list: vec![idle],
            last: IDLE,
            by_key: Default::default(),
            by_handle: Default::default(),
        }
    }

    /// The slot of a stream; a new one for a stream not seen before. If the handle was another
    /// stream's before, that one is known to be dead now. `None` when 65,534 streams hold memory.
    #[inline]
    pub fn of(&mut self, key: StreamKey) -> Option<u16> {
        if self.list[self.last as usize].key == key {
            return Some(self.last);
        }
        self.find(key)
    }

    #[cold]
    #[inline(never)]
    fn find(&mut self, key: StreamKey) -> Option<u16> {
        if let Some(slot) = self.by_key.get(&key) {
            self.last = *slot;
            return Some(*slot);
        }
        // A dead slot that holds nothing is used again; so many streams that come and go cost
        // no more than the most that were alive, or held memory, at once.
        let vacant = (1..self.list.len()).find(|slot| {
            let slot = &self.list[*slot];
            slot.dead && slot.live == 0 && slot.bins.is_empty() && slot.marks.is_empty() && slot.passed == slot.clock
        });
        let slot = match vacant {
            Some(slot) => {
                let clock = self.list[slot].clock;
                self.by_key.remove(&self.list[slot].key);
                self.list[slot] = Slot { clock, passed: clock, ..Slot::new(key) };
                slot as u16
            }
            None if self.list.len() < u16::MAX as usize => {
                self.list.push(Slot::new(key));
                (self.list.len() - 1) as u16
            }
            None => return None,
        };
        if let Some(old) = self.by_handle.insert(key.handle, slot)
            && old != slot
            && self.list[old as usize].key.handle == key.handle
        {
            self.list[old as usize].dead = true;
        }
        self.by_key.insert(key, slot);
        self.last = slot;
        Some(slot)
    }

    pub fn count(&self) -> usize {
        self.list.len() - 1
    }

    pub fn get(&self, slot: u16) -> &Slot {
        &self.list[slot as usize]
    }

    pub fn get_mut(&mut self, slot: u16) -> &mut Slot {
        &mut self.list[slot as usize]
    }

    /// The slots of streams, without idle memory's.
    pub fn streams_mut(&mut self) -> impl Iterator<Item = (u16, &mut Slot)> {
        self.list.iter_mut().enumerate().skip(1).map(|(slot, it)| (slot as u16, it))
    }

    pub fn iter(&self) -> impl Iterator<Item = (u16, &Slot)> {
        self.list.iter().enumerate().map(|(slot, it)| (slot as u16, it))
    }
}
