//! Stream caches: the last few blocks freed on each stream, for requests of exactly the same size.
//!
//! A program that allocates and frees the same sizes over and over, as most do between two kernels, is served
//! from here with one lock that no other stream takes, and without the pool. To the pool a cached block is
//! still in use: whatever needs the pool's true state, or more memory than it has, clears the stream caches
//! first. Hits are added to the pool's counters then.
//!
//! A cache that misses too often is closed, until the stream's predictor (`predictor`) finds that it would
//! hit.
//!
//! Locks: see the order at the top of the device module.

use crate::core::{Class, Gpu, Origin, Pool, StreamKey, UNORDERED};
use crate::device::stream_key::PER_THREAD;
use crate::util::hash::fibonacci;
use crate::util::lock::{CachePadded, Guard, Lock};
use crate::util::thread::thread_number;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// Stream caches of a device; further streams have none. A power of two.
const STREAM_CACHES: usize = 64;

/// Blocks in one stream cache.
const LENGTH: usize = 8;

/// Blocks in use that a stream cache tracks, so that their free needs no look-up in the pool. A power of two.
const TRACKED: usize = 512;

/// What a hit adds to a stream cache's score; a miss takes 1. A hit saves some ten times what a miss costs.
pub const HIT_SCORE: u32 = 12;

/// The score from which a predictor has the stream cache opened, and that it starts with; it is closed at 0.
pub const OPEN_SCORE: u32 = 32;
const MAX_SCORE: u32 = 2 * OPEN_SCORE;

/// Whether a freed block may go to its stream's cache; `last` is the block that the stream allocated last.
///
/// A large block only if it is that one: the pool would allocate it again next, too. Any other would be
/// missing where the pool coalesces free blocks, which costs memory (llama_serve: 1.016 instead of 1.009).
#[inline]
pub fn is_cacheable(size: u64, address: u64, last: u64) -> bool {
    size <= crate::core::SMALL || address == last
}

/// The key of a stream cache: its stream's handle and the origin of its blocks. A stream has a cache for each
/// origin, so that a block that is allocated again stays in the same counters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CacheKey(u64);

impl CacheKey {
    /// The key of a slot without an open cache.
    const NONE: CacheKey = CacheKey(u64::MAX);

    #[inline]
    pub fn of(key: StreamKey, origin: Origin) -> CacheKey {
        // Handles are addresses: the uppermost bits are 0, and they are divisible by 4.
        match (key.handle, key.id) {
            // No stream's handle, and not `NONE`.
            _ if key == UNORDERED => CacheKey(u64::MAX - 1),
            // Each thread has its own stream.
            (PER_THREAD, id) => CacheKey(id << 2 | PER_THREAD | origin as u64),
            // 1 is another name of the default stream, 0.
            (handle, _) => CacheKey(handle & !1 | origin as u64),
        }
    }

    /// The key for the allocator's own blocks on a stream, by its handle; the per-thread default stream is
    /// the calling thread's.
    #[inline]
    pub fn of_handle(handle: u64) -> CacheKey {
        let id = match handle {
            PER_THREAD => thread_number(),
            _ => 0,
        };
        CacheKey::of(StreamKey { handle, id }, Origin::Allocator)
    }

    /// The slot where probing for the key starts. Handles are addresses in the driver's memory, so many may
    /// hash to the same slot.
    #[inline]
    fn home(self) -> usize {
        (fibonacci(self.0) >> (64 - STREAM_CACHES.trailing_zeros())) as usize
    }
}

/// A block that the cache tracks: in use, or cached.
#[derive(Clone, Copy, Default)]
#[repr(align(32))]
struct Tracked {
    /// 0 if there is none.
    address: u64,
    requested: u64,
    size: u64,
    /// The cache's generation when the block was tracked, and [`CACHED`]. An entry of an earlier generation
    /// is void: blocks are freed unseen while the cache is closed.
    generation: u64,
}

/// Set in [`Tracked::generation`] while the block is cached, and so free.
const CACHED: u64 = 1 << 63;

/// Allocations of one class that were served without the pool.
#[derive(Clone, Copy, Default)]
struct ClassHits {
    count: u64,
    bytes: u64,
    requested: u64,
}

/// Allocations that were served from a cache since the pool's counters were last brought up to date.
#[derive(Default)]
pub struct CacheHits([ClassHits; 2]);

