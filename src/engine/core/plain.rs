//! Plain segments: where memory cannot be mapped, the user does not want it, or another allocator gives it.

use super::block::{BlockId, State};
use super::gpu::{Gpu, Refusal};
use super::group::GroupId;
use super::journal::Happening;
use super::pool::Pool;

impl<G: Gpu> Pool<G> {
    /// Whether a group's memory comes in plain segments.
    pub(super) fn is_plain_group(&self, id: GroupId) -> bool {
        self.granularity == 0 || self.groups[id as usize].source.is_some()
    }

    /// From now on each block of a group takes a whole segment, where its memory comes in such.
    pub fn keep_whole(&mut self, id: GroupId) {
        self.groups[id as usize].whole = self.is_plain_group(id);
    }

    /// Takes a plain segment, of PyTorch's sizes: 2 MiB for small requests, 20 MiB up to 10 MiB,
    /// the request rounded up to 2 MiB above (`kSmallBuffer`, `kLargeBuffer`, `kMinLargeAlloc`).
    pub(super) fn add_segment(&mut self, size: u64, id: GroupId) -> Result<BlockId, Refusal> {
        let bytes = if self.groups[id as usize].whole {
            size.next_multiple_of(2 << 20)
        } else if size <= super::SMALL {
            2 << 20
        } else if size < 10 << 20 {
            20 << 20
        } else {
            size.next_multiple_of(2 << 20)
        };
        let group = &mut self.groups[id as usize];
        let address = self.gpu.allocate(bytes, group.source)?;
        group.segments.insert(address, bytes);
        group.reserved += bytes;
        let idle = group.idle;
        self.counters.growths += 1;
        self.counters.chunk_added(bytes);
        self.journal.note(Happening::Taken(address, bytes));
        let block = self.blocks.add(address, bytes, idle, State::Free);
        self.counters.hole_added(bytes);
        self.slots.get_mut(idle).insert(&mut self.blocks, block);
        Ok(block)
    }

    /// Gives plain segments back that are wholly free and idle.
    pub(super) fn trim_segments(&mut self, id: GroupId) -> u64 {
        // Freeing waits for the device.
        if !self.gpu.may_wait() {
            return 0;
        }
        let Self {
            blocks,
            slots,
            gpu,
            counters,
            groups,
            journal,
            ..
        } = self;
        let group = &mut groups[id as usize];
        let idle = slots.get_mut(group.idle);
        let whole = |id: &BlockId| {
            let hole = &blocks[*id];
            group.segments.get(&hole.address) == Some(&hole.size)
        };
        let whole: Vec<BlockId> = idle.bins.descending(blocks).filter(whole).collect();
        let mut bytes = 0;
        for id in whole {
            let hole = blocks[id];
            idle.remove(blocks, id);
            counters.hole_removed(hole.size);
            blocks.remove(id);
            group.segments.remove(&hole.address);
            group.reserved -= hole.size;
            gpu.free(hole.address, hole.size, group.source);
            counters.chunk_removed(hole.size);
            journal.note(Happening::GivenBack(hole.address, hole.size));
            bytes += hole.size;
        }
        bytes
    }
}
