//! Arenas: memory that serves only its own requests. The first is shared by all that name no other; each
//! private pool (a CUDA graph's, or a `MemPool` of PyTorch's) has one of its own.

use super::address_space::AddressSpace;
use super::block::{BlockId, NONE};
use super::chunk::Chunks;
use super::gpu::Gpu;
use super::ids::ArenaId;
use super::reserved_bytes::ReservedBytes;
use std::collections::HashMap;

/// Private arenas with work to be done.
#[derive(Default)]
pub struct PendingArenas {
    /// May have free blocks that are not idle.
    pub with_frees: Vec<ArenaId>,
    /// Closing, and nothing in them is live any more.
    pub to_trim: Vec<ArenaId>,
    /// Closing, and to be trimmed with the whole pool: a part of them was freed, the driver refused to unmap
    /// something, or a captured graph may use them.
    pub to_trim_later: Vec<ArenaId>,
    /// The epoch that the device has to complete for the first arenas of `to_trim` to be trimmed without
    /// waiting, and how many they are.
    pub trim_epoch: (u64, usize),
}

impl PendingArenas {
    /// A block was freed in an arena that notes frees.
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

    /// Queues a closing arena to be trimmed with the whole pool.
    pub fn queue_for_later(&mut self, arena: &mut Arena, id: ArenaId) {
        if !std::mem::replace(&mut arena.queued_for_trim, true) {
            self.to_trim_later.push(id);
        }
    }
}

/// An arena and its memory: chunks, or plain segments.
pub struct Arena {
    /// The free list of the arena's idle memory.
    pub idle: u16,
    pub chunks: Chunks,
    pub addresses: AddressSpace,
    /// Its memory is plain segments supplied from outside, not the driver's; see
    /// [`Pool::add_supplied_segment`](super::Pool::add_supplied_segment).
    pub supplied: bool,
    /// Each block is a whole plain segment.
    pub whole_segments: bool,
    /// Plain segments: start and size.
    pub segments: HashMap<u64, u64>,
    /// Where growth maps the next chunk, and the block that ends there; `NONE` at the start of a run.
    pub cursor: u64,
    pub tail: BlockId,
    /// Bytes of live blocks, and their peak.
    pub live: u64,
    pub peak_live: u64,
    /// Bytes taken from the driver, or supplied.
    pub reserved: u64,
    /// The same as PyTorch counts it.
    pub bytes: ReservedBytes,
    /// Bytes of addresses where mapping failed and may have left something behind.
    pub abandoned: u64,
    /// The value of [`Epochs::advances`](super::epoch::Epochs) when completed work was last applied.
    pub idle_as_of: u64,
    /// A free has to be noted. In a private arena: the first since all its free memory was idle, and each one
    /// while it is closing. In the shared one: while frees get events of their own.
    pub notes_frees: bool,
    /// Nobody allocates from it any more; it goes with its last block.
    pub closing: bool,
    /// It is in [`PendingArenas::to_trim_later`].
    pub queued_for_trim: bool,
    /// A block was freed in a capture while the arena was closing. The graph may use it in replays, so its
    /// memory stays until the cache is emptied, as with PyTorch's own allocator.
    pub captured: bool,
    /// Gone: it has no memory, and its id can be used again.
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
            bytes: ReservedBytes::default(),
            abandoned: 0,
            idle_as_of: 0,
            notes_frees: false,
            closing: false,
            queued_for_trim: false,
            captured: false,
            removed: false,
        }
    }

    /// Mapping `size` bytes at the cursor failed: the next run starts at other addresses.
    pub fn abandon(&mut self, size: u64) {
        self.addresses.mark_mapped(self.cursor, size);
        self.abandoned += size;
        self.cursor = 0;
        self.tail = NONE;
    }

    /// Gives all addresses back. Nothing is mapped there any more.
    pub fn release_addresses(&mut self, gpu: &mut impl Gpu) {
        for (start, size) in std::mem::take(&mut self.addresses).ranges {
            gpu.unreserve(start, size);
        }
    }
}
