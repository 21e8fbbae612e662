//! Free lists by stream, and one per arena for blocks whose work has completed.
//!
//! A free block is in the list of the stream that freed it: that stream may have it at once, as its later
//! work runs after its earlier work. Each arena has one more list, *idle*: free blocks whose work is known to
//! have completed (`epoch`), which any stream may have. Another stream's free blocks can be had behind a wait
//! (`cross_stream`).

use super::bins::Bins;
use super::block::{Block, BlockId, Blocks, NONE, Nodes};
use super::ids::{ArenaId, StreamKey};
use crate::util::zeroed::{Zeroable, Zeroed};
use std::collections::HashMap;

/// A stream's free blocks in one arena, or the arena's idle ones.
pub struct FreeList {
    pub key: StreamKey,
    pub arena: ArenaId,
    /// The arena's idle list; this one, if it is that itself.
    pub idle: u16,
    pub bins: Bins,
    /// The epoch of the stream's last free here whose range is not recorded; see `epoch`.
    pub freed: u64,
    /// Purgeable blocks, if there ever were any; see `purge`.
    pub purgeable: Option<Box<Bins>>,
    /// Live and pending blocks, which will come back to the list.
    pub live: u64,
    /// Whether free blocks are also linked in the order of their frees, `oldest` first.
    pub ordered: bool,
    oldest: BlockId,
    newest: BlockId,
    /// The arena is gone.
    dead: bool,
}

impl FreeList {
    /// Makes it the empty list of another stream.
    fn reset(&mut self, key: StreamKey, arena: ArenaId, idle: u16) {
        (self.key, self.arena, self.idle) = (key, arena, idle);
        (self.freed, self.live, self.dead) = (0, 0, false);
        self.purgeable = None;
        (self.ordered, self.oldest, self.newest) = (false, NONE, NONE);
    }

    /// Whether it is this arena's, which is not gone.
    pub fn is_of(&self, arena: ArenaId) -> bool {
        self.arena == arena && !self.dead
    }

    /// Whether its arena is gone.
    pub fn is_dead(&self) -> bool {
        self.dead
    }

    /// Whether it has purgeable blocks.
    pub fn has_purgeable(&self) -> bool {
        self.purgeable.as_ref().is_some_and(|bins| !bins.is_empty())
    }

    /// Free and purgeable blocks of at least `size` bytes.
    pub fn all_free<'a>(
        &'a self,
        blocks: &'a Blocks,
        size: u64,
    ) -> impl Iterator<Item = &'a Block> + 'a {
        let bins = [Some(&self.bins), self.purgeable.as_deref()];
        let free_blocks = bins.into_iter().flatten();
        free_blocks.flat_map(move |bins| bins.ascending(blocks, size).map(|id| &blocks[id]))
    }

    /// Whether it has free or purgeable blocks.
    pub fn has_free(&self) -> bool {
        !self.bins.is_empty() || self.has_purgeable()
    }

    /// Whether it has any blocks, or will have when live ones are freed.
    fn is_in_use(&self) -> bool {
        self.live > 0 || !self.bins.is_empty() || self.has_purgeable()
    }

    /// Inserts a free block as the newest.
    #[inline(always)]
    pub fn insert(&mut self, nodes: &mut Nodes, id: BlockId) {
        if self.ordered {
            self.link(nodes, id);
        }
        self.bins.insert(nodes, id);
    }

    #[inline(always)]
    pub fn remove(&mut self, nodes: &mut Nodes, id: BlockId) {
        if self.ordered {
            self.unlink(nodes, id);
        }
        self.bins.remove(nodes, id);
    }

    fn link(&mut self, nodes: &mut Nodes, id: BlockId) {
        let node = &mut nodes[id];
        (node.older, node.newer) = (self.newest, NONE);
        match self.newest {
            NONE => self.oldest = id,
            newest => nodes[newest].newer = id,
        }
        self.newest = id;
    }

    fn unlink(&mut self, nodes: &mut Nodes, id: BlockId) {
        let Block { older, newer, .. } = nodes[id];
        match older {
            NONE => self.oldest = newer,
            _ => nodes[older].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            _ => nodes[newer].older = older,
        }
    }

    /// Keeps the order of frees from now on. Blocks that are there already are sorted by epoch.
    pub fn start_order(&mut self, blocks: &mut Blocks) {
        if !self.ordered {
            self.ordered = true;
            let mut free_blocks: Vec<BlockId> = self.bins.ascending(blocks, super::BLOCK).collect();
            free_blocks.sort_unstable_by_key(|id| blocks[*id].detail);
            free_blocks.into_iter().for_each(|id| self.link(blocks, id));
        }
    }

    /// Stops keeping the order if no free block is left.
    pub fn drop_order(&mut self) {
        self.ordered &= self.oldest != NONE;
    }

    pub fn oldest(&self) -> Option<BlockId> {
        (self.oldest != NONE).then_some(self.oldest)
    }
}

