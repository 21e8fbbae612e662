//! Shelves: the few blocks freed last on each stream, kept aside for a request of the same size.
//!
//! A program that allocates and frees the same sizes over and over, as most do between two kernels,
//! is served from here with one lock that no other stream takes, and without the pool. To the pool a
//! block on a shelf is still handed out. So whatever looks at the pool, or wants memory that it does
//! not have, clears the shelves first; what was recycled here is then added to the pool's counters.
//!
//! A stream that seldom asks again for what it freed only loses time here. So a shelf that keeps
//! missing is closed, until the stream's [`Habit`] shows that it would serve.
//!
//! Locks are taken in one order: the device's, then a shelf's. Who has a shelf's may try the
//! device's. Shelves are opened and closed under both.

use super::lock::{Apart, Guard, Lock};
use crate::core::{Class, Gpu, Pool, StreamKey};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Streams beyond this many may have to do without a shelf.
const SHELVES: usize = 64;

/// Blocks on one shelf.
const LENGTH: usize = 8;

/// Blocks in use that a shelf remembers, so that they find their way back without the pool.
const TRACKED: usize = 512;

/// What a hit adds to a shelf's worth; a miss takes one away. A hit saves some ten times what a miss
/// costs.
const HIT: u32 = 12;

/// A closed shelf opens when it is worth this; an open one closes at 0.
const OPENS: u32 = 32;
const MOST: u32 = 2 * OPENS;

/// Frees that a habit remembers.
const RECENT: usize = 4;

/// Which place a stream has among a device's shelves. Two may have the same.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Place(usize);

impl Place {
    /// By the stream's handle.
    #[inline]
    pub fn of(handle: u64) -> Place {
        // 1 is another name of the default stream, 0.
        Place((spread(handle & !1) >> (64 - SHELVES.trailing_zeros())) as usize)
    }
}

#[inline]
fn spread(value: u64) -> u64 {
    value.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// A block in use, or on the shelf.
#[derive(Clone, Copy, Default)]
#[repr(align(32))]
struct Item {
    /// 0 where there is none.
    address: u64,
    requested: u64,
    size: u64,
    /// Which opening of the shelf it dates from, and [`LIES_HERE`]. Blocks come and go while a shelf is
    /// closed, so what dates from an earlier one means nothing.
    opening: u64,
}

/// Set where a block lies on the shelf: then it is not in use.
const LIES_HERE: u64 = 1 << 63;

/// What went over the shelf, in one class, since the pool was last told.
#[derive(Clone, Copy, Default)]
struct Recycled {
    count: u64,
    bytes: u64,
    requested: u64,
}

/// One stream's shelf.
pub struct Shelf {
    key: StreamKey,
    /// How often it has been opened.
    opening: u64,
    length: usize,
    worth: u32,
    /// The block that was handed out last.
    last: u64,
    /// The first block ever tracked. Places count from it, so that a run is the same wherever the
    /// system puts the addresses.
    base: u64,
    /// What was asked for the blocks that lie here.
    requested: [u64; LENGTH],
    /// Which of those remembered they are. None is forgotten for another while anything lies here: the
    /// pool is not asked for blocks then.
    lying: [u16; LENGTH],
    recycled: [Recycled; 2],
    tracked: Box<[Item; TRACKED]>,
}

/// The shelves of one device.
pub struct Shelves {
    places: [OnceLock<Box<Apart<Lock<Shelf>>>>; SHELVES],
    /// A bit for each place whose shelf is open.
    open: AtomicU64,
}

impl Shelves {
    pub fn new() -> Self {
        Shelves {
            places: [const { OnceLock::new() }; SHELVES],
            open: AtomicU64::new(0),
        }
    }

    /// The shelf at a place, if it is open.
    #[inline]
    pub fn open(&self, place: Place) -> Option<Guard<'_, Shelf>> {
        if !self.is_open(place) {
            return None;
        }
        let shelf = self.places[place.0].get()?.lock();
        // Another thread may have closed it since.
        self.is_open(place).then_some(shelf)
    }

    /// Opens a shelf, which is new or empty, for a stream. The caller has the device's lock.
    #[cold]
    #[inline(never)]
    pub fn begin(&self, place: Place, key: StreamKey) -> Guard<'_, Shelf> {
        let shelf = self.places[place.0].get_or_init(|| {
            Box::new(Apart(Lock::new(Shelf {
                key,
                opening: 0,
                length: 0,
                worth: 0,
                last: 0,
                base: 0,
                requested: [0; LENGTH],
                lying: [0; LENGTH],
                recycled: Default::default(),
                tracked: Box::new([Item::default(); TRACKED]),
            })))
        });
        let mut shelf = shelf.lock();
        shelf.opening += 1;
        shelf.key = key;
        shelf.worth = OPENS;
        self.open.fetch_or(1 << place.0, Relaxed);
        shelf
    }

    /// Closes a shelf that is empty. The caller has the device's lock.
    #[cold]
    #[inline(never)]
    pub fn end(&self, place: Place, shelf: Guard<'_, Shelf>) {
        self.open.fetch_and(!(1 << place.0), Relaxed);
        drop(shelf);
    }

    #[inline]
    fn is_open(&self, place: Place) -> bool {
        self.open.load(Relaxed) & (1 << place.0) != 0
    }

    /// Whether the shelf at another place is open.
    #[inline]
    pub fn any_besides(&self, place: Place) -> bool {
        self.open.load(Relaxed) & !(1 << place.0) != 0
    }

    /// Gives what lies on all shelves but one, whose lock the caller may have, back to the pool.
    pub fn clear_others<G: Gpu>(&self, place: Place, pool: &mut Pool<G>) {
        self.clear_these(self.open.load(Relaxed) & !(1 << place.0), pool);
    }

    /// The same for all.
    pub fn clear_all<G: Gpu>(&self, pool: &mut Pool<G>) {
        self.clear_these(self.open.load(Relaxed), pool);
    }

    fn clear_these<G: Gpu>(&self, mut places: u64, pool: &mut Pool<G>) {
        while places != 0 {
            if let Some(mut shelf) = self.open(Place(places.trailing_zeros() as usize)) {
                shelf.clear(pool);
            }
            places &= places - 1;
        }
    }
}

