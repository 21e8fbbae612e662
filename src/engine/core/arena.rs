//! An arena: the memory that may be shared among its own blocks and with nobody else. The first is
//! everybody's; each private pool (a CUDA graph's, or a `MemPool` of PyTorch's) is one more.

use super::address_space::AddressSpace;
use super::block::{BlockId, NONE};
use super::chunk::Chunks;
use super::gpu::Gpu;
use std::collections::HashMap;

/// An index of an arena in its pool.
pub type ArenaId = u16;

/// The arena that requests go to unless told otherwise.
pub const SHARED_ARENA: ArenaId = 0;

/// Private arenas of which something is to be done.
#[derive(Default)]
pub struct PendingArenas {
    /// Those that may have free blocks which are not idle.
    pub with_frees: Vec<ArenaId>,
    /// Closing ones that may have become free.
    pub to_trim: Vec<ArenaId>,
    /// Closing ones of which something may be given back when all is that can be: a part of them was freed,
    /// or the driver did not take something back, or a capture may use it.
    pub to_trim_later: Vec<ArenaId>,
    /// The epoch that the device has to complete for the first of the to_trim ones to be given back without a
    /// wait, and how many they are.
    pub trim_epoch: (u64, usize),
}

impl PendingArenas {
    /// A block of an arena that is notes_frees was freed.
    #[cold]
    #[inline(never)]
    pub fn on_free(&mut self, arena: &mut Arena, id: ArenaId, gpu: &impl Gpu) {
        if !arena.closing {
            arena.notes_frees = false;
            self.with_frees.push(id);
            return;
        }
        arena.captured |= !gpu.may_wait();
        match arena.live {
            0 => self.to_trim.push(id),
            _ => self.queue_for_later(arena, id),
        }
    }

    /// A closing arena is given back as far as can be when all else is.
    pub fn queue_for_later(&mut self, arena: &mut Arena, id: ArenaId) {
        if !std::mem::replace(&mut arena.queued_for_trim, true) {
            self.to_trim_later.push(id);
        }
    }
}

pub struct Arena {
    /// The free list of the arena's idle memory.
    pub idle: u16,
    pub chunks: Chunks,
    pub addresses: AddressSpace,
    /// Its segments are supplied by somebody else ([`Pool::add_supplied_segment`](super::Pool::add_supplied_segment)), and it has no
    /// memory of the driver's.
    pub supplied: bool,
    /// Each block takes a whole segment.
    pub whole_segments: bool,
    /// Plain segments: start and size.
    pub segments: HashMap<u64, u64>,
    /// Where growth maps the next chunk, and the block that ends there.
    pub cursor: u64,
    pub tail: BlockId,
    /// Bytes in use, and the most that ever were.
    pub live: u64,
    pub peak_live: u64,
    /// Bytes held from the driver.
    pub reserved: u64,
    /// Bytes of addresses where a mapping failed, and may have left something behind.
    pub abandoned: u64,
    /// Its streams' free blocks whose work is done have been made idle as far as was known then; see
    /// [`Epochs::advances`](super::epoch::Epochs).
    pub idle_as_of: u64,
    /// A free has to be noted: in a private arena the first since all that it has free was idle, and every
    /// one while it is closing; in the shared one while frees are noted with their places.
    pub notes_frees: bool,
    /// Nobody allocates from it any more; it goes when its last block does.
    pub closing: bool,
    /// It is queued_for_trim to be given back.
    pub queued_for_trim: bool,
    /// A block was freed inside a capture while the arena was closing. The graph may have used it before
    /// and goes on doing so in its replays: what is held stays until the cache is emptied, as it does with
    /// PyTorch's own allocator.
    pub captured: bool,
    /// Gone: nothing is held, the place can be used again.
    pub removed: bool,
}

impl Arena {
    pub fn new(idle: u16, granularity: u64, supplied: bool) -> Self {
        Arena {
            idle,
            chunks: Chunks::new(granularity),
            addresses: AddressSpace::default(),
            supplied,
            whole_segments: false,
            segments: HashMap::new(),
            cursor: 0,
            tail: NONE,
            live: 0,
            peak_live: 0,
            reserved: 0,
            abandoned: 0,
            idle_as_of: 0,
            notes_frees: false,
            closing: false,
            queued_for_trim: false,
            captured: false,
            removed: false,
        }
    }

    /// A mapping of `size` bytes failed behind the cursor. The next run starts somewhere else.
    pub fn abandon(&mut self, size: u64) {
        self.addresses.mark_mapped(self.cursor, size);
        self.abandoned += size;
        self.cursor = 0;
        self.tail = NONE;
    }

    /// Gives all addresses back. Nothing of the arena's is mapped there any more.
    pub fn release_addresses(&mut self, gpu: &mut impl Gpu) {
        for (start, size) in std::mem::take(&mut self.addresses).ranges {
            gpu.unreserve(start, size);
        }
    }
}
