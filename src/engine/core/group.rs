//! A group: the memory that may be shared among its own blocks and with nobody else. The first is
//! everybody's; each private pool (a CUDA graph's, or a `MemPool` of PyTorch's) is one more.

use super::block::{BlockId, NONE};
use super::chunk::Chunks;
use super::gpu::Gpu;
use super::space::Space;
use std::collections::HashMap;

/// An index of a group in its pool.
pub type GroupId = u16;

/// The group that requests go to unless told otherwise.
pub const SHARED: GroupId = 0;

pub struct Group {
    /// The slot of the group's idle memory.
    pub idle: u16,
    pub chunks: Chunks,
    pub space: Space,
    /// Its segments are supplied by somebody else ([`Pool::supply`](super::Pool::supply)), and it has no
    /// memory of the driver's.
    pub supplied: bool,
    /// Each block takes a whole segment.
    pub whole: bool,
    /// Plain segments: start and size.
    pub segments: HashMap<u64, u64>,
    /// Where growth maps the next chunk, and the block that ends there.
    pub cursor: u64,
    pub tail: BlockId,
    /// Bytes in use, and the most that ever were.
    pub live: u64,
    pub highest: u64,
    /// Bytes held from the driver.
    pub reserved: u64,
    /// Bytes of addresses where a mapping failed, and may have left something behind.
    pub abandoned: u64,
    /// Each free is looked at: the group is closing, or frees are noted with their places.
    pub watched: bool,
    /// Nobody allocates from it any more; it goes when its last block does.
    pub closing: bool,
    /// A block was freed inside a capture while the group was closing. The graph may have used it before
    /// and goes on doing so in its replays: what is held stays until the cache is emptied, as it does with
    /// PyTorch's own allocator.
    pub captured: bool,
    /// Gone: nothing is held, the place can be used again.
    pub closed: bool,
}

impl Group {
    pub fn new(idle: u16, granularity: u64, supplied: bool) -> Self {
        Group {
            idle,
            chunks: Chunks::new(granularity),
            space: Space::default(),
            supplied,
            whole: false,
            segments: HashMap::new(),
            cursor: 0,
            tail: NONE,
            live: 0,
            highest: 0,
            reserved: 0,
            abandoned: 0,
            watched: false,
            closing: false,
            captured: false,
            closed: false,
        }
    }

    /// A block of the closing group was freed. True if all are.
    #[cold]
    pub fn ripen(&mut self, gpu: &impl Gpu) -> bool {
        self.captured |= !gpu.may_wait();
        self.live == 0
    }

    /// A mapping of `size` bytes failed behind the cursor. The next run starts somewhere else.
    pub fn abandon(&mut self, size: u64) {
        self.space.take(self.cursor, size);
        self.abandoned += size;
        self.cursor = 0;
        self.tail = NONE;
    }

    /// Gives all addresses back. Nothing is mapped there any more.
    pub fn release_addresses(&mut self, gpu: &mut impl Gpu) {
        for (start, size) in std::mem::take(&mut self.space).ranges {
            gpu.unreserve(start, size);
        }
    }
}
