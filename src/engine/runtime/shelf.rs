//! Shelves: the few blocks freed last on each stream, kept aside for a request of the same size.
//!
//! A program that allocates and frees the same sizes over and over, as most do between two kernels,
//! is served from here with one lock that no other stream takes, and without the pool. To the pool a
//! block on a shelf is still handed out. So whatever looks at the pool, or wants memory that it does
//! not have, clears the shelves first; what was recycled here is then added to the pool's counters.
//!
//! Locks are taken in one order: the device's, then a shelf's. The quick ways take a shelf's alone.

use crate::core::{Class, Gpu, Pool, StreamKey};
use spin::Yield;
use spin::mutex::SpinMutex;
use std::sync::OnceLock;

/// Streams beyond this many may have to do without a shelf.
const SHELVES: usize = 64;

/// Blocks on one shelf.
const LENGTH: usize = 8;

/// Blocks in use that a shelf remembers, so that they find their way back without the pool.
const TRACKED: usize = 512;

/// A block in use, or on the shelf.
#[derive(Clone, Copy, Default)]
struct Item {
    /// 0 where there is none.
    address: u64,
    requested: u64,
    size: u64,
}

/// What went over the shelf, in one class, since the pool was last told.
#[derive(Clone, Copy, Default)]
struct Recycled {
    count: u64,
    bytes: u64,
    requested: u64,
}

struct Shelf {
    key: StreamKey,
    items: [Item; LENGTH],
    length: usize,
    recycled: [Recycled; 2],
    tracked: Box<[Item; TRACKED]>,
    /// The block that was handed out last.
    last: u64,
    /// The first block ever tracked. Places count from it, so that a run is the same wherever the
    /// system puts the addresses.
    base: u64,
}

type Locked = SpinMutex<Shelf, Yield>;

/// The shelves of one device.
pub struct Shelves {
    /// By the stream's handle. Where two streams fall together the later one has the place.
    places: [OnceLock<Box<Locked>>; SHELVES],
}

#[inline]
fn spread(value: u64) -> u64 {
    value.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

#[inline]
fn place_of(handle: u64) -> usize {
    // 1 is another name of the default stream, 0.
    (spread(handle & !1) >> (64 - SHELVES.trailing_zeros())) as usize
}

impl Shelves {
    pub fn new() -> Self {
        Shelves {
            places: [const { OnceLock::new() }; SHELVES],
        }
    }

    /// A block of exactly this size that was freed on the stream.
    #[inline]
    pub fn take(&self, key: StreamKey, requested: u64) -> Option<u64> {
        let mut shelf = self.places[place_of(key.handle)].get()?.lock();
        let at = shelf.items[..shelf.length]
            .iter()
            .rposition(|it| it.requested == requested)?;
        if shelf.key != key {
            return None;
        }
        let item = shelf.items[at];
        shelf.length -= 1;
        shelf.items[at] = shelf.items[shelf.length];
        let recycled = &mut shelf.recycled[Class::of(item.size) as usize];
        recycled.count += 1;
        recycled.bytes += item.size;
        recycled.requested += requested;
        let track = shelf.track_of(item.address);
        shelf.tracked[track] = item;
        shelf.last = item.address;
        Some(item.address)
    }

    /// Puts a block in use onto the shelf of the stream with this handle. False where it is not
    /// known there or there is no room.
    #[inline]
    pub fn put(&self, handle: u64, address: u64) -> bool {
        let Some(shelf) = self.places[place_of(handle)].get() else {
            return false;
        };
        let mut shelf = shelf.lock();
        let track = shelf.track_of(address);
        let item = shelf.tracked[track];
        let length = shelf.length;
        // A large block comes here only where it was the last to be handed out. Then the pool, had
        // it got the block back, would hand the same one out again; any other would be lost to the
        // holes beside it, which costs memory (llama_serve: 1.016 instead of 1.009).
        let fits = item.size <= crate::core::SMALL || shelf.last == address;
        if address == 0 || item.address != address || length == LENGTH || !fits {
            return false;
        }
        shelf.tracked[track] = Item::default();
        shelf.items[length] = item;
        shelf.length += 1;
        true
    }

    /// Remembers a block that the pool handed out just now.
    pub fn track(&self, key: StreamKey, address: u64, requested: u64, size: u64) {
        let shelf = self.places[place_of(key.handle)].get_or_init(|| {
            Box::new(SpinMutex::new(Shelf {
                key,
                items: Default::default(),
                length: 0,
                recycled: Default::default(),
                tracked: Box::new([Item::default(); TRACKED]),
                last: 0,
                base: address,
            }))
        });
        let mut shelf = shelf.lock();
        if shelf.key != key {
            // Another stream's, or an older one's of the same handle. What it holds must go back
            // to the pool under its own name first.
            if shelf.length > 0 {
                return;
            }
            shelf.key = key;
            shelf.tracked.fill(Item::default());
        }
        let size = size.max(1).next_multiple_of(crate::core::BLOCK);
        let track = shelf.track_of(address);
        shelf.tracked[track] = Item {
            address,
            requested,
            size,
        };
        shelf.last = address;
    }

    /// Forgets a block in use, which is going back to the pool or must not come here any more.
    /// False where it lies on the shelf: then it is not in use.
    pub fn forget(&self, key: StreamKey, address: u64) -> bool {
        let Some(shelf) = self.places[place_of(key.handle)].get() else {
            return true;
        };
        let mut shelf = shelf.lock();
        let track = shelf.track_of(address);
        let tracked = &mut shelf.tracked[track];
        if tracked.address == address {
            *tracked = Item::default();
        }
        shelf.items[..shelf.length]
            .iter()
            .all(|item| item.address != address)
    }

    /// Gives what lies on a stream's shelf back to the pool.
    #[inline]
    pub fn clear<G: Gpu>(&self, key: StreamKey, pool: &mut Pool<G>) {
        if let Some(shelf) = self.places[place_of(key.handle)].get() {
            shelf.lock().clear(pool);
        }
    }

    /// The same for all.
    pub fn clear_all<G: Gpu>(&self, pool: &mut Pool<G>) {
        for shelf in self.places.iter().filter_map(OnceLock::get) {
            shelf.lock().clear(pool);
        }
    }
}

impl Shelf {
    #[inline]
    fn track_of(&self, address: u64) -> usize {
        let units = address.wrapping_sub(self.base) / crate::core::BLOCK;
        (spread(units) >> (64 - TRACKED.trailing_zeros())) as usize
    }

    fn clear<G: Gpu>(&mut self, pool: &mut Pool<G>) {
        for class in [Class::Small, Class::Large] {
            let recycled = std::mem::take(&mut self.recycled[class as usize]);
            if recycled.count > 0 {
                pool.tally_mut().recycled(
                    class,
                    recycled.count,
                    recycled.bytes,
                    recycled.requested,
                );
            }
        }
        for item in &self.items[..self.length] {
            // The pool handed it out and has not had it back, so it knows it.
            let _ = pool.free(item.address);
        }
        self.length = 0;
    }
}
