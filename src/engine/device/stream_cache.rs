//! Stream caches: the last few blocks freed on each stream, for requests of exactly the same size.
//!
//! A program that allocates and frees the same sizes over and over, as most do between two kernels, is served from
//! here with one lock that no other stream takes, and without the pool. To the pool a cached block is still in use:
//! all that needs the pool's true state, or more memory than it has, clears the stream caches first. Hits are added
//! to the pool's counters then.
//!
//! A cache that misses too often is closed, until the stream's [`Predictor`] shows that it would hit.
//!
//! Locks: see the order at the top of the device module.

use crate::core::{Class, Gpu, Origin, Pool, StreamKey, UNORDERED};
use crate::device::stream_key::PER_THREAD;
use crate::util::hash::fibonacci;
use crate::util::lock::{CachePadded, Guard, Lock};
use crate::util::thread::thread_number;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Stream caches of a device; further streams have none.
const STREAM_CACHES: usize = 64;

/// Blocks in one stream cache.
const LENGTH: usize = 8;

/// Blocks in use that a stream cache tracks, so that their free needs no look-up in the pool.
const TRACKED: usize = 512;

/// What a hit adds to a stream cache's worth; a miss takes one away. A hit saves some ten times what a miss
/// costs.
const HIT: u32 = 12;

/// A closed stream cache opens when it is worth this; an open one closes at 0.
const OPENS: u32 = 32;
const MOST: u32 = 2 * OPENS;

/// Blocks that a predictor remembers.
const RECENT: usize = 4;

/// A power of two.
const PREDICTORS: usize = 64;

/// Where no request for so long could have been met, so many are not looked at, twice as many each time, up
/// to the most: a stream whose requests are at random goes on that way, and to look at one in nine takes a
/// thirtieth of the time of a pair. A stream that takes turns between such requests and a loop may be asleep
/// when the loop begins, and so goes without its stream cache for so long.
const AWAKE: u32 = 32;
const ASLEEP: u32 = 256;
const MOST_ASLEEP: u32 = 1 << 11;

/// Whether a freed block of this size is one for its stream's stream cache; `last` is the block that the stream
/// was handed last.
///
/// A large block only where it was the last to be handed out. Then the pool, had it got the block back,
/// would hand the same one out again; any other would be lost to the free blocks beside it, which costs memory
/// (llama_serve: 1.016 instead of 1.009).
#[inline]
fn is_cacheable(size: u64, address: u64, last: u64) -> bool {
    size <= crate::core::SMALL || address == last
}

/// What tells one stream's stream cache from others', as far as a handle can. A stream has one for each origin of
/// its blocks, so that a block that is handed out again stays in the same figures.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CacheKey(u64);

impl CacheKey {
    /// The key of a place without a cache.
    const NOBODY: CacheKey = CacheKey(u64::MAX);

    #[inline]
    pub fn of(key: StreamKey, origin: Origin) -> CacheKey {
        // Handles are addresses: the uppermost bits are 0, and they are divisible by 4.
        match (key.handle, key.id) {
            // No handle of a stream, and not `NOBODY`.
            _ if key == UNORDERED => CacheKey(u64::MAX - 1),
            // Every thread has its own.
            (PER_THREAD, id) => CacheKey(id << 2 | PER_THREAD | origin as u64),
            // 1 is another name of the default stream, 0.
            (handle, _) => CacheKey(handle & !1 | origin as u64),
        }
    }

    /// Of the allocator's own blocks on a stream by its handle; for the per-thread default stream on the
    /// calling thread's.
    #[inline]
    pub fn of_handle(handle: u64) -> CacheKey {
        let id = match handle {
            PER_THREAD => thread_number(),
            _ => 0,
        };
        CacheKey::of(StreamKey { handle, id }, Origin::Allocator)
    }

    /// The place that its handle gives it. Handles are addresses in the driver's memory, and many streams'
    /// may give the same one; then it has the first after it that is nobody's.
    #[inline]
    fn home(self) -> usize {
        (fibonacci(self.0) >> (64 - STREAM_CACHES.trailing_zeros())) as usize
    }
}

/// A block in use, or on the stream cache.
#[derive(Clone, Copy, Default)]
#[repr(align(32))]
struct Item {
    /// 0 where there is none.
    address: u64,
    requested: u64,
    size: u64,
    /// Which opening of the stream cache it dates from, and [`CACHED`]. Blocks come and go while a stream cache is
    /// closed, so what dates from an earlier one means nothing.
    opening: u64,
}

