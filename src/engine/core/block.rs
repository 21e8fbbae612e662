//! Blocks: one node for each piece of mapped memory, used or free, linked to its neighbours in
//! address order. All nodes lie in one array and name each other by their place in it, one cache line
//! each.

use super::counters::Origin;
use crate::util::zeroed::{Zeroable, Zeroed};
use std::fmt::{self, Display, Formatter};
use std::ops::{Deref, DerefMut, Index, IndexMut};

/// A node's place among [`Nodes`]: how many bytes after the first it begins, so that finding it takes no
/// arithmetic. Only this file makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u32);

/// No block. There is a node in this place all the same, which is free for nobody and larger than
/// anything asked for. So who follows a link may read what is there, and write its links, which nobody
/// reads, without asking first whether there is a block. Its address, size and state stay as they are.
pub const NONE: BlockId = BlockId(0);

impl BlockId {
    /// The place of the node that so many are before. Nothing else makes such a name.
    fn at(index: usize) -> BlockId {
        assert!(index < NODES);
        BlockId((index * size_of::<Block>()) as u32)
    }

    /// How many nodes are before it.
    #[inline]
    pub fn index(self) -> usize {
        self.0 as usize / size_of::<Block>()
    }
}

impl Display for BlockId {
    fn fmt(&self, to: &mut Formatter<'_>) -> fmt::Result {
        self.index().fmt(to)
    }
}

/// What a block is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// A node that is not in use.
    Vacant = 0,
    /// Free memory; `list` says which stream may take it without waiting.
    Free,
    /// Handed out.
    Live,
    /// Given back by the program while other streams may still use it.
    Pending,
    /// Free and made purgeable: nobody takes it before it is reclaimed; see `rest`.
    Purgeable,
}

/// One piece of mapped memory.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Block {
    pub address: u64,
    pub size: u64,
    /// Live: the bytes asked for. Free or resting: the epoch in which it was freed.
    pub detail: u64,
    /// The neighbours in address order, where their memory touches this block's.
    pub prev: BlockId,
    pub next: BlockId,
    /// Free blocks of exactly this size, in a bin; see `bins`.
    pub same_prev: BlockId,
    pub same_next: BlockId,
    /// The next smaller and larger size in the bin, kept by the first block of a size; `NONE` in the others.
    pub less: BlockId,
    pub more: BlockId,
    /// Free: neighbours in the order of being freed; see `stream`.
    pub older: BlockId,
    pub newer: BlockId,
    /// Live: the next block in the same place of the address map.
    pub chain: BlockId,
    /// The stream free list that allocated it or freed it last.
    pub list: u16,
    pub state: BlockState,
    /// Of a block that is live or pending.
    pub flags: Flags,
}

/// What is known of a block besides its stream; nothing of a free one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags(u8);

impl Flags {
    pub const NONE: Flags = Flags(0);
    /// Other streams were recorded on it.
    const MULTI_STREAM: u8 = 1;
    /// It is of [`Origin::Cuda`].
    const CUDA: u8 = 2;

    #[inline(always)]
    pub fn of(origin: Origin) -> Flags {
        match origin {
            Origin::Allocator => Flags::NONE,
            Origin::Cuda => Flags(Flags::CUDA),
        }
    }

    #[inline(always)]
    pub fn origin(self) -> Origin {
        match self.0 & Flags::CUDA {
            0 => Origin::Allocator,
            _ => Origin::Cuda,
        }
    }

    #[inline(always)]
    pub fn is_multi_stream(self) -> bool {
        self.0 & Flags::MULTI_STREAM != 0
    }

    #[inline]
    pub fn set_multi_stream(&mut self, shared: bool) {
        self.0 = self.0 & !Flags::MULTI_STREAM | u8::from(shared);
    }
}

impl Block {
    pub fn end(&self) -> u64 {
        self.address + self.size
    }
}

/// What a node is filled with that is in use for nothing.
pub const VACANT: Block = Block {
    address: 0,
    size: 0,
    detail: 0,
    prev: NONE,
    next: NONE,
    same_prev: NONE,
    same_next: NONE,
    less: NONE,
    more: NONE,
    older: NONE,
    newer: NONE,
    chain: NONE,
    list: 0,
    state: BlockState::Vacant,
    flags: Flags::NONE,
};

/// As many nodes as there can be: 2 GiB of them, of which the system gives what is used. A block is 512 bytes
/// or more, so that it takes 16 GiB of the smallest for them to run out.
pub(super) const NODES: usize = 1 << 25;

/// Nodes chained at a time.
const PAGE: usize = 64;

/// Nodes kept for the pool's own work, so that what is refused for want of them is a request.
const SPARE: usize = 1 << 16;

/// Every node that can be named. All of them are there, in use or not, so that what finds one by its name
/// need not ask whether it is.
pub struct Nodes([Block; NODES]);

// SAFETY: a block of zeros is one, of numbers, `BlockState::Vacant` and no flags: it is `VACANT`.
#[allow(unsafe_code)]
unsafe impl Zeroable for Nodes {}