/// How many streams' lists are found without a search.
const RECENT: usize = 16;

/// A stream, an arena, and the list found for them.
#[derive(Clone, Copy)]
struct Recent {
    key: StreamKey,
    arena: ArenaId,
    list: u16,
}

impl Recent {
    /// No entry: the idle list is never looked up by its key.
    const NONE: Recent = Recent {
        key: IDLE,
        arena: 0,
        list: 0,
    };
}

/// The key of idle lists.
const IDLE: StreamKey = StreamKey {
    handle: u64::MAX,
    id: u64::MAX,
};

#[inline]
fn recent_of(key: StreamKey) -> usize {
    (key.handle.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - RECENT.trailing_zeros())) as usize
}

/// As many free lists as a `u16` can name.
struct ListArray([FreeList; 1 << 16]);

// SAFETY: a free list of zeros is one: of numbers, `false`, `NONE` for every block and no box. `FreeLists`
// drops what comes to be in it.
#[allow(unsafe_code)]
unsafe impl Zeroable for ListArray {}

/// Every free list.
pub struct FreeLists {
    /// All that can be named, so that no index is checked; the system commits what is used.
    array: Zeroed<ListArray>,
    /// How many lists were ever used.
    used: usize,
    /// The lists found last, by a hash of the stream's handle.
    recent: [Recent; RECENT],
    /// Every list in use, idle ones too.
    by_key: HashMap<(ArenaId, StreamKey), u16>,
    /// How many lists in use are not idle ones.
    streams: usize,
    /// The lists of each arena, ascending.
    of_arena: Vec<Vec<u16>>,
    /// Lists that were empty at the last scan, and those of arenas that are gone.
    vacant: Vec<u16>,
    /// The next scan is when `used` is this: seldom, and yet no more than twice as many lists are used as
    /// were in use at once.
    scan_at: usize,
}

impl Drop for FreeLists {
    fn drop(&mut self) {
        self.iter_mut().for_each(|(_, list)| list.purgeable = None);
    }
}

impl FreeLists {
    /// `None` where the process may not have the addresses for them.
    pub fn new() -> Option<Self> {
        Some(FreeLists {
            array: Zeroed::new()?,
            used: 0,
            recent: [Recent::NONE; RECENT],
            by_key: HashMap::new(),
            streams: 0,
            of_arena: Vec::new(),
            vacant: Vec::new(),
            scan_at: 0,
        })
    }

    /// Adds the idle list of a new arena. `None` when there are 65,535 lists in use.
    pub fn add_idle(&mut self, arena: ArenaId) -> Option<u16> {
        self.add(IDLE, arena)
    }

    /// The arena is gone: its lists are empty and can be used again.
    pub fn remove_arena(&mut self, arena: ArenaId) {
        let lists = self.of_arena.get_mut(arena as usize);
        for at in lists.map(std::mem::take).unwrap_or_default() {
            let list = self.get_mut(at);
            list.dead = true;
            let (name, is_stream) = ((arena, list.key), list.idle != at);
            self.by_key.remove(&name);
            self.streams -= usize::from(is_stream);
            self.vacant.push(at);
        }
        self.recent = [Recent::NONE; RECENT];
    }

    /// The list of a stream in an arena, a new one for a new stream. `None` when there are 65,535 in use.
    #[inline(always)]
    pub fn find_or_add(&mut self, key: StreamKey, arena: ArenaId) -> Option<u16> {
        let recent = &self.recent[recent_of(key)];
        if recent.key == key && recent.arena == arena {
            return Some(recent.list);
        }
        self.find_or_add_slow(key, arena)
    }