/// Set in [`Item::opening`] while the block is cached, and so free.
const CACHED: u64 = 1 << 63;

/// What was given back and handed out again without the pool, in one class, since it was last told.
#[derive(Clone, Copy, Default)]
struct OfClass {
    count: u64,
    bytes: u64,
    requested: u64,
}

/// The same in both classes.
#[derive(Default)]
pub struct Recycled([OfClass; 2]);

impl Recycled {
    /// Counts one more block of `size` bytes.
    #[inline]
    pub fn add(&mut self, size: u64, requested: u64) {
        let of = &mut self.0[Class::of(size) as usize];
        of.count += 1;
        of.bytes += size;
        of.requested += requested;
    }

    /// Tells the pool, of which all of them are by this origin.
    pub fn tell<G: Gpu>(&mut self, origin: Origin, pool: &mut Pool<G>) {
        let recycled = std::mem::take(self);
        for class in [Class::Small, Class::Large] {
            let of = &recycled.0[class as usize];
            if of.count > 0 {
                let counters = pool.counters_mut();
                counters.recycled(origin, class, of.count, of.bytes, of.requested);
            }
        }
    }
}

/// One stream's stream cache.
pub struct StreamCache {
    key: StreamKey,
    /// Whose blocks of that stream.
    origin: Origin,
    /// Its place among a device's stream caches.
    place: usize,
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
    recycled: Recycled,
    tracked: Box<[Item; TRACKED]>,
}

/// The stream caches of one device.
pub struct StreamCaches {
    /// Whose stream cache is open at each place; read without a lock by all, and seldom written.
    owners: CachePadded<[AtomicU64; STREAM_CACHES]>,
    /// A bit for each place whose stream cache is open.
    open: AtomicU64,
    /// A bit for each place whose own streams, or some of them, have their stream caches elsewhere. So a stream
    /// without a stream cache, as most are that allocate at random, need not be looked for.
    away: AtomicU64,
    /// How many places after their home those are at most.
    farthest: AtomicUsize,
    places: [OnceLock<Box<CachePadded<Lock<StreamCache>>>>; STREAM_CACHES],
}

impl StreamCaches {
    pub fn new() -> Self {
        StreamCaches {
            owners: CachePadded([const { AtomicU64::new(CacheKey::NOBODY.0) }; STREAM_CACHES]),
            open: AtomicU64::new(0),
            away: AtomicU64::new(0),
            farthest: AtomicUsize::new(0),
            places: [const { OnceLock::new() }; STREAM_CACHES],
        }
    }