impl Shelf {
    /// A block of exactly this size that was freed on the stream.
    #[inline]
    pub fn take(&mut self, key: StreamKey, requested: u64) -> Option<u64> {
        let at = self.requested[..self.length]
            .iter()
            .rposition(|it| *it == requested);
        let Some(at) = at.filter(|_| self.key == key) else {
            self.worth = self.worth.saturating_sub(1);
            return None;
        };
        self.worth = (self.worth + HIT).min(MOST);
        let item = &mut self.tracked[usize::from(self.lying[at]) % TRACKED];
        item.opening = self.opening;
        self.length -= 1;
        self.lying[at] = self.lying[self.length];
        self.requested[at] = self.requested[self.length];
        let recycled = &mut self.recycled[Class::of(item.size) as usize];
        recycled.count += 1;
        recycled.bytes += item.size;
        recycled.requested += requested;
        self.last = item.address;
        Some(item.address)
    }

    /// Whether it is this stream's.
    #[inline]
    pub fn is_of(&self, key: StreamKey) -> bool {
        self.key == key
    }

    /// Puts a block in use onto the shelf. False where it is not known here or there is no room.
    #[inline]
    pub fn put(&mut self, address: u64) -> bool {
        let track = self.track_of(address);
        let item = &mut self.tracked[track];
        let length = self.length;
        // A large block comes here only where it was the last to be handed out. Then the pool, had
        // it got the block back, would hand the same one out again; any other would be lost to the
        // holes beside it, which costs memory (llama_serve: 1.016 instead of 1.009).
        let fits = item.size <= crate::core::SMALL || self.last == address;
        let known = item.address == address && item.opening == self.opening && address != 0;
        if !known || length >= LENGTH || !fits {
            return false;
        }
        item.opening |= LIES_HERE;
        self.lying[length] = track as u16;
        self.requested[length] = item.requested;
        self.length += 1;
        true
    }

    /// Remembers a block that the pool handed out just now, if it is the shelf's stream's. Nothing
    /// lies on the shelf.
    #[inline]
    pub fn track(&mut self, key: StreamKey, address: u64, requested: u64, size: u64) {
        if self.key != key {
            return;
        }
        if self.base == 0 {
            self.base = address;
        }
        let size = size.max(1).next_multiple_of(crate::core::BLOCK);
        let track = self.track_of(address);
        self.tracked[track] = Item {
            address,
            requested,
            size,
            opening: self.opening,
        };
        self.last = address;
    }

    /// Forgets a block in use, which is going back to the pool or must not come here any more.
    /// False where it lies on the shelf: then it is not in use.
    #[inline]
    pub fn forget(&mut self, address: u64) -> bool {
        let track = self.track_of(address);
        let tracked = &mut self.tracked[track];
        if tracked.address != address {
            return true;
        }
        if tracked.opening == self.opening | LIES_HERE {
            return false;
        }
        tracked.address = 0;
        true
    }

    /// Whether nothing lies here.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether it has missed too often.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.worth == 0
    }

    /// Gives what lies here back to the pool.
    pub fn clear<G: Gpu>(&mut self, pool: &mut Pool<G>) {
        for class in [Class::Small, Class::Large] {
            if self.recycled[class as usize].count > 0 {
                let recycled = std::mem::take(&mut self.recycled[class as usize]);
                pool.tally_mut().recycled(
                    class,
                    recycled.count,
                    recycled.bytes,
                    recycled.requested,
                );
            }
        }
        for track in &self.lying[..self.length] {
            let item = &mut self.tracked[usize::from(*track)];
            // The pool handed it out and has not had it back, so it knows it.
            let _ = pool.free(std::mem::take(&mut item.address));
        }
        self.length = 0;
    }

    #[inline]
    fn track_of(&self, address: u64) -> usize {
        let units = address.wrapping_sub(self.base) / crate::core::BLOCK;
        (spread(units) >> (64 - TRACKED.trailing_zeros())) as usize
    }
}

/// What a closed shelf would be worth.
#[derive(Clone, Copy)]
pub struct Habit {
    /// What was asked for the blocks freed last.
    recent: [u64; RECENT],
    next: usize,
    worth: u32,
}

/// The habits at every place of a device, under its lock.
pub struct Habits([Habit; SHELVES]);

impl Habits {
    pub fn new() -> Self {
        // A stream that comes for the first time gets a shelf.
        let new = Habit {
            recent: [0; RECENT],
            next: 0,
            worth: OPENS + 1,
        };
        Habits([new; SHELVES])
    }

    #[inline]
    pub fn at(&mut self, place: Place) -> &mut Habit {
        &mut self.0[place.0]
    }
}

impl Habit {
    /// A block was freed.
    #[inline]
    pub fn freed(&mut self, requested: u64) {
        self.recent[self.next] = requested;
        self.next = (self.next + 1) % RECENT;
    }

    /// A block was asked for. True when it is time to open the shelf.
    #[inline]
    pub fn asked(&mut self, requested: u64) -> bool {
        match self.recent.iter().position(|it| *it == requested) {
            Some(at) => {
                self.recent[at] = 0;
                self.worth += HIT;
            }
            None => self.worth = self.worth.saturating_sub(1),
        }
        let opens = self.worth >= OPENS;
        if opens {
            self.worth = 0;
        }
        opens
    }
}
