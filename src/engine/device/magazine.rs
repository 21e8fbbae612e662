//! Magazines (Bonwick's): deferred frees by thread (`free:relaxed`), so that threads seldom contend.
//!
//! A magazine collects the blocks that its thread frees in batches. An event of the whole device is recorded behind
//! each full batch; once it has completed, the batch's blocks are allocated again, for the same size. All of that
//! takes the magazine's own lock, and one call in a batch the device's. What a magazine has no room for goes to the
//! [`Depot`].
//!
//! To the pool a block in a magazine is in use, and so it is to a look-up by address ([`Magazines::has`] tells them
//! apart). All that needs the pool's true state, or more memory than it has, empties the magazines into the depot
//! first.
//!
//! Locks: see the order at the top of the device module.

use crate::core::{ALL_STREAMS, Event, Gpu, LiveBlock, Origin, Pool};
use crate::device::depot::{DeferredBlock, Depot};
use crate::device::driver_gpu::DriverGpu;
use crate::device::stream_cache::Recycled;
use crate::util::hash::fibonacci;
use crate::util::lock::{CachePadded, Guard, Lock};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Magazines of a device; more threads than this share them.
const MAGAZINES: usize = 16;

/// Blocks that a magazine can know, in use or freed to it.
const KNOWN: usize = 1024;

/// Blocks behind one event, at most.
pub const BATCH: usize = 128;

/// Sizes of blocks that are ready in one magazine.
const SIZES: usize = 16;

/// Magazine numbers count from 1.
const NOBODY: u8 = 0;

/// The number of the calling thread's magazine.
#[inline]
fn own_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        // No destructor: a thread that is ending frees memory, too.
        static NUMBER: Cell<u8> = const { Cell::new(NOBODY) };
    }
    NUMBER.with(|number| {
        if number.get() == NOBODY {
            number.set((NEXT.fetch_add(1, Relaxed) % MAGAZINES) as u8 + 1);
        }
        usize::from(number.get())
    })
}

/// A block that a magazine knows, in one cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Item {
    block: DeferredBlock,
    /// It was given back, and lies here.
    lying: bool,
}

/// Blocks that lie in a magazine, by their places among the known.
#[derive(Default)]
struct Batch {
    places: Vec<u16>,
    bytes: u64,
    /// Bytes of the last of them.
    last: u64,
    /// What was asked for the first of them, and whether that is so for all.
    requested: u64,
    mixed: bool,
}

impl Batch {
    #[inline]
    fn push(&mut self, place: usize, block: &DeferredBlock) {
        let requested = block.live.requested;
        if self.places.is_empty() {
            (self.requested, self.mixed) = (requested, false);
        }
        self.mixed |= requested != self.requested;
        self.last = block.size();
        self.bytes += self.last;
        self.places.push(place as u16);
    }
}

/// The idle blocks of one size.
struct Ready {
    requested: u64,
    places: Vec<u16>,
}

/// One thread's blocks.
pub struct Magazine {
    number: u8,
    known: Box<[Option<Item>; KNOWN]>,
    /// The latest to be given back.
    open: Batch,
    /// In the order of their events.
    waiting: VecDeque<(Event, Batch)>,
    waiting_bytes: u64,
    ready: Vec<Ready>,
    ready_bytes: u64,
    /// Batches that are empty, to be used again.
    spare: Vec<Batch>,
    recycled: Recycled,
}

/// The magazines of one device.
pub struct Magazines {
    /// Bytes that they may have together in each of three states: latest, waiting and ready.
    limit: u64,
    /// A bit for each that there is.
    made: AtomicU64,
    /// What each may have of the limit.
    share: AtomicU64,
    places: [OnceLock<Box<CachePadded<Lock<Magazine>>>>; MAGAZINES],
}

/// Which magazine knows a block, by the block's index in the pool. Under the device's lock.
#[derive(Default)]
pub struct Holders(Vec<u8>);