    /// A stream's stream cache, if it has one.
    #[inline]
    pub fn of(&self, owner: CacheKey) -> Option<Guard<'_, StreamCache>> {
        let home = owner.home();
        if self.owner_of(home) == owner {
            self.open(home, owner)
        } else if self.away.load(Relaxed) & (1 << home) != 0 {
            self.of_crowded(owner)
        } else {
            None
        }
    }

    /// Whether any stream has one: while none has, there is none to look for.
    #[inline(always)]
    pub fn any_open(&self) -> bool {
        self.open.load(Relaxed) != 0
    }

    #[cold]
    #[inline(never)]
    fn of_crowded(&self, owner: CacheKey) -> Option<Guard<'_, StreamCache>> {
        let mut near = places(owner).take(self.farthest.load(Relaxed) + 1);
        let place = near.find(|place| self.owner_of(*place) == owner)?;
        self.open(place, owner)
    }

    #[inline]
    fn open(&self, place: usize, owner: CacheKey) -> Option<Guard<'_, StreamCache>> {
        let cache = self.places[place].get()?.lock();
        // Another thread may have closed it since.
        (self.owner_of(place) == owner).then_some(cache)
    }

    #[inline]
    fn owner_of(&self, place: usize) -> CacheKey {
        CacheKey(self.owners[place].load(Relaxed))
    }

    /// Opens a stream cache, which is new or empty, for a stream that has none. `None` where there is no place
    /// for it. The caller has the device's lock, and no stream cache's.
    #[cold]
    #[inline(never)]
    pub fn begin(&self, key: StreamKey, origin: Origin) -> Option<Guard<'_, StreamCache>> {
        let owner = CacheKey::of(key, origin);
        let place = places(owner).find(|place| self.owner_of(*place) == CacheKey::NOBODY)?;
        let cache = self.places[place].get_or_init(|| {
            Box::new(CachePadded(Lock::new(StreamCache {
                key,
                origin,
                place,
                opening: 0,
                length: 0,
                worth: 0,
                last: 0,
                base: 0,
                requested: [0; LENGTH],
                lying: [0; LENGTH],
                recycled: Recycled::default(),
                tracked: Box::new([Item::default(); TRACKED]),
            })))
        });
        let mut cache = cache.lock();
        cache.opening += 1;
        (cache.key, cache.origin) = (key, origin);
        cache.worth = OPENS;
        self.owners[place].store(owner.0, Relaxed);
        self.open.fetch_or(1 << place, Relaxed);
        self.find_those_away();
        Some(cache)
    }

    /// Closes a stream cache that is empty. The caller has the device's lock.
    #[cold]
    #[inline(never)]
    pub fn end(&self, cache: Guard<'_, StreamCache>) {
        self.owners[cache.place].store(CacheKey::NOBODY.0, Relaxed);
        self.open.fetch_and(!(1 << cache.place), Relaxed);
        self.find_those_away();
        drop(cache);
    }

    fn find_those_away(&self) {
        let (mut homes, mut farthest) = (0, 0);
        for place in 0..STREAM_CACHES {
            let owner = self.owner_of(place);
            let home = owner.home();
            if owner != CacheKey::NOBODY && home != place {
                homes |= 1 << home;
                farthest = farthest.max((place + STREAM_CACHES - home) % STREAM_CACHES);
            }
        }
        self.farthest.store(farthest, Relaxed);
        self.away.store(homes, Relaxed);
    }

    /// Whether any is open besides the one that the caller holds.
    #[inline]
    pub fn any_besides(&self, held: Option<&StreamCache>) -> bool {
        self.besides(held) != 0
    }

    /// Gives what lies on all of them, but for the one that the caller holds, back to the pool. The
    /// caller has the device's lock.
    pub fn clear_all<G: Gpu>(&self, held: Option<&StreamCache>, pool: &mut Pool<G>) {
        let mut open = self.besides(held);
        while open != 0 {
            if let Some(cache) = self.places[open.trailing_zeros() as usize].get() {
                cache.lock().clear(pool);
            }
            open &= open - 1;
        }
    }

    #[inline]
    fn besides(&self, held: Option<&StreamCache>) -> u64 {
        self.open.load(Relaxed) & !held.map_or(0, |cache| 1 << cache.place)
    }
}

/// All places, in the order in which a stream's is looked for.
fn places(owner: CacheKey) -> impl Iterator<Item = usize> {
    (owner.home()..owner.home() + STREAM_CACHES).map(|place| place % STREAM_CACHES)
}

impl StreamCache {
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
        self.recycled.add(item.size, requested);
        self.last = item.address;
        Some(item.address)
    }

    /// Whether it is the stream cache of this owner.
    #[inline]
    pub fn belongs_to(&self, owner: CacheKey) -> bool {
        CacheKey::of(self.key, self.origin) == owner
    }

    /// Whether it is this stream's.
    #[inline]
    pub fn is_of(&self, key: StreamKey) -> bool {
        self.key == key
    }

    /// Puts a block in use onto the stream cache. False where it is not known here or there is no room.
    #[inline]
    pub fn put(&mut self, address: u64) -> bool {
        let track = self.track_of(address);
        let item = &mut self.tracked[track];
        let length = self.length;
        let fits = is_cacheable(item.size, address, self.last);
        let known = item.address == address && item.opening == self.opening && address != 0;
        if !known || length >= LENGTH || !fits {
            return false;
        }
        item.opening |= CACHED;
        self.lying[length] = track as u16;
        self.requested[length] = item.requested;
        self.length += 1;
        true
    }

    /// Remembers a block that the pool handed out just now, if it is the stream cache's stream's. Nothing
    /// lies on the stream cache.
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
    /// False where it lies on the stream cache: then it is not in use.
    #[inline]
    pub fn forget(&mut self, address: u64) -> bool {
        let track = self.track_of(address);
        let tracked = &mut self.tracked[track];
        if tracked.address != address {
            return true;
        }
        if tracked.opening == self.opening | CACHED {
            return false;
        }
        tracked.address = 0;
        true
    }

    /// Whether this block, which is in use to the pool, lies here.
    pub fn has(&self, address: u64) -> bool {
        let item = &self.tracked[self.track_of(address)];
        item.address == address && item.opening == self.opening | CACHED
    }

    /// Whether nothing lies here.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether it has missed too often.
    #[inline]
    pub fn misses_too_often(&self) -> bool {
        self.worth == 0
    }

    /// Gives what lies here back to the pool.
    pub fn clear<G: Gpu>(&mut self, pool: &mut Pool<G>) {
        self.recycled.tell(self.origin, pool);
        pool.free_without_events(|pool| {
            for track in &self.lying[..self.length] {
                let item = &mut self.tracked[usize::from(*track)];
                // The pool handed it out and has not had it back, so it knows it.
                let _ = pool.free(std::mem::take(&mut item.address));
            }
        });
        self.length = 0;
    }

    #[inline]
    fn track_of(&self, address: u64) -> usize {
        let units = address.wrapping_sub(self.base) / crate::core::BLOCK;
        (fibonacci(units) >> (64 - TRACKED.trailing_zeros())) as usize
    }
}