impl CacheHits {
    /// Counts an allocation of `requested` bytes that got a block of `size` bytes.
    #[inline]
    pub fn add(&mut self, size: u64, requested: u64) {
        let of = &mut self.0[Class::of(size) as usize];
        of.count += 1;
        of.bytes += size;
        of.requested += requested;
    }

    /// Adds them to the pool's counters, as allocations and frees of this origin.
    pub fn flush<G: Gpu>(&mut self, origin: Origin, pool: &mut Pool<G>) {
        let hits = std::mem::take(self);
        for class in [Class::Small, Class::Large] {
            let of = &hits.0[class as usize];
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
    /// The origin of its blocks.
    origin: Origin,
    /// Its slot among the device's stream caches.
    slot: usize,
    /// How often it has been opened.
    generation: u64,
    /// Cached blocks.
    length: usize,
    /// Hits against misses: see [`HIT_SCORE`].
    score: u32,
    /// The block that was allocated last.
    last: u64,
    /// The first block that was ever tracked. Hashes are of the distance from it, so that runs are alike
    /// wherever the system puts the addresses.
    base: u64,
    /// The requested bytes of the cached blocks.
    requested: [u64; LENGTH],
    /// Their entries in `tracked`. No entry is replaced while the cache has blocks: nothing is tracked then.
    entries: [u16; LENGTH],
    hits: CacheHits,
    tracked: Box<[Tracked; TRACKED]>,
}

/// The stream caches of one device.
pub struct StreamCaches {
    /// The key of the open cache in each slot; read without a lock, and seldom written.
    keys: CachePadded<[AtomicU64; STREAM_CACHES]>,
    /// A bit for each slot whose cache is open.
    open: AtomicU64,
    /// A bit for each home slot of a cache that is in another slot. Most streams without a cache, as those
    /// that allocate at random, need no probing so.
    displaced: AtomicU64,
    /// The farthest that such a cache is from its home slot.
    longest_probe: AtomicUsize,
    slots: [OnceLock<Box<CachePadded<Lock<StreamCache>>>>; STREAM_CACHES],
}

impl StreamCaches {
    pub fn new() -> Self {
        StreamCaches {
            keys: CachePadded([const { AtomicU64::new(CacheKey::NONE.0) }; STREAM_CACHES]),
            open: AtomicU64::new(0),
            displaced: AtomicU64::new(0),
            longest_probe: AtomicUsize::new(0),
            slots: [const { OnceLock::new() }; STREAM_CACHES],
        }
    }

    /// The stream cache with this key, locked. `None` if none is open.
    #[inline]
    pub fn of(&self, owner: CacheKey) -> Option<Guard<'_, StreamCache>> {
        let home = owner.home();
        if self.key_at(home) == owner {
            self.lock_at(home, owner)
        } else if self.displaced.load(Relaxed) & (1 << home) != 0 {
            self.probe(owner)
        } else {
            None
        }
    }

    /// Whether any stream has a cache.
    #[inline(always)]
    pub fn any_open(&self) -> bool {
        self.open.load(Relaxed) != 0
    }

    /// [`StreamCaches::of`] for a cache that is not in its home slot.
    #[cold]
    #[inline(never)]
    fn probe(&self, owner: CacheKey) -> Option<Guard<'_, StreamCache>> {
        let mut near = probe_sequence(owner).take(self.longest_probe.load(Relaxed) + 1);
        let slot = near.find(|slot| self.key_at(*slot) == owner)?;
        self.lock_at(slot, owner)
    }