impl Holders {
    fn set(&mut self, live: &LiveBlock, number: u8) {
        if self.0.len() <= live.index() {
            self.0.resize(live.index() + 1, NOBODY);
        }
        self.0[live.index()] = number;
    }

    #[inline]
    fn of(&self, live: &LiveBlock) -> u8 {
        self.0.get(live.index()).copied().unwrap_or(NOBODY)
    }
}

impl Magazines {
    /// For a device with so many bytes of memory.
    pub fn new(total: u64) -> Self {
        let limit = (total / 256).max(32 << 20);
        Magazines {
            limit,
            made: AtomicU64::new(0),
            share: AtomicU64::new(limit),
            places: [const { OnceLock::new() }; MAGAZINES],
        }
    }

    /// The calling thread's magazine.
    #[inline]
    pub fn own(&self) -> Guard<'_, Magazine> {
        let number = own_number();
        let place = &self.places[number - 1];
        match place.get() {
            Some(magazine) => magazine.lock(),
            None => self.make(number),
        }
    }

    #[cold]
    fn make(&self, number: usize) -> Guard<'_, Magazine> {
        let magazine = self.places[number - 1].get_or_init(|| {
            let bit = 1 << (number - 1);
            let made = self.made.fetch_or(bit, Relaxed) | bit;
            let share = self.limit / u64::from(made.count_ones());
            self.share.fetch_min(share, Relaxed);
            Box::new(CachePadded(Lock::new(Magazine {
                number: number as u8,
                known: Box::new([None; KNOWN]),
                open: Batch::default(),
                waiting: VecDeque::new(),
                waiting_bytes: 0,
                ready: Vec::new(),
                ready_bytes: 0,
                spare: Vec::new(),
                recycled: Recycled::default(),
            })))
        });
        magazine.lock()
    }

    /// Bytes that one magazine may have in each state.
    #[inline]
    pub fn share(&self) -> u64 {
        self.share.load(Relaxed)
    }

    /// Whether a block, which is in use to the pool, lies in a magazine.
    pub fn has(&self, live: &LiveBlock, address: u64, holders: &Holders) -> bool {
        let knows = self.holder(live, holders);
        knows.is_some_and(|magazine| magazine.lies_here(address))
    }

    /// A block in use is freed in another way, and no magazine is to know it. False where it lies in
    /// one: then it is not in use.
    #[inline]
    pub fn forget(&self, live: &LiveBlock, address: u64, holders: &mut Holders) -> bool {
        match self.holder(live, holders) {
            None => true,
            Some(mut magazine) => {
                let gone = magazine.forget(address);
                if gone {
                    holders.set(live, NOBODY);
                }
                gone
            }
        }
    }

    #[inline]
    fn holder(&self, live: &LiveBlock, holders: &Holders) -> Option<Guard<'_, Magazine>> {
        let number = usize::from(holders.of(live));
        let magazine = self.places.get(number.wrapping_sub(1))?.get()?;
        Some(magazine.lock())
    }

    /// Empties every magazine into the depot.
    pub fn empty(&self, depot: &mut Depot, pool: &mut Pool<DriverGpu>) {
        let mut made = self.made.load(Relaxed);
        while made != 0 {
            if let Some(magazine) = self.places[made.trailing_zeros() as usize].get() {
                magazine.lock().empty(depot, pool);
            }
            made &= made - 1;
        }
    }
}

impl Magazine {
    /// A block of this size that nothing uses any more.
    #[inline]
    pub fn take(&mut self, requested: u64) -> Option<u64> {
        let ready = self.ready.iter_mut().find(|it| it.requested == requested)?;
        let place = ready.places.pop()?;
        let item = self.known[usize::from(place) % KNOWN].as_mut()?;
        item.lying = false;
        let size = item.block.size();
        self.ready_bytes -= size;
        self.recycled.add(size, requested);
        Some(item.block.address)
    }