/// What a closed stream cache would be worth: while it is awake it is told what an open one is, and does what that
/// does, but for the blocks themselves.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Predictor {
    /// What was asked for the blocks that would lie there.
    lying: [u64; RECENT],
    length: usize,
    /// The block that was handed out last.
    last: u64,
    worth: u32,
    /// So many more requests in vain are looked at, and then so many not at all.
    awake: u32,
    asleep: u32,
    /// How long it sleeps next time.
    sleep: u32,
}

/// The predictors of a device's streams by their slots, under its lock; where there are many, some share theirs.
pub struct Predictors([Predictor; PREDICTORS]);

impl Predictors {
    pub fn new() -> Self {
        // A stream that comes for the first time gets a stream cache.
        let new = Predictor {
            lying: [0; RECENT],
            length: 0,
            last: 0,
            worth: OPENS + 1,
            awake: AWAKE,
            asleep: 0,
            sleep: ASLEEP,
        };
        Predictors([new; PREDICTORS])
    }

    #[inline]
    pub fn of(&mut self, slot: u16) -> &mut Predictor {
        &mut self.0[slot as usize % PREDICTORS]
    }
}

impl Predictor {
    /// A block was freed.
    #[inline]
    pub fn freed(&mut self, address: u64, requested: u64) {
        if self.asleep == 0 && self.length < RECENT && is_cacheable(requested, address, self.last) {
            self.lying[self.length] = requested;
            self.length += 1;
        }
    }

    /// A block was handed out. True when it is time to open the stream cache.
    #[inline]
    pub fn asked(&mut self, address: u64, requested: u64) -> bool {
        if self.asleep > 0 {
            self.asleep -= 1;
            return false;
        }
        self.look(address, requested)
    }