    #[cold]
    #[inline(never)]
    fn find_or_add_slow(&mut self, key: StreamKey, arena: ArenaId) -> Option<u16> {
        let list = match self.by_key.get(&(arena, key)) {
            Some(list) => *list,
            None => self.add(key, arena)?,
        };
        self.recent[recent_of(key)] = Recent { key, arena, list };
        Some(list)
    }

    /// Adds a list, an empty one used again if one is known.
    fn add(&mut self, key: StreamKey, arena: ArenaId) -> Option<u16> {
        let idle = self.by_key.get(&(arena, IDLE)).copied();
        let list = match self.pop_vacant() {
            Some(list) => {
                self.recent = [Recent::NONE; RECENT];
                let old = self.get(list);
                // A list of an arena that is gone was unlisted with the arena.
                if !old.dead {
                    let name = (old.arena, old.key);
                    self.streams -= 1;
                    self.by_key.remove(&name);
                    self.of_arena[name.0 as usize].retain(|it| *it != list);
                }
                list
            }
            None => {
                let list = u16::try_from(self.used).ok().filter(|it| *it < u16::MAX)?;
                self.used += 1;
                list
            }
        };
        self.streams += usize::from(idle.is_some());
        self.get_mut(list).reset(key, arena, idle.unwrap_or(list));
        self.by_key.insert((arena, key), list);
        let arenas = self.of_arena.len().max(arena as usize + 1);
        self.of_arena.resize_with(arenas, Vec::new);
        let lists = &mut self.of_arena[arena as usize];
        lists.insert(lists.partition_point(|it| *it < list), list);
        Some(list)
    }

    /// A list that is not in use, if one is known.
    fn pop_vacant(&mut self) -> Option<u16> {
        let is_vacant = |array: &ListArray, at: u16| {
            let list = &array.0[at as usize];
            (list.dead || list.idle != at) && !list.is_in_use()
        };
        loop {
            while let Some(list) = self.vacant.pop() {
                if is_vacant(&self.array, list) {
                    return Some(list);
                }
            }
            if self.used < self.scan_at.min(u16::MAX as usize) {
                return None;
            }
            let lists = (0..self.used).rev().map(|at| at as u16);
            self.vacant = lists.filter(|at| is_vacant(&self.array, *at)).collect();
            self.scan_at = 2 * (self.used - self.vacant.len());
            if self.vacant.is_empty() {
                return None;
            }
        }
    }

    /// The lists of an arena.
    pub fn of_arena(&self, arena: ArenaId) -> impl Iterator<Item = (u16, &FreeList)> {
        let lists = self.of_arena.get(arena as usize);
        lists.into_iter().flatten().map(|at| (*at, self.get(*at)))
    }

    /// The numbers of an arena's lists.
    pub fn numbers(&self, arena: ArenaId) -> Vec<u16> {
        self.of_arena(arena).map(|(at, _)| at).collect()
    }

    /// Whether more than one stream has blocks, in any arena.
    pub fn several_in_use(&self) -> bool {
        let streams = self.iter().filter(|(at, it)| *at != it.idle);
        streams.filter(|(_, it)| it.is_in_use()).nth(1).is_some()
    }

    /// How many stream lists are in use, in all arenas.
    pub fn streams(&self) -> usize {
        self.streams
    }

    #[inline(always)]
    pub fn get(&self, list: u16) -> &FreeList {
        &self.array.0[list as usize]
    }

    #[inline(always)]
    pub fn get_mut(&mut self, list: u16) -> &mut FreeList {
        &mut self.array.0[list as usize]
    }

    /// The lists of an arena without its idle one.
    pub fn stream_lists_of(&self, arena: ArenaId) -> impl Iterator<Item = (u16, &FreeList)> {
        self.of_arena(arena).filter(|(list, it)| it.idle != *list)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u16, &mut FreeList)> {
        let lists = self.array.0[..self.used].iter_mut().enumerate();
        lists.map(|(at, list)| (at as u16, list))
    }

    /// The lists of the other streams of this list's arena that have free blocks.
    pub fn others_with_free(&self, list: u16) -> impl Iterator<Item = (u16, &FreeList)> {
        let own = self.get(list);
        self.stream_lists_of(own.arena)
            .filter(move |(at, it)| *at != list && !it.bins.is_empty())
    }

    pub fn iter(&self) -> impl Iterator<Item = (u16, &FreeList)> {
        let lists = self.array.0[..self.used].iter().enumerate();
        lists.map(|(at, list)| (at as u16, list))
    }
}