    /// Takes a block in use back. False where it is not known here.
    #[inline]
    pub fn put(&mut self, address: u64) -> bool {
        let Some(place) = self.find(address) else {
            return false;
        };
        match &mut self.known[place] {
            Some(item) if !item.lying => {
                item.lying = true;
                self.open.push(place, &item.block);
                true
            }
            _ => false,
        }
    }

    /// The place of a block that is known here.
    #[inline]
    fn find(&self, address: u64) -> Option<usize> {
        let is_at = |place: usize| matches!(&self.known[place], Some(item) if item.block.address == address);
        let (first, second) = places_of(address);
        if is_at(first) {
            return Some(first);
        }
        Some(second).filter(|place| is_at(*place))
    }

    /// Whether the latest blocks are to get their event, where each magazine may have so many bytes: one
    /// more like the last would be too many.
    #[inline]
    pub fn is_full(&self, share: u64) -> bool {
        self.open.places.len() >= BATCH || self.open.bytes + self.open.last > share
    }

    /// Puts an event behind the latest blocks, or where there is no room for more, or no event, them
    /// into the depot.
    pub fn close(&mut self, share: u64, depot: &mut Depot, pool: &mut Pool<DriverGpu>) {
        // Another thread with the same magazine may have been quicker.
        if self.open.places.is_empty() {
            return;
        }
        // A single batch always has room: blocks of very different sizes may make it too large by one.
        let room = self.waiting.is_empty() || self.waiting_bytes + self.open.bytes <= share;
        match room
            .then(|| pool.gpu_mut().record_event(ALL_STREAMS))
            .flatten()
        {
            Some(event) => {
                let spare = self.spare.pop().unwrap_or_default();
                let batch = std::mem::replace(&mut self.open, spare);
                self.waiting_bytes += batch.bytes;
                self.waiting.push_back((event, batch));
            }
            None => self.move_open_to_depot(depot, pool),
        }
    }

    /// The oldest batch is ready, if its event has passed. True if it was.
    pub fn advance(&mut self, share: u64, depot: &mut Depot, pool: &mut Pool<DriverGpu>) -> bool {
        let passed = |(event, _): &(Event, Batch)| pool.gpu_mut().has_completed(*event);
        if !self.waiting.front().is_some_and(passed) {
            return false;
        }
        let Some((event, mut batch)) = self.waiting.pop_front() else {
            return false;
        };
        pool.gpu_mut().release_event(event);
        self.waiting_bytes -= batch.bytes;
        if self.ready_bytes + batch.bytes > share {
            self.move_ready_to_depot(depot, pool);
        }
        if !batch.mixed {
            let at = self.ready_at(batch.requested, depot, pool);
            let ready = &mut self.ready[at].places;
            if ready.is_empty() {
                std::mem::swap(ready, &mut batch.places);
            }
            ready.append(&mut batch.places);
            self.ready_bytes += batch.bytes;
        }
        for place in batch.places.drain(..) {
            let Some(item) = &self.known[usize::from(place) % KNOWN] else {
                continue;
            };
            let (requested, size) = (item.block.live.requested, item.block.size());
            let at = self.ready_at(requested, depot, pool);
            self.ready_bytes += size;
            self.ready[at].places.push(place);
        }
        batch.bytes = 0;
        self.spare.push(batch);
        true
    }

    /// Where the idle blocks of a size are. Those of all sizes make room where there are too many sizes.
    fn ready_at(&mut self, requested: u64, depot: &mut Depot, pool: &mut Pool<DriverGpu>) -> usize {
        let known = self.ready.iter().position(|it| it.requested == requested);
        known.unwrap_or_else(|| {
            if self.ready.len() >= SIZES {
                self.move_ready_to_depot(depot, pool);
            }
            self.ready.push(Ready {
                requested,
                places: Vec::new(),
            });
            self.ready.len() - 1
        })
    }