    #[inline(never)]
    fn look(&mut self, address: u64, requested: u64) -> bool {
        self.last = address;
        match self.lying[..self.length]
            .iter()
            .rposition(|it| *it == requested)
        {
            Some(at) => {
                self.length -= 1;
                self.lying[at] = self.lying[self.length];
                self.worth += HIT;
                (self.awake, self.sleep) = (AWAKE, ASLEEP);
            }
            // The stream cache would be cleared.
            None => {
                self.length = 0;
                self.worth = self.worth.saturating_sub(1);
                self.awake -= 1;
                if self.awake == 0 {
                    (self.awake, self.asleep) = (AWAKE, self.sleep);
                    self.sleep = (2 * self.sleep).min(MOST_ASLEEP);
                }
            }
        }
        let opens = self.worth >= OPENS;
        if opens {
            self.worth = 0;
        }
        opens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::SMALL;

    /// Whether a stream cache opens for a stream that allocates and frees in this way, over and over: each
    /// turn takes blocks of these sizes and frees all of them, the last one first.
    fn opens_for(sizes: &[u64]) -> bool {
        let mut predictors = Predictors::new();
        let predictor = predictors.of(1);
        // What a new stream is given beforehand.
        while !predictor.asked(0, u64::MAX) {}
        (0..1000).any(|_| {
            let blocks: Vec<(u64, u64)> = (1..).zip(sizes.iter().copied()).collect();
            let opens = blocks
                .iter()
                .any(|(block, size)| predictor.asked(*block, *size));
            for (block, size) in blocks.iter().rev() {
                predictor.freed(*block, *size);
            }
            opens
        })
    }

    #[test]
    fn a_stream_cache_opens_where_it_would_hit() {
        assert!(opens_for(&[512]));
        assert!(opens_for(&[2 * SMALL]));
        assert!(opens_for(&[512, 512, 1024]));
        // There is no room for the one that is wanted next, and the stream cache would be cleared.
        let many: Vec<u64> = (1..=12).map(|it| it * 512).collect();
        assert!(!opens_for(&many));
        // Only the last of them would lie there.
        assert!(!opens_for(&[2 * SMALL, 3 * SMALL, 4 * SMALL]));
    }

    #[test]
    fn a_stream_cache_opens_soon_after_requests_repeat() {
        let mut predictors = Predictors::new();
        let predictor = predictors.of(1);
        for vain in [1, 100, 10_000, 1_000_000] {
            for size in 1..=vain {
                predictor.asked(size, size);
            }
            // Then it asks again for what it has just freed.
            let opens = (0..MOST_ASLEEP + AWAKE + OPENS).any(|_| {
                let opens = predictor.asked(1, 512);
                predictor.freed(1, 512);
                opens
            });
            assert!(opens, "after {vain}");
        }
    }

    fn of(key: StreamKey) -> CacheKey {
        CacheKey::of(key, Origin::Allocator)
    }

    /// Streams, by address as a driver's are, that would all like the same place.
    fn crowd() -> impl Iterator<Item = StreamKey> {
        let home = of(UNORDERED).home();
        let keys = (1..).map(|id| StreamKey {
            handle: id * 64,
            id,
        });
        keys.filter(move |key| of(*key).home() == home)
    }

    #[test]
    fn stream_caches_that_collide_have_a_place_each() {
        let stream_caches = StreamCaches::new();
        let crowd: Vec<StreamKey> = crowd().take(STREAM_CACHES + 1).collect();
        let mut found: Vec<usize> = Vec::new();
        for key in &crowd[..STREAM_CACHES] {
            assert!(stream_caches.of(of(*key)).is_none());
            assert!(stream_caches.begin(*key, Origin::Allocator).is_some());
        }
        for key in &crowd[..STREAM_CACHES] {
            let cache = stream_caches.of(of(*key)).expect("its cache");
            assert!(cache.is_of(*key));
            found.push(cache.place);
        }
        found.sort();
        found.dedup();
        assert_eq!(found.len(), STREAM_CACHES);
        // One too many has none, until another's is closed.
        let late = crowd[STREAM_CACHES];
        assert!(stream_caches.begin(late, Origin::Allocator).is_none());
        let closed = stream_caches.of(of(crowd[3])).expect("its cache");
        let place = closed.place;
        stream_caches.end(closed);
        assert!(stream_caches.of(of(crowd[3])).is_none());
        assert_eq!(
            stream_caches
                .begin(late, Origin::Allocator)
                .map(|cache| cache.place),
            Some(place)
        );
        assert!(stream_caches.of(of(late)).is_some_and(|it| it.is_of(late)));
    }

    #[test]
    fn stream_cache_keys_tell_streams_apart() {
        let key = |handle, id| StreamKey { handle, id };
        let owners = [UNORDERED, key(0, 0), key(2, 1), key(2, 2), key(64, 5)].map(of);
        for (at, owner) in owners.iter().enumerate() {
            assert!(*owner != CacheKey::NOBODY);
            assert!(owners[..at].iter().all(|other| other != owner));
        }
        let others = owners[1..]
            .iter()
            .zip([key(0, 0), key(2, 1), key(2, 2), key(64, 5)]);
        for (owner, key) in others {
            let other = CacheKey::of(key, Origin::Cuda);
            assert!(other != CacheKey::NOBODY && other != *owner && !owners.contains(&other));
        }
        assert!(CacheKey::of_handle(1) == CacheKey::of_handle(0));
        assert!(CacheKey::of_handle(2) == of(key(2, thread_number())));
    }
}
