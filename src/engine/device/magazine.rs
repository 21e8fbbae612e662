//! Magazines (Bonwick's): deferred frees by thread (`free:relaxed`), so that threads seldom contend.
//!
//! A magazine collects the blocks that its thread frees in batches. An event of the whole device is recorded
//! behind each full batch; once it has completed, the batch's blocks are allocated again, for the same size.
//! All of that takes the magazine's own lock, and one call in a batch the device's. What a magazine has no
//! room for goes to the [`Depot`].
//!
//! To the pool a block in a magazine is in use, so also to a look-up by address ([`Magazines::holds`] tells).
//! Whatever needs the pool's true state, or more memory than it has, empties the magazines into the depot
//! first.
//!
//! Locks: see the order at the top of the device module.

use crate::core::{ALL_STREAMS, Event, Gpu, LiveBlock, Origin, Pool};
use crate::device::depot::{BATCH, Depot, Holders, NO_MAGAZINE, RelaxedBlock};
use crate::device::driver_gpu::DriverGpu;
use crate::device::stream_cache::CacheHits;
use crate::util::hash::fibonacci;
use crate::util::lock::{CachePadded, Guard, Lock};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Magazines of a device; more threads than this share them.
const MAGAZINES: usize = 16;

/// Blocks that a magazine can track, in use or freed to it. A power of two.
const TRACKED: usize = 1024;

/// Different sizes among a magazine's ready blocks.
const SIZES: usize = 16;

/// The number of the calling thread's magazine, from 1.
#[inline]
fn own_number() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        // Has no destructor: a thread that is ending may still free memory.
        static NUMBER: Cell<u8> = const { Cell::new(NO_MAGAZINE) };
    }
    NUMBER.with(|number| {
        if number.get() == NO_MAGAZINE {
            number.set((NEXT.fetch_add(1, Relaxed) % MAGAZINES) as u8 + 1);
        }
        usize::from(number.get())
    })
}

/// A block that a magazine tracks, in one cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Tracked {
    block: RelaxedBlock,
    /// The program has freed it.
    freed: bool,
}

/// Freed blocks in a magazine, by their slots.
#[derive(Default)]
struct Batch {
    slots: Vec<u16>,
    bytes: u64,
    /// Bytes of the last block.
    last: u64,
    /// The requested bytes of the first block.
    requested: u64,
    /// Whether the others' differ.
    mixed: bool,
}

impl Batch {
    #[inline]
    fn push(&mut self, slot: usize, block: &RelaxedBlock) {
        let requested = block.live.requested;
        if self.slots.is_empty() {
            (self.requested, self.mixed) = (requested, false);
        }
        self.mixed |= requested != self.requested;
        self.last = block.size();
        self.bytes += self.last;
        self.slots.push(slot as u16);
    }
}

/// The completed blocks of one requested size.
struct Ready {
    requested: u64,
    slots: Vec<u16>,
}

/// One thread's blocks.
pub struct Magazine {
    number: u8,
    tracked: Box<[Option<Tracked>; TRACKED]>,
    /// The latest frees, without an event yet.
    open: Batch,
    /// Closed batches, in the order of their events.
    waiting: VecDeque<(Event, Batch)>,
    waiting_bytes: u64,
    ready: Vec<Ready>,
    ready_bytes: u64,
    /// Empty batches, whose memory is used again.
    spare: Vec<Batch>,
    hits: CacheHits,
}

/// The magazines of one device.
pub struct Magazines {
    /// The most bytes of all of them in each of three states: open, waiting and ready.
    limit: u64,
    /// A bit for each magazine that there is.
    created: AtomicU64,
    /// The share of the limit that each has.
    share: AtomicU64,
    magazines: [OnceLock<Box<CachePadded<Lock<Magazine>>>>; MAGAZINES],
}

impl Magazines {
    /// The magazines of a device with `total` bytes of memory.
    pub fn new(total: u64) -> Self {
        let limit = (total / 256).max(32 << 20);
        Magazines {
            limit,
            created: AtomicU64::new(0),
            share: AtomicU64::new(limit),
            magazines: [const { OnceLock::new() }; MAGAZINES],
        }
    }

