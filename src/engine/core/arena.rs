//! A group: the memory that may be shared among its own blocks and with nobody else. The first is
//! everybody's; each private pool (a CUDA graph's, or a `MemPool` of PyTorch's) is one more.

use super::address_space::Space;
use super::block::{BlockId, NONE};
use super::chunk::Chunks;
use super::gpu::Gpu;
use std::collections::HashMap;

/// An index of a group in its pool.
pub type GroupId = u16;

/// The group that requests go to unless told otherwise.
pub const SHARED: GroupId = 0;

/// Private groups of which something is to be done.
#[derive(Default)]
pub struct Due {
    /// Those that may have holes which are not idle.
    pub unsettled: Vec<GroupId>,
    /// Closing ones that may have become free.
    pub ripe: Vec<GroupId>,
    /// Closing ones of which something may be given back when all is that can be: a part of them was freed,
    /// or the driver did not take something back, or a capture may use it.
    pub unripe: Vec<GroupId>,
    /// The epoch that the device has to complete for the first of the ripe ones to be given back without a
    /// wait, and how many they are.
    pub marked: (u64, usize),
}

impl Due {
    /// A block of a group that is watched was freed.
    #[cold]
    #[inline(never)]
    pub fn note_free(&mut self, group: &mut Group, id: GroupId, gpu: &impl Gpu) {
        if !group.closing {
            group.watched = false;
            self.unsettled.push(id);
            return;
        }
        group.captured |= !gpu.may_wait();
        match group.live {
            0 => self.ripe.push(id),
            _ => self.list(group, id),
        }
    }

    /// A closing group is given back as far as can be when all else is.
    pub fn list(&mut self, group: &mut Group, id: GroupId) {
        if !std::mem::replace(&mut group.listed, true) {
            self.unripe.push(id);
        }
    }
}

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
    /// Its streams' holes whose work is done have been made idle as far as was known then; see
    /// [`Epochs::advances`](super::epoch::Epochs).
    pub released: u64,
    /// A free has to be noted: in a private group the first since all that it has free was idle, and every
    /// one while it is closing; in the shared one while frees are noted with their places.
    pub watched: bool,
    /// Nobody allocates from it any more; it goes when its last block does.
    pub closing: bool,
    /// It is listed to be given back.
    pub listed: bool,
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
            released: 0,
            watched: false,
            closing: false,
            listed: false,
            captured: false,
            closed: false,
        }
    }

    /// A mapping of `size` bytes failed behind the cursor. The next run starts somewhere else.
    pub fn abandon(&mut self, size: u64) {
        self.space.take(self.cursor, size);
        self.abandoned += size;
        self.cursor = 0;
        self.tail = NONE;
    }

    /// Gives all addresses back. Nothing of the group's is mapped there any more.
    pub fn release_addresses(&mut self, gpu: &mut impl Gpu) {
        for (start, size) in std::mem::take(&mut self.space).ranges {
            gpu.unreserve(start, size);
        }
    }
}