    /// Knows a block from now on that is handed out just now, unless there is no place for it, or it is
    /// more than a magazine may have.
    pub fn know(&mut self, block: DeferredBlock, share: u64, holders: &mut Holders) {
        if block.size() > share {
            return;
        }
        let (first, second) = places_of(block.address);
        let is_free = |place: &usize| self.known[*place].is_none();
        let free = [first, second].into_iter().find(is_free);
        let place = self.find(block.address).or(free).unwrap_or(first);
        let known = &mut self.known[place];
        match known {
            Some(item) if item.lying => return,
            Some(item) => holders.set(&item.block.live, NOBODY),
            None => {}
        }
        holders.set(&block.live, self.number);
        *known = Some(Item {
            block,
            lying: false,
        });
    }

    fn lies_here(&self, address: u64) -> bool {
        self.find(address).is_some_and(|place| self.lies_at(place))
    }

    fn lies_at(&self, place: usize) -> bool {
        matches!(&self.known[place], Some(item) if item.lying)
    }

    /// False where the block lies here.
    fn forget(&mut self, address: u64) -> bool {
        match self.find(address) {
            Some(place) if self.lies_at(place) => false,
            Some(place) => {
                self.known[place] = None;
                true
            }
            None => true,
        }
    }

    fn empty(&mut self, depot: &mut Depot, pool: &mut Pool<DriverGpu>) {
        self.recycled.tell(Origin::Cuda, pool);
        self.move_ready_to_depot(depot, pool);
        while let Some((event, mut batch)) = self.waiting.pop_front() {
            let blocks = self.release(&mut batch, &mut depot.holders);
            depot.add_waiting(event, blocks, pool);
        }
        self.waiting_bytes = 0;
        self.move_open_to_depot(depot, pool);
    }

    fn move_open_to_depot(&mut self, depot: &mut Depot, pool: &mut Pool<DriverGpu>) {
        let mut open = std::mem::take(&mut self.open);
        for block in self.release(&mut open, &mut depot.holders) {
            depot.put(block, pool);
        }
        self.open = open;
    }

    fn move_ready_to_depot(&mut self, depot: &mut Depot, pool: &mut Pool<DriverGpu>) {
        for Ready { places, .. } in std::mem::take(&mut self.ready) {
            let mut ready = Batch {
                places,
                ..Batch::default()
            };
            let blocks = self.release(&mut ready, &mut depot.holders);
            depot.add_ready(blocks, pool);
        }
        self.ready_bytes = 0;
    }

    /// The blocks of a batch, which this magazine knows no more.
    fn release(&mut self, batch: &mut Batch, holders: &mut Holders) -> Vec<DeferredBlock> {
        batch.bytes = 0;
        let places = batch.places.drain(..);
        let items = places.filter_map(|place| self.known[usize::from(place)].take());
        let blocks: Vec<DeferredBlock> = items.map(|item| item.block).collect();
        blocks
            .iter()
            .for_each(|block| holders.set(&block.live, NOBODY));
        blocks
    }
}

/// Where a magazine would know the block at an address. Blocks lie at even distances, of which some give
/// few different places; the second place of each then is another.
#[inline]
fn places_of(address: u64) -> (usize, usize) {
    let place = |spread: u64| (spread >> (64 - KNOWN.trailing_zeros())) as usize;
    let first = fibonacci(address / crate::core::BLOCK);
    (place(first), place(fibonacci(first ^ first >> 29)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_at_any_even_distance_have_places() {
        let distances = (9..28).flat_map(|bits| [1, 3, 5, 7].map(|odd| odd << bits));
        for distance in distances {
            let mut taken = [false; KNOWN];
            let mut known = 0;
            // As many as circulate where a thread has one block at a time.
            for at in 0..2 * BATCH as u64 {
                let (first, second) = places_of(0x7F00_0000_0000 + at * distance);
                if let Some(place) = [first, second].into_iter().find(|place| !taken[*place]) {
                    taken[place] = true;
                    known += 1;
                }
            }
            assert!(known * 5 >= 2 * BATCH * 4, "{known} at {distance} bytes");
        }
    }
}
