//! Blocks: one node for each range of mapped memory, live or free, linked to its neighbours in address order.
//!
//! A node is one cache line. All nodes lie in one array and name each other by their offset in it. Node 0 is
//! a sentinel, [`NONE`], so that links are followed and written without a null check.

use super::counters::Origin;
use crate::util::zeroed::{Zeroable, Zeroed};
use std::fmt::{self, Display, Formatter};
use std::ops::{Deref, DerefMut, Index, IndexMut};

/// A node's offset in [`Nodes`] in bytes, so that finding it takes no arithmetic. Only this file makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u32);

/// The sentinel: no block. Its size is `u64::MAX` and it is never free; those and its address do not change.
/// Its links may be written, and are never read.
pub const NONE: BlockId = BlockId(0);

impl BlockId {
    /// The id of the node with this index. Nothing else makes an id.
    fn at(index: usize) -> BlockId {
        assert!(index < NODES);
        BlockId((index * size_of::<Block>()) as u32)
    }

    /// The node's index.
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

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// The node is not in use.
    Vacant = 0,
    /// In the bins of its list, whose stream may have it without waiting.
    Free,
    /// Allocated.
    Live,
    /// Freed while other streams may still use it; see `deferred_free`.
    Pending,
    /// Free, and out of the bins until a miss reclaims it; see `purge`.
    Purgeable,
}

/// A range of mapped memory.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Block {
    pub address: u64,
    pub size: u64,
    /// Live or pending: the requested bytes. Free or purgeable: the epoch of its free.
    pub detail: u64,
    /// The neighbours in address order, without a gap between.
    pub prev: BlockId,
    pub next: BlockId,
    /// Free: neighbours of exactly this size in a bin; see `bins`.
    pub same_prev: BlockId,
    pub same_next: BlockId,
    /// Free: the first blocks of the next smaller and larger size in the bin; `NONE` unless it is the first
    /// of its own size.
    pub less: BlockId,
    pub more: BlockId,
    /// Free: neighbours in the order of frees; see `stream_lists`.
    pub older: BlockId,
    pub newer: BlockId,
    /// Live: the next block in the same bucket of the address map.
    pub chain: BlockId,
    /// The list of the stream that it was allocated on, or freed by last.
    pub list: u16,
    pub state: BlockState,
    /// Live or pending; none set in a free block.
    pub flags: Flags,
}

/// Flags of a live or pending block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags(u8);

impl Flags {
    pub const NONE: Flags = Flags(0);
    /// Other streams use it, so that its free is deferred.
    const MULTI_STREAM: u8 = 1;
    /// Its origin is [`Origin::Cuda`].
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
    pub fn set_multi_stream(&mut self, on: bool) {
        self.0 = self.0 & !Flags::MULTI_STREAM | u8::from(on);
    }
}

impl Block {
    pub fn end(&self) -> u64 {
        self.address + self.size
    }
}

/// A node that is not in use.
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

/// The most nodes there can be: 2 GiB, of which the system commits what is used. It takes 16 GiB of the
/// smallest blocks, of 512 bytes, for them to run out.
pub(super) const NODES: usize = 1 << 25;

/// How many nodes are made vacant at a time.
const PAGE: usize = 64;

/// Nodes in reserve for the pool's own work, so that only a request is ever refused for want of one.
const SPARE: usize = 1 << 16;

/// Every node that an id can name, so that no look-up is checked.
pub struct Nodes([Block; NODES]);

// SAFETY: a block of zeros is `VACANT`: numbers, `BlockState::Vacant` and no flags.
#[allow(unsafe_code)]
unsafe impl Zeroable for Nodes {}

impl Index<BlockId> for Nodes {
    type Output = Block;
    #[inline(always)]
    #[allow(unsafe_code)]
    fn index(&self, id: BlockId) -> &Block {
        // SAFETY: every id is `NONE` or from `BlockId::at`, so that a block begins at its offset.
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

/// The nodes; vacant ones are linked through `next`, and used again.
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

    /// Bytes of the nodes that were ever in use.
    pub fn bytes(&self) -> usize {
        self.used * size_of::<Block>()
    }

    /// A node for this range, linked to nothing.
    pub fn add(&mut self, address: u64, size: u64, list: u16, state: BlockState) -> BlockId {
        let mut id = self.new_node();
        if id == NONE {
            // One by one, so that the others stay in reserve.
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

    /// A vacant node, which the caller fills in; `NONE` where only the reserve is left.
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

    /// Makes `count` nodes vacant, the lowest first. False where that would leave fewer than `spare`.
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

    /// Splits a block: a new node for its first `size` bytes, its own for the rest.
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

    /// Whether the sentinel is as it has to be.
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

/// Merges the next block into this one; its node is vacant then. `tail` is the block at the end of the run,
/// which may be the one that goes.
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
