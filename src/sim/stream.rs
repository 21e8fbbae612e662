//! Streams: queues of work, and their handles.
//!
//! A stream has a *slot*. A handle is reused at once after the stream is destroyed; a slot only once all its
//! work is done and the host knows it, and its sequence numbers go on counting, so that a slot and a sequence
//! number always name one piece of work.

use crate::clock::Clock;
use crate::work::Work;
use std::collections::{HashMap, VecDeque};

/// How a stream stands to the legacy default stream of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Legacy,
    Blocking,
    NonBlocking,
}

/// One entry of a queue.
#[derive(Debug)]
pub(crate) struct Item {
    pub sequence: u64,
    /// Counts all items of a machine, to tell which was enqueued first.
    pub ordinal: u64,
    /// Work of other slots that must be done first.
    pub after: Vec<(u32, u64)>,
    pub work: Work,
}

/// A stream, or what is left of one that was destroyed.
#[derive(Debug)]
pub(crate) struct Stream {
    pub handle: u64,
    pub id: u64,
    pub device: usize,
    pub kind: Kind,
    pub priority: i32,
    pub capturing: bool,
    /// The capture that it takes part in, where it was not a test that announced one.
    pub capture: Option<u32>,
    /// Sequence numbers of the last work enqueued and done.
    pub enqueued: u64,
    pub done: u64,
    pub queue: VecDeque<Item>,
    /// A host function runs; the queue stands still though its head is gone.
    pub running: bool,
    /// What comes before anything enqueued next.
    pub clock: Clock,
    /// The version of the host's clock, and the work of the legacy stream, joined into `clock`.
    pub host_seen: u64,
    pub legacy_seen: u64,
    /// Listed as having work that the legacy stream has not joined; the device not synchronised.
    pub dirty: bool,
    pub unseen: bool,
    /// Where it stands in the list of streams that have work.
    active: Option<usize>,
}

impl Stream {
    fn new(handle: u64, id: u64, device: usize, kind: Kind) -> Stream {
        Stream {
            handle,
            id,
            device,
            kind,
            priority: 0,
            capturing: false,
            capture: None,
            enqueued: 0,
            done: 0,
            queue: VecDeque::new(),
            running: false,
            clock: Clock::default(),
            host_seen: 0,
            legacy_seen: 0,
            dirty: false,
            unseen: false,
            active: None,
        }
    }
}

/// Created streams' handles start here and lie this far apart: they look like addresses, and can
/// be mistaken for nothing else.
const FIRST_HANDLE: u64 = 0x5712_0000_0000;
const HANDLE_STEP: u64 = 0x100;

/// The priorities of streams reach from 0 to this.
pub(crate) const MOST_URGENT: i32 = -5;

/// The legacy and per-thread default streams' handles.
pub(crate) const LEGACY: u64 = 1;
pub(crate) const PER_THREAD: u64 = 2;

/// All streams of a machine. The first slots are the devices' legacy streams.
#[derive(Debug)]
pub(crate) struct Streams {
    slots: Vec<Stream>,
    /// The slot each created handle names now.
    handles: Vec<Option<u32>>,
    free_handles: Vec<u32>,
    per_thread: HashMap<(u64, usize), u32>,
    /// By device: the internal stream that joins all others for `cuCtxRecordEvent`.
    gatherers: HashMap<usize, u32>,
    /// Destroyed streams whose slots may still matter, and slots that don't.
    retiring: VecDeque<u32>,
    spare: Vec<u32>,
    active: Vec<u32>,
    next_id: u64,
}

impl Streams {
    pub fn new(devices: usize) -> Streams {
        let mut streams = Streams {
            slots: Vec::new(),
            handles: Vec::new(),
            free_handles: Vec::new(),
            per_thread: HashMap::new(),
            gatherers: HashMap::new(),
            retiring: VecDeque::new(),
            spare: Vec::new(),
            active: Vec::new(),
            next_id: 1,
        };
        for device in 0..devices {
            streams.open(0, device, Kind::Legacy);
        }
        streams
    }

    pub fn get(&self, slot: u32) -> &Stream {
        &self.slots[slot as usize]
    }

    pub fn get_mut(&mut self, slot: u32) -> &mut Stream {
        &mut self.slots[slot as usize]
    }

    pub fn legacy(&self, device: usize) -> u32 {
        device as u32
    }

    pub fn per_thread(&mut self, thread: u64, device: usize) -> u32 {
        if let Some(slot) = self.per_thread.get(&(thread, device)) {
            return *slot;
        }
        let slot = self.open(PER_THREAD, device, Kind::Blocking);
        self.per_thread.insert((thread, device), slot);
        slot
    }