    /// The calling thread's magazine.
    #[inline]
    pub fn own(&self) -> Guard<'_, Magazine> {
        let number = own_number();
        match self.magazines[number - 1].get() {
            Some(magazine) => magazine.lock(),
            None => self.create(number),
        }
    }

    #[cold]
    fn create(&self, number: usize) -> Guard<'_, Magazine> {
        let magazine = self.magazines[number - 1].get_or_init(|| {
            let bit = 1 << (number - 1);
            let created = self.created.fetch_or(bit, Relaxed) | bit;
            let share = self.limit / u64::from(created.count_ones());
            self.share.fetch_min(share, Relaxed);
            Box::new(CachePadded(Lock::new(Magazine {
                number: number as u8,
                tracked: Box::new([None; TRACKED]),
                open: Batch::default(),
                waiting: VecDeque::new(),
                waiting_bytes: 0,
                ready: Vec::new(),
                ready_bytes: 0,
                spare: Vec::new(),
                hits: CacheHits::default(),
            })))
        });
        magazine.lock()
    }

    /// The most bytes that one magazine may have in each state.
    #[inline]
    pub fn share(&self) -> u64 {
        self.share.load(Relaxed)
    }

    /// Whether a block, which is in use to the pool, is freed and in a magazine.
    pub fn holds(&self, live: &LiveBlock, address: u64, holders: &Holders) -> bool {
        let holder = self.holder(live, holders);
        holder.is_some_and(|magazine| magazine.holds(address))
    }

    /// Has no magazine track a block in use, which is freed in another way. False if it is freed and in a
    /// magazine.
    #[inline]
    pub fn untrack(&self, live: &LiveBlock, address: u64, holders: &mut Holders) -> bool {
        match self.holder(live, holders) {
            None => true,
            Some(mut magazine) => {
                let in_use = magazine.untrack(address);
                if in_use {
                    holders.set(live, NO_MAGAZINE);
                }
                in_use
            }
        }
    }

    /// The magazine that tracks a block, locked.
    #[inline]
    fn holder(&self, live: &LiveBlock, holders: &Holders) -> Option<Guard<'_, Magazine>> {
        let number = usize::from(holders.of(live));
        let magazine = self.magazines.get(number.wrapping_sub(1))?.get()?;
        Some(magazine.lock())
    }

    /// Empties every magazine into the depot.
    pub fn empty(&self, depot: &mut Depot, pool: &mut Pool<DriverGpu>) {
        let mut created = self.created.load(Relaxed);
        while created != 0 {
            if let Some(magazine) = self.magazines[created.trailing_zeros() as usize].get() {
                magazine.lock().empty(depot, pool);
            }
            created &= created - 1;
        }
    }
}

impl Magazine {
    /// Allocates a ready block of exactly this size.
    #[inline]
    pub fn take(&mut self, requested: u64) -> Option<u64> {
        let ready = self.ready.iter_mut().find(|it| it.requested == requested)?;
        let slot = ready.slots.pop()?;
        let item = self.tracked[usize::from(slot) % TRACKED].as_mut()?;
        item.freed = false;
        let size = item.block.size();
        self.ready_bytes -= size;
        self.hits.add(size, requested);
        Some(item.block.address)
    }

    /// Frees a block to the open batch. False if it is not tracked here as in use.
    #[inline]
    pub fn put(&mut self, address: u64) -> bool {
        let Some(slot) = self.find(address) else {
            return false;
        };
        match &mut self.tracked[slot] {
            Some(item) if !item.freed => {
                item.freed = true;
                self.open.push(slot, &item.block);
                true
            }
            _ => false,
        }
    }

    /// The slot of a block that is tracked here.
    #[inline]
    fn find(&self, address: u64) -> Option<usize> {
        let is_at = |slot: usize| matches!(&self.tracked[slot], Some(item) if item.block.address == address);
        let (first, second) = slots_of(address);
        if is_at(first) {
            return Some(first);
        }
        Some(second).filter(|slot| is_at(*slot))
    }

    /// Whether the open batch is to be closed: it has [`BATCH`] blocks, or with one more like the last it
    /// would have more than `share` bytes.
    #[inline]
    pub fn is_full(&self, share: u64) -> bool {
        self.open.slots.len() >= BATCH || self.open.bytes + self.open.last > share
    }

