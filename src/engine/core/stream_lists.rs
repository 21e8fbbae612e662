//! Streams: whose holes are whose.
//!
//! A hole belongs to the *slot* of the stream that freed it: that stream may take it at once,
//! because its own later work runs after its earlier work. Each group has one more slot, *idle*:
//! holes whose old work is known to be done (see `epoch`), which any stream may take. What is another
//! stream's it can have behind a wait (see `cross_stream`).

use super::arena::GroupId;
use super::bins::Bins;
use super::block::{Block, BlockId, Blocks, NONE, Nodes};
use crate::util::zeroed::{Zeroable, Zeroed};
use std::collections::HashMap;

/// What names a stream. A handle alone does not: the driver hands the handle of a destroyed
/// stream out again while the old work still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamKey {
    /// The driver's handle (`CUstream`).
    pub handle: u64,
    /// The driver's id for the stream (`cuStreamGetId`), never used twice; 0 where unknown.
    pub id: u64,
}

/// The owner of memory that is ordered by no stream, as `cudaMalloc`'s is: whoever gets it may use it
/// on any. Whatever it holds is idle, since it gets a block back only once nothing uses it. To the
/// driver its handle is the default stream; its number sets it apart, as the driver counts streams
/// from 1.
pub const UNORDERED: StreamKey = StreamKey {
    handle: 0,
    id: u64::MAX,
};

/// Stands for every stream of the device, those included that are gone.
pub const ALL_STREAMS: StreamKey = StreamKey {
    handle: u64::MAX,
    id: 0,
};

/// A stream that the pool has seen, and its holes.
pub struct Slot {
    pub key: StreamKey,
    pub group: GroupId,
    /// The slot of the group's idle memory; this one, if it is that itself.
    pub idle: u16,
    pub bins: Bins,
    /// The epoch of the stream's last free here whose place is not noted; see `epoch`.
    pub freed: u64,
    /// Whole chunks put to rest, if ever there were any; see `rest`.
    pub resting: Option<Box<Bins>>,
    /// Blocks handed out, or freed but still used elsewhere, that will come back to the slot.
    pub live: u64,
    /// The slot's holes in the order of being freed, kept from when it is first asked for.
    pub ordered: bool,
    oldest: BlockId,
    newest: BlockId,
    /// The slot's group is gone.
    dead: bool,
}

impl Slot {
    /// Is another stream's from now on. It holds nothing.
    fn begin(&mut self, key: StreamKey, group: GroupId, idle: u16) {
        (self.key, self.group, self.idle) = (key, group, idle);
        (self.freed, self.live, self.dead) = (0, 0, false);
        self.resting = None;
        (self.ordered, self.oldest, self.newest) = (false, NONE, NONE);
    }

    /// Whether it is of this group, which is not gone.
    pub fn is_of(&self, group: GroupId) -> bool {
        self.group == group && !self.dead
    }

    /// Whether its group is gone.
    pub fn is_dead(&self) -> bool {
        self.dead
    }

    /// Whether anything is at rest.
    pub fn rests(&self) -> bool {
        self.resting.as_ref().is_some_and(|bins| !bins.is_empty())
    }

    /// Holes of at least `size` bytes, those at rest included.
    pub fn all_holes<'a>(
        &'a self,
        blocks: &'a Blocks,
        size: u64,
    ) -> impl Iterator<Item = &'a Block> + 'a {
        let bins = [Some(&self.bins), self.resting.as_deref()];
        let holes = bins.into_iter().flatten();
        holes.flat_map(move |bins| bins.ascending(blocks, size).map(|id| &blocks[id]))
    }

    /// Whether any free memory is the stream's.
    pub fn holds_free(&self) -> bool {
        !self.bins.is_empty() || self.rests()
    }

    /// Whether any block or hole is the stream's, or will be.
    fn holds(&self) -> bool {
        self.live > 0 || !self.bins.is_empty() || self.rests()
    }

    /// Takes a hole in as the newest.
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

    /// From now on the order is kept. What is there already comes first, in the order that counts:
    /// by the clock.
    pub fn keep_order(&mut self, blocks: &mut Blocks) {
        if !self.ordered {
            self.ordered = true;
            let mut holes: Vec<BlockId> = self.bins.ascending(blocks, super::BLOCK).collect();
            holes.sort_unstable_by_key(|id| blocks[*id].detail);
            holes.into_iter().for_each(|id| self.link(blocks, id));
        }
    }

    /// With no hole left there is no order to keep, until it is asked for again.
    pub fn forget_order(&mut self) {
        self.ordered &= self.oldest != NONE;
    }

    pub fn oldest(&self) -> Option<BlockId> {
        (self.oldest != NONE).then_some(self.oldest)
    }
}

