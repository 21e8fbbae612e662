//! Blocks: one node for each piece of mapped memory, used or free, linked to its neighbours in
//! address order. All nodes lie in one array and name each other by index, one cache line each.

use crate::array::Array;
use std::ops::{Deref, DerefMut, Index, IndexMut};

/// An index into [`Blocks`].
pub type BlockId = u32;

/// No block. There is a node in this place all the same, which is free for nobody and larger than
/// anything asked for. So who follows a link may read what is there, and write what nobody reads,
/// without asking first whether there is a block.
pub const NONE: BlockId = 0;

/// What a block is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// A node that is not in use.
    Vacant,
    /// Free memory; `slot` says which stream may take it without waiting.
    Free,
    /// Handed out.
    Live,
    /// Given back by the program while other streams may still use it.
    Pending,
    /// Free and put to rest: nobody takes it before it is woken; see `rest`.
    Resting,
}

/// One piece of mapped memory.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Block {
    pub address: u64,
    pub size: u64,
    /// Live: the bytes asked for. Free or resting: when it was freed, on the pool's clock.
    pub detail: u64,
    /// The neighbours in address order, where their memory touches this block's.
    pub prev: BlockId,
    pub next: BlockId,
    /// Free blocks of exactly this size, in a bin; see `bins`.
    pub same_prev: BlockId,
    pub same_next: BlockId,
    /// The next smaller and larger size in the bin, kept by the first block of a size.
    pub less: BlockId,
    pub more: BlockId,
    /// Free: neighbours in the order of being freed; see `stream`.
    pub older: BlockId,
    pub newer: BlockId,
    /// Live: the next block in the same place of the table.
    pub chain: BlockId,
    /// The stream slot that allocated it or freed it last.
    pub slot: u16,
    pub state: State,
    /// Live: other streams were recorded on it.
    pub shared: bool,
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
    slot: 0,
    state: State::Vacant,
    shared: false,
};

/// All nodes; vacant ones are chained through `next` and used again.
pub struct Blocks {
    nodes: Array<Block>,
    vacant: BlockId,
}

impl Blocks {
    pub fn new() -> Self {
        let mut nodes = Array::new();
        nodes.extend(
            1,
            Block {
                size: u64::MAX,
                ..VACANT
            },
        );
        Blocks {
            nodes,
            vacant: NONE,
        }
    }

    /// A node for the given memory, linked to nothing.
    pub fn add(&mut self, address: u64, size: u64, slot: u16, state: State) -> BlockId {
        let id = self.claim();
        self[id] = Block {
            address,
            size,
            slot,
            state,
            ..VACANT
        };
        id
    }

    /// A vacant node, which the caller fills in.
    #[inline(always)]
    pub fn claim(&mut self) -> BlockId {
        if self.vacant == NONE {
            self.grow();
        }
        let id = self.vacant;
        self.vacant = self[id].next;
        id
    }

    /// Chains a page of vacant nodes, the lowest first.
    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        let before = self.nodes.len();
        self.nodes.extend(64, VACANT);
        for id in (before..self.nodes.len()).rev() {
            self.remove(id as BlockId);
        }
    }

    #[inline(always)]
    pub fn remove(&mut self, id: BlockId) {
        let node = &mut self.nodes[id as usize];
        node.state = State::Vacant;
        node.next = self.vacant;
        self.vacant = id;
    }

    /// Makes two nodes of a block: a new one for its first `size` bytes, and itself for the rest.
    pub fn split_front(&mut self, id: BlockId, size: u64, slot: u16, state: State) -> BlockId {
        let (address, prev) = (self[id].address, self[id].prev);
        let front = self.add(address, size, slot, state);
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
    pub fn parts(&mut self) -> (&mut [Block], &mut BlockId) {
        (&mut self.nodes, &mut self.vacant)
    }

    /// Every node in use.
    pub fn iter(&self) -> impl Iterator<Item = (BlockId, &Block)> {
        self.nodes
            .iter()
            .enumerate()
            .filter(|(_, block)| block.state != State::Vacant)
            .map(|(id, block)| (id as BlockId, block))
    }
}

/// Makes one node of a block and the next one, whose memory touches it; the other is vacant then.
/// `tail` is the block at the end of its run, which may be the one that goes.
#[inline(always)]
pub fn absorb_next(nodes: &mut [Block], vacant: &mut BlockId, id: BlockId, tail: &mut BlockId) {
    let gone = nodes[id as usize].next;
    let node = &mut nodes[gone as usize];
    let (size, after) = (node.size, node.next);
    node.state = State::Vacant;
    node.next = *vacant;
    *vacant = gone;
    let node = &mut nodes[id as usize];
    node.size += size;
    node.next = after;
    nodes[after as usize].prev = id;
    if *tail == gone {
        *tail = id;
    }
}

/// The nodes by their ids. Who works on several holds them as a slice, which spares looking up where
/// they are each time.
impl Deref for Blocks {
    type Target = [Block];
    #[inline(always)]
    fn deref(&self) -> &[Block] {
        &self.nodes
    }
}

impl DerefMut for Blocks {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [Block] {
        &mut self.nodes
    }
}

impl Index<BlockId> for Blocks {
    type Output = Block;
    #[inline(always)]
    fn index(&self, id: BlockId) -> &Block {
        &self.nodes[id as usize]
    }
}

impl IndexMut<BlockId> for Blocks {
    #[inline(always)]
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.nodes[id as usize]
    }
}