    /// A device's joining stream, which has no handle.
    pub fn joining_stream(&mut self, device: usize) -> u32 {
        if let Some(slot) = self.gatherers.get(&device) {
            return *slot;
        }
        let slot = self.open(u64::MAX, device, Kind::NonBlocking);
        self.gatherers.insert(device, slot);
        slot
    }

    /// Every stream of a device but the joining one, destroyed ones included.
    pub fn of_device(&self, device: usize) -> Vec<u32> {
        let joining_stream = self.gatherers.get(&device).copied();
        (0..self.slots.len() as u32)
            .filter(|slot| self.get(*slot).device == device && Some(*slot) != joining_stream)
            .collect()
    }

    /// The stream a created handle names now.
    pub fn named(&self, handle: u64) -> Option<u32> {
        let distance = handle.checked_sub(FIRST_HANDLE)?;
        if !distance.is_multiple_of(HANDLE_STEP) {
            return None;
        }
        *self.handles.get((distance / HANDLE_STEP) as usize)?
    }

    /// Makes a stream; its handle is the one destroyed last, if any.
    pub fn create(&mut self, device: usize, kind: Kind, host: Option<&Clock>) -> u32 {
        self.collect(host);
        let index = self.free_handles.pop().unwrap_or_else(|| {
            self.handles.push(None);
            (self.handles.len() - 1) as u32
        });
        let slot = self.open(FIRST_HANDLE + u64::from(index) * HANDLE_STEP, device, kind);
        self.handles[index as usize] = Some(slot);
        slot
    }

    fn open(&mut self, handle: u64, device: usize, kind: Kind) -> u32 {
        let mut stream = Stream::new(handle, self.next_id, device, kind);
        self.next_id += 1;
        if let Some(slot) = self.spare.pop() {
            let place = &mut self.slots[slot as usize];
            (stream.enqueued, stream.done) = (place.enqueued, place.done);
            *place = stream;
            return slot;
        }
        self.slots.push(stream);
        (self.slots.len() - 1) as u32
    }

    /// Ends a handle; the work lives on in its slot.
    pub fn destroy(&mut self, slot: u32) {
        let stream = &mut self.slots[slot as usize];
        stream.capturing = false;
        if let Some(distance) = stream.handle.checked_sub(FIRST_HANDLE) {
            let index = (distance / HANDLE_STEP) as u32;
            self.handles[index as usize] = None;
            self.free_handles.push(index);
            self.retiring.push_back(slot);
        }
    }

    /// Looks at a few destroyed streams for slots to use again: their work is done and the host
    /// (whose clock is not kept without checks) knows.
    fn collect(&mut self, host: Option<&Clock>) {
        for _ in 0..self.retiring.len().min(8) {
            let Some(slot) = self.retiring.pop_front() else {
                break;
            };
            let stream = &self.slots[slot as usize];
            let known = host.is_none_or(|host| host.get(slot) >= stream.enqueued);
            if stream.done == stream.enqueued && known {
                self.spare.push(slot);
            } else {
                self.retiring.push_back(slot);
            }
        }
    }

    /// Puts an item at the end of a stream's queue.
    pub fn push(&mut self, slot: u32, item: Item) {
        let stream = &mut self.slots[slot as usize];
        stream.queue.push_back(item);
        if stream.active.is_none() {
            stream.active = Some(self.active.len());
            self.active.push(slot);
        }
    }

    /// Notes that the stream's work up to here is done.
    pub fn finish(&mut self, slot: u32, sequence: u64) {
        let stream = &mut self.slots[slot as usize];
        stream.done = sequence;
        if stream.queue.is_empty()
            && let Some(place) = stream.active.take()
        {
            self.active.swap_remove(place);
            if let Some(moved) = self.active.get(place) {
                self.slots[*moved as usize].active = Some(place);
            }
        }
    }

    pub fn done(&self, slot: u32, sequence: u64) -> bool {
        self.slots[slot as usize].done >= sequence
    }

    /// How much of a stream's work is not done.
    pub fn queued(&self, slot: u32) -> usize {
        let stream = &self.slots[slot as usize];
        (stream.enqueued - stream.done) as usize
    }

    /// Streams that have work, in no order.
    pub fn active(&self) -> &[u32] {
        &self.active
    }

    /// The streams of a device that handles name now.
    pub fn created(&self, device: usize) -> Vec<u32> {
        let named = self.handles.iter().flatten().copied();
        named
            .filter(|slot| self.get(*slot).device == device)
            .collect()
    }

    /// How messages call a stream.
    pub fn label(&self, slot: u32) -> String {
        let stream = self.get(slot);
        match stream.handle {
            0 => format!("legacy stream of device {}", stream.device),
            PER_THREAD => format!("per-thread stream (id {})", stream.id),
            handle => format!("stream {handle:#x} (id {})", stream.id),
        }
    }
}