    #[inline]
    fn lock_at(&self, slot: usize, owner: CacheKey) -> Option<Guard<'_, StreamCache>> {
        let cache = self.slots[slot].get()?.lock();
        // Another thread may have closed it meanwhile.
        (self.key_at(slot) == owner).then_some(cache)
    }

    #[inline]
    fn key_at(&self, slot: usize) -> CacheKey {
        CacheKey(self.keys[slot].load(Relaxed))
    }

    /// Opens a cache for a stream that has none; it is locked and empty. `None` if all slots are taken. The
    /// caller holds the device's lock, and no stream cache's.
    #[cold]
    #[inline(never)]
    pub fn open(&self, key: StreamKey, origin: Origin) -> Option<Guard<'_, StreamCache>> {
        let owner = CacheKey::of(key, origin);
        let slot = probe_sequence(owner).find(|slot| self.key_at(*slot) == CacheKey::NONE)?;
        let cache = self.slots[slot].get_or_init(|| {
            Box::new(CachePadded(Lock::new(StreamCache {
                key,
                origin,
                slot,
                generation: 0,
                length: 0,
                score: 0,
                last: 0,
                base: 0,
                requested: [0; LENGTH],
                entries: [0; LENGTH],
                hits: CacheHits::default(),
                tracked: Box::new([Tracked::default(); TRACKED]),
            })))
        });
        let mut cache = cache.lock();
        cache.generation += 1;
        (cache.key, cache.origin) = (key, origin);
        cache.score = OPEN_SCORE;
        self.keys[slot].store(owner.0, Relaxed);
        self.open.fetch_or(1 << slot, Relaxed);
        self.update_displaced();
        Some(cache)
    }

    /// Closes an empty stream cache. The caller holds the device's lock.
    #[cold]
    #[inline(never)]
    pub fn close(&self, cache: Guard<'_, StreamCache>) {
        self.keys[cache.slot].store(CacheKey::NONE.0, Relaxed);
        self.open.fetch_and(!(1 << cache.slot), Relaxed);
        self.update_displaced();
        drop(cache);
    }

    /// Brings `displaced` and `longest_probe` up to date.
    fn update_displaced(&self) {
        let (mut homes, mut longest) = (0, 0);
        for slot in 0..STREAM_CACHES {
            let owner = self.key_at(slot);
            let home = owner.home();
            if owner != CacheKey::NONE && home != slot {
                homes |= 1 << home;
                longest = longest.max((slot + STREAM_CACHES - home) % STREAM_CACHES);
            }
        }
        self.longest_probe.store(longest, Relaxed);
        self.displaced.store(homes, Relaxed);
    }

    /// Whether any stream cache is open but the one that the caller has locked.
    #[inline]
    pub fn any_other_open(&self, held: Option<&StreamCache>) -> bool {
        self.other_open(held) != 0
    }

    /// Frees the blocks of all stream caches to the pool, but for the one that the caller has locked. The
    /// caller holds the device's lock.
    pub fn clear_all<G: Gpu>(&self, held: Option<&StreamCache>, pool: &mut Pool<G>) {
        let mut open = self.other_open(held);
        while open != 0 {
            if let Some(cache) = self.slots[open.trailing_zeros() as usize].get() {
                cache.lock().clear(pool);
            }
            open &= open - 1;
        }
    }

    /// A bit for each slot with an open cache but that of `held`.
    #[inline]
    fn other_open(&self, held: Option<&StreamCache>) -> u64 {
        self.open.load(Relaxed) & !held.map_or(0, |cache| 1 << cache.slot)
    }
}

/// All slots, in the order in which a key is looked for.
fn probe_sequence(owner: CacheKey) -> impl Iterator<Item = usize> {
    (owner.home()..owner.home() + STREAM_CACHES).map(|slot| slot % STREAM_CACHES)
}

impl StreamCache {
    /// Allocates a cached block of exactly this size. `None` if there is none, or `key` is another stream
    /// that has the same handle.
    #[inline]
    pub fn take(&mut self, key: StreamKey, requested: u64) -> Option<u64> {
        let at = self.requested[..self.length]
            .iter()
            .rposition(|it| *it == requested);
        let Some(at) = at.filter(|_| self.key == key) else {
            self.score = self.score.saturating_sub(1);
            return None;
        };
        self.score = (self.score + HIT_SCORE).min(MAX_SCORE);
        let item = &mut self.tracked[usize::from(self.entries[at]) % TRACKED];
        item.generation = self.generation;
        self.length -= 1;
        self.entries[at] = self.entries[self.length];
        self.requested[at] = self.requested[self.length];
        self.hits.add(item.size, requested);
        self.last = item.address;
        Some(item.address)
    }

    /// Whether the cache has this key.
    #[inline]
    pub fn has_key(&self, owner: CacheKey) -> bool {
        CacheKey::of(self.key, self.origin) == owner
    }

    /// Whether the cache is this stream's.
    #[inline]
    pub fn is_of_stream(&self, key: StreamKey) -> bool {
        self.key == key
    }

    /// Frees a block to the cache. False if the block is not tracked as in use, may not be cached, or the
    /// cache is full.
    #[inline]
    pub fn put(&mut self, address: u64) -> bool {
        let entry = self.entry_of(address);
        let item = &mut self.tracked[entry];
        let length = self.length;
        let fits = is_cacheable(item.size, address, self.last);
        let in_use = item.address == address && item.generation == self.generation && address != 0;
        if !in_use || length >= LENGTH || !fits {
            return false;
        }
        item.generation |= CACHED;
        self.entries[length] = entry as u16;
        self.requested[length] = item.requested;
        self.length += 1;
        true
    }