    /// Records an event behind the open batch. Without one, or where too many bytes wait, its blocks go to
    /// the depot.
    pub fn close(&mut self, share: u64, depot: &mut Depot, pool: &mut Pool<DriverGpu>) {
        // Another thread that has the same magazine may have closed it.
        if self.open.slots.is_empty() {
            return;
        }
        // The first batch always has room: it may be larger than `share` if the sizes of its blocks differ
        // much.
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

    /// Makes the blocks of the oldest batch ready if its event has completed. Returns whether it has.
    pub fn advance(&mut self, share: u64, depot: &mut Depot, pool: &mut Pool<DriverGpu>) -> bool {
        let completed = |(event, _): &(Event, Batch)| pool.gpu_mut().has_completed(*event);
        if !self.waiting.front().is_some_and(completed) {
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
            let ready = &mut self.ready[at].slots;
            if ready.is_empty() {
                std::mem::swap(ready, &mut batch.slots);
            }
            ready.append(&mut batch.slots);
            self.ready_bytes += batch.bytes;
        }
        for slot in batch.slots.drain(..) {
            let Some(item) = &self.tracked[usize::from(slot) % TRACKED] else {
                continue;
            };
            let (requested, size) = (item.block.live.requested, item.block.size());
            let at = self.ready_at(requested, depot, pool);
            self.ready_bytes += size;
            self.ready[at].slots.push(slot);
        }
        batch.bytes = 0;
        self.spare.push(batch);
        true
    }

    /// The index of a size in `ready`. With too many sizes all ready blocks go to the depot.
    fn ready_at(&mut self, requested: u64, depot: &mut Depot, pool: &mut Pool<DriverGpu>) -> usize {
        let known = self.ready.iter().position(|it| it.requested == requested);
        known.unwrap_or_else(|| {
            if self.ready.len() >= SIZES {
                self.move_ready_to_depot(depot, pool);
            }
            self.ready.push(Ready {
                requested,
                slots: Vec::new(),
            });
            self.ready.len() - 1
        })
    }

    /// Tracks a block that was just allocated, unless its slots hold freed blocks, or it has more than
    /// `share` bytes.
    pub fn track(&mut self, block: RelaxedBlock, share: u64, holders: &mut Holders) {
        if block.size() > share {
            return;
        }
        let (first, second) = slots_of(block.address);
        let is_free = |slot: &usize| self.tracked[*slot].is_none();
        let free = [first, second].into_iter().find(is_free);
        let slot = self.find(block.address).or(free).unwrap_or(first);
        let tracked = &mut self.tracked[slot];
        match tracked {
            Some(item) if item.freed => return,
            Some(item) => holders.set(&item.block.live, NO_MAGAZINE),
            None => {}
        }
        holders.set(&block.live, self.number);
        *tracked = Some(Tracked {
            block,
            freed: false,
        });
    }

    /// Whether the block is freed and here.
    fn holds(&self, address: u64) -> bool {
        self.find(address).is_some_and(|slot| self.is_freed(slot))
    }

    fn is_freed(&self, slot: usize) -> bool {
        matches!(&self.tracked[slot], Some(item) if item.freed)
    }

    /// Stops tracking a block in use. False if it is freed and here.
    fn untrack(&mut self, address: u64) -> bool {
        match self.find(address) {
            Some(slot) if self.is_freed(slot) => false,
            Some(slot) => {
                self.tracked[slot] = None;
                true
            }
            None => true,
        }
    }

    /// Moves all freed blocks to the depot, and adds the hits to the pool's counters.
    fn empty(&mut self, depot: &mut Depot, pool: &mut Pool<DriverGpu>) {
        self.hits.flush(Origin::Cuda, pool);
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
        for Ready { slots, .. } in std::mem::take(&mut self.ready) {
            let mut ready = Batch {
                slots,
                ..Batch::default()
            };
            let blocks = self.release(&mut ready, &mut depot.holders);
            depot.add_ready(blocks, pool);
        }
        self.ready_bytes = 0;
    }

    /// The blocks of a batch, which are not tracked any more.
    fn release(&mut self, batch: &mut Batch, holders: &mut Holders) -> Vec<RelaxedBlock> {
        batch.bytes = 0;
        let slots = batch.slots.drain(..);
        let items = slots.filter_map(|slot| self.tracked[usize::from(slot)].take());
        let blocks: Vec<RelaxedBlock> = items.map(|item| item.block).collect();
        blocks
            .iter()
            .for_each(|block| holders.set(&block.live, NO_MAGAZINE));
        blocks
    }
}

/// The two slots of an address. Blocks at some even distances share few first slots; the second ones differ
/// then.
#[inline]
fn slots_of(address: u64) -> (usize, usize) {
    let slot = |spread: u64| (spread >> (64 - TRACKED.trailing_zeros())) as usize;
    let first = fibonacci(address / crate::core::BLOCK);
    (slot(first), slot(fibonacci(first ^ first >> 29)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn magazine_has_slots_for_blocks_at_any_even_distance() {
        let distances = (9..28).flat_map(|bits| [1, 3, 5, 7].map(|odd| odd << bits));
        for distance in distances {
            let mut taken = [false; TRACKED];
            let mut tracked = 0;
            // As many as circulate where a thread has one block at a time.
            for at in 0..2 * BATCH as u64 {
                let (first, second) = slots_of(0x7F00_0000_0000 + at * distance);
                if let Some(slot) = [first, second].into_iter().find(|slot| !taken[*slot]) {
                    taken[slot] = true;
                    tracked += 1;
                }
            }
            assert!(
                tracked * 5 >= 2 * BATCH * 4,
                "{tracked} at {distance} bytes"
            );
        }
    }
}