/// Streams of which the slot is found without a search.
const RECENT: usize = 16;

/// A stream of a group, and its slot.
#[derive(Clone, Copy)]
struct Recent {
    key: StreamKey,
    group: GroupId,
    slot: u16,
}

impl Recent {
    /// No stream: nobody asks for the slot of idle memory by its key.
    const NONE: Recent = Recent {
        key: IDLE,
        group: 0,
        slot: 0,
    };
}

/// What idle memory has in the place of a stream.
const IDLE: StreamKey = StreamKey {
    handle: u64::MAX,
    id: u64::MAX,
};

#[inline]
fn recent_of(key: StreamKey) -> usize {
    (key.handle.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - RECENT.trailing_zeros())) as usize
}

/// As many slots as a number names.
struct List([Slot; 1 << 16]);

// SAFETY: a slot of zeros is one: of numbers, `false`, `NONE` for every block and no box. `Slots` drops what
// comes to be in it.
#[allow(unsafe_code)]
unsafe impl Zeroable for List {}

/// Every slot.
pub struct Slots {
    /// All that can be named, so that who finds one by its name need not ask whether it is there; the system
    /// gives what is used.
    list: Zeroed<List>,
    /// How many were ever used.
    used: usize,
    /// The streams found last, each in the place that its handle has here.
    recent: [Recent; RECENT],
    /// Every slot that is anybody's, the groups' idle ones too.
    by_key: HashMap<(GroupId, StreamKey), u16>,
    /// How many slots are streams'.
    streams: usize,
    /// The slots of each group, ascending, so that what concerns one group looks at no others.
    of_group: Vec<Vec<u16>>,
    /// Slots that held nothing when all were last looked at for such, and those of groups that are gone.
    vacant: Vec<u16>,
    /// They are looked at again once so many were ever used: that is seldom, and yet no more than twice as
    /// many are used as held something at once.
    look_at: usize,
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.iter_mut().for_each(|(_, slot)| slot.resting = None);
    }
}

impl Slots {
    /// `None` where the process may not have the addresses for them.
    pub fn new() -> Option<Self> {
        Some(Slots {
            list: Zeroed::new()?,
            used: 0,
            recent: [Recent::NONE; RECENT],
            by_key: HashMap::new(),
            streams: 0,
            of_group: Vec::new(),
            vacant: Vec::new(),
            look_at: 0,
        })
    }

    /// A slot for the idle memory of a new group. `None` when there are 65,535 slots already.
    pub fn add_idle(&mut self, group: GroupId) -> Option<u16> {
        self.place(IDLE, group)
    }

    /// The group is gone: its slots hold nothing and may be used again.
    pub fn remove_group(&mut self, group: GroupId) {
        let slots = self.of_group.get_mut(group as usize);
        for at in slots.map(std::mem::take).unwrap_or_default() {
            let slot = self.get_mut(at);
            slot.dead = true;
            let (name, is_stream) = ((group, slot.key), slot.idle != at);
            self.by_key.remove(&name);
            self.streams -= usize::from(is_stream);
            self.vacant.push(at);
        }
        self.recent = [Recent::NONE; RECENT];
    }

    /// The slot of a stream in a group; a new one for a stream not seen before. `None` when there
    /// are 65,535 slots that hold memory.
    #[inline(always)]
    pub fn of(&mut self, key: StreamKey, group: GroupId) -> Option<u16> {
        let recent = &self.recent[recent_of(key)];
        if recent.key == key && recent.group == group {
            return Some(recent.slot);
        }
        self.find(key, group)
    }

    #[cold]
    #[inline(never)]
    fn find(&mut self, key: StreamKey, group: GroupId) -> Option<u16> {
        let slot = match self.by_key.get(&(group, key)) {
            Some(slot) => *slot,
            None => self.place(key, group)?,
        };
        self.recent[recent_of(key)] = Recent { key, group, slot };
        Some(slot)
    }