impl Index<BlockId> for Nodes {
    type Output = Block;
    #[inline(always)]
    #[allow(unsafe_code)]
    fn index(&self, id: BlockId) -> &Block {
        // SAFETY: who has a name has it from `BlockId::at`, or it is `NONE`: a block begins there.
        unsafe { &*self.0.as_ptr().byte_add(id.0 as usize) }
    }
}

impl IndexMut<BlockId> for Nodes {
    #[inline(always)]
    #[allow(unsafe_code)]
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        // SAFETY: as above.
        unsafe { &mut *self.0.as_mut_ptr().byte_add(id.0 as usize) }
    }
}

/// All nodes; vacant ones are chained through `next` and used again.
pub struct Blocks {
    nodes: Zeroed<Nodes>,
    /// How many nodes were ever used.
    used: usize,
    vacant: BlockId,
}

impl Blocks {
    /// `None` where the process may not have the addresses for them.
    pub fn new() -> Option<Self> {
        let mut nodes = Zeroed::<Nodes>::new()?;
        nodes[NONE].size = u64::MAX;
        Some(Blocks {
            nodes,
            used: 1,
            vacant: NONE,
        })
    }

    /// Bytes of the nodes that were ever used.
    pub fn bytes(&self) -> usize {
        self.used * size_of::<Block>()
    }

    /// A node for the given memory, linked to nothing.
    pub fn add(&mut self, address: u64, size: u64, list: u16, state: BlockState) -> BlockId {
        let mut id = self.new_node();
        if id == NONE {
            // One by one, so that none of those to spare is claimed.
            assert!(self.grow(1, 0), "no more than {NODES} blocks can be kept");
            id = self.pop_vacant();
        }
        self[id] = Block {
            address,
            size,
            list,
            state,
            ..VACANT
        };
        id
    }

    /// A vacant node, which the caller fills in; `NONE` where there are none but those to spare.
    #[inline(always)]
    pub fn new_node(&mut self) -> BlockId {
        if self.vacant == NONE && !self.grow(PAGE, SPARE) {
            return NONE;
        }
        self.pop_vacant()
    }

    #[inline(always)]
    fn pop_vacant(&mut self) -> BlockId {
        let id = self.vacant;
        self.vacant = self[id].next;
        id
    }

    /// Chains so many vacant nodes, the lowest first. False where that would leave fewer to spare.
    #[cold]
    #[inline(never)]
    fn grow(&mut self, count: usize, spare: usize) -> bool {
        let end = self.used + count;
        if end > NODES - spare {
            return false;
        }
        (self.used..end)
            .rev()
            .for_each(|at| self.remove(BlockId::at(at)));
        self.used = end;
        true
    }

    #[inline(always)]
    pub fn remove(&mut self, id: BlockId) {
        let node = &mut self.nodes[id];
        node.state = BlockState::Vacant;
        node.next = self.vacant;
        self.vacant = id;
    }

    /// Makes two nodes of a block: a new one for its first `size` bytes, and itself for the rest.
    pub fn split_front(&mut self, id: BlockId, size: u64, list: u16, state: BlockState) -> BlockId {
        let (address, prev) = (self[id].address, self[id].prev);
        let front = self.add(address, size, list, state);
        self[front].prev = prev;
        self[front].next = id;
        self[prev].next = front;
        let rest = &mut self[id];
        rest.address += size;
        rest.size -= size;
        rest.prev = front;
        front
    }

    /// The nodes, and the first vacant one, for [`absorb_next`].
    #[inline(always)]
    pub fn parts(&mut self) -> (&mut Nodes, &mut BlockId) {
        (&mut self.nodes, &mut self.vacant)
    }

    /// Whether the node of no block is as it has to be.
    pub fn is_sentinel_intact(&self) -> bool {
        let none = &self[NONE];
        (none.size, none.address, none.state) == (u64::MAX, 0, BlockState::Vacant)
    }

    /// Every node in use.
    pub fn iter(&self) -> impl Iterator<Item = (BlockId, &Block)> {
        (0..self.used)
            .map(|at| (BlockId::at(at), &self[BlockId::at(at)]))
            .filter(|(_, block)| block.state != BlockState::Vacant)
    }
}

/// Makes one node of a block and the next one, whose memory touches it; the other is vacant then.
/// `tail` is the block at the end of its run, which may be the one that goes.
#[inline(always)]
pub fn absorb_next(nodes: &mut Nodes, vacant: &mut BlockId, id: BlockId, tail: &mut BlockId) {
    let gone = nodes[id].next;
    let node = &mut nodes[gone];
    let (size, after) = (node.size, node.next);
    node.state = BlockState::Vacant;
    node.next = *vacant;
    *vacant = gone;
    let node = &mut nodes[id];
    node.size += size;
    node.next = after;
    nodes[after].prev = id;
    if *tail == gone {
        *tail = id;
    }
}

impl Deref for Blocks {
    type Target = Nodes;
    #[inline(always)]
    fn deref(&self) -> &Nodes {
        &self.nodes
    }
}

impl DerefMut for Blocks {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Nodes {
        &mut self.nodes
    }
}