    /// Tracks a block that the pool has just allocated, if the cache is its stream's. The cache is empty.
    #[inline]
    pub fn track(&mut self, key: StreamKey, address: u64, requested: u64, size: u64) {
        if self.key != key {
            return;
        }
        if self.base == 0 {
            self.base = address;
        }
        let size = size.max(1).next_multiple_of(crate::core::BLOCK);
        let entry = self.entry_of(address);
        self.tracked[entry] = Tracked {
            address,
            requested,
            size,
            generation: self.generation,
        };
        self.last = address;
    }

    /// Stops tracking a block in use, which is freed elsewhere or may not be cached any more. False if the
    /// block is cached, and so not in use.
    #[inline]
    pub fn untrack(&mut self, address: u64) -> bool {
        let entry = self.entry_of(address);
        let tracked = &mut self.tracked[entry];
        if tracked.address != address {
            return true;
        }
        if tracked.generation == self.generation | CACHED {
            return false;
        }
        tracked.address = 0;
        true
    }

    /// Whether this block, which is in use to the pool, is cached here.
    pub fn holds(&self, address: u64) -> bool {
        let item = &self.tracked[self.entry_of(address)];
        item.address == address && item.generation == self.generation | CACHED
    }

    /// Whether no block is cached here.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether the cache has missed too often.
    #[inline]
    pub fn should_close(&self) -> bool {
        self.score == 0
    }

    /// Frees the cached blocks to the pool, and adds the hits to its counters.
    pub fn clear<G: Gpu>(&mut self, pool: &mut Pool<G>) {
        self.hits.flush(self.origin, pool);
        pool.free_without_events(|pool| {
            for entry in &self.entries[..self.length] {
                let item = &mut self.tracked[usize::from(*entry)];
                // To the pool the block is in use, so it is found.
                let _ = pool.free(std::mem::take(&mut item.address));
            }
        });
        self.length = 0;
    }

    #[inline]
    fn entry_of(&self, address: u64) -> usize {
        let units = address.wrapping_sub(self.base) / crate::core::BLOCK;
        (fibonacci(units) >> (64 - TRACKED.trailing_zeros())) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(key: StreamKey) -> CacheKey {
        CacheKey::of(key, Origin::Allocator)
    }

    /// Streams, by address as a driver's are, with the same home slot.
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
            assert!(stream_caches.open(*key, Origin::Allocator).is_some());
        }
        for key in &crowd[..STREAM_CACHES] {
            let cache = stream_caches.of(of(*key)).expect("its cache");
            assert!(cache.is_of_stream(*key));
            found.push(cache.slot);
        }
        found.sort();
        found.dedup();
        assert_eq!(found.len(), STREAM_CACHES);
        // One too many has none, until another's is closed.
        let late = crowd[STREAM_CACHES];
        assert!(stream_caches.open(late, Origin::Allocator).is_none());
        let closed = stream_caches.of(of(crowd[3])).expect("its cache");
        let slot = closed.slot;
        stream_caches.close(closed);
        assert!(stream_caches.of(of(crowd[3])).is_none());
        assert_eq!(
            stream_caches
                .open(late, Origin::Allocator)
                .map(|cache| cache.slot),
            Some(slot)
        );
        assert!(
            stream_caches
                .of(of(late))
                .is_some_and(|it| it.is_of_stream(late))
        );
    }

    #[test]
    fn stream_cache_keys_tell_streams_apart() {
        let key = |handle, id| StreamKey { handle, id };
        let owners = [UNORDERED, key(0, 0), key(2, 1), key(2, 2), key(64, 5)].map(of);
        for (at, owner) in owners.iter().enumerate() {
            assert!(*owner != CacheKey::NONE);
            assert!(owners[..at].iter().all(|other| other != owner));
        }
        let others = owners[1..]
            .iter()
            .zip([key(0, 0), key(2, 1), key(2, 2), key(64, 5)]);
        for (owner, key) in others {
            let other = CacheKey::of(key, Origin::Cuda);
            assert!(other != CacheKey::NONE && other != *owner && !owners.contains(&other));
        }
        assert!(CacheKey::of_handle(1) == CacheKey::of_handle(0));
        assert!(CacheKey::of_handle(2) == of(key(2, thread_number())));
    }
}