    /// A new slot, in the place of one that holds nothing where one is known; so many
    /// streams that come and go cost no more than twice the most that held memory at once.
    fn place(&mut self, key: StreamKey, group: GroupId) -> Option<u16> {
        let idle = self.by_key.get(&(group, IDLE)).copied();
        let slot = match self.take_vacant() {
            Some(slot) => {
                self.recent = [Recent::NONE; RECENT];
                let old = self.get(slot);
                // Those of a group that is gone were taken from the lists with it.
                if !old.dead {
                    let name = (old.group, old.key);
                    self.streams -= 1;
                    self.by_key.remove(&name);
                    self.of_group[name.0 as usize].retain(|it| *it != slot);
                }
                slot
            }
            None => {
                let slot = u16::try_from(self.used).ok().filter(|it| *it < u16::MAX)?;
                self.used += 1;
                slot
            }
        };
        self.streams += usize::from(idle.is_some());
        self.get_mut(slot).begin(key, group, idle.unwrap_or(slot));
        self.by_key.insert((group, key), slot);
        let groups = self.of_group.len().max(group as usize + 1);
        self.of_group.resize_with(groups, Vec::new);
        let slots = &mut self.of_group[group as usize];
        slots.insert(slots.partition_point(|it| *it < slot), slot);
        Some(slot)
    }

    /// A slot that holds nothing, if one is known.
    fn take_vacant(&mut self) -> Option<u16> {
        let is_vacant = |list: &List, at: u16| {
            let slot = &list.0[at as usize];
            (slot.dead || slot.idle != at) && !slot.holds()
        };
        loop {
            while let Some(slot) = self.vacant.pop() {
                if is_vacant(&self.list, slot) {
                    return Some(slot);
                }
            }
            if self.used < self.look_at.min(u16::MAX as usize) {
                return None;
            }
            let slots = (0..self.used).rev().map(|at| at as u16);
            self.vacant = slots.filter(|at| is_vacant(&self.list, *at)).collect();
            self.look_at = 2 * (self.used - self.vacant.len());
            if self.vacant.is_empty() {
                return None;
            }
        }
    }

    /// The slots of a group.
    pub fn of_group(&self, group: GroupId) -> impl Iterator<Item = (u16, &Slot)> {
        let slots = self.of_group.get(group as usize);
        slots.into_iter().flatten().map(|at| (*at, self.get(*at)))
    }

    /// The same, by number alone.
    pub fn numbers_of(&self, group: GroupId) -> Vec<u16> {
        self.of_group(group).map(|(at, _)| at).collect()
    }

    /// Whether more than one stream has blocks or holes. Looks at no more slots than held something at once.
    pub fn several_hold(&self) -> bool {
        let streams = self.iter().filter(|(at, it)| *at != it.idle);
        streams.filter(|(_, it)| it.holds()).nth(1).is_some()
    }

    /// How many streams have been seen.
    pub fn streams(&self) -> usize {
        self.streams
    }

    #[inline(always)]
    pub fn get(&self, slot: u16) -> &Slot {
        &self.list.0[slot as usize]
    }

    #[inline(always)]
    pub fn get_mut(&mut self, slot: u16) -> &mut Slot {
        &mut self.list.0[slot as usize]
    }

    /// The slots of a group's streams, without that of its idle memory.
    pub fn streams_of(&self, group: GroupId) -> impl Iterator<Item = (u16, &Slot)> {
        self.of_group(group).filter(|(slot, it)| it.idle != *slot)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u16, &mut Slot)> {
        let slots = self.list.0[..self.used].iter_mut().enumerate();
        slots.map(|(at, slot)| (at as u16, slot))
    }

    /// The slots of the other streams of a slot's group, where they have holes.
    pub fn beside(&self, slot: u16) -> impl Iterator<Item = (u16, &Slot)> {
        let own = self.get(slot);
        self.streams_of(own.group)
            .filter(move |(at, it)| *at != slot && !it.bins.is_empty())
    }

    pub fn iter(&self) -> impl Iterator<Item = (u16, &Slot)> {
        let slots = self.list.0[..self.used].iter().enumerate();
        slots.map(|(at, slot)| (at as u16, slot))
    }
}
