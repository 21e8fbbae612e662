//! Plain segments: where memory cannot be mapped, the user does not want it, or somebody else
//! supplies it, for a private pool whose memory is not to be the driver's.

use super::arena::GroupId;
use super::block::{BlockId, State};
use super::gpu::{Gpu, Refusal};
use super::journal::Happening;
use super::pool::Pool;

impl<G: Gpu> Pool<G> {
    /// Whether a group's memory comes in plain segments.
    pub(super) fn is_plain_group(&self, id: GroupId) -> bool {
        self.granularity == 0 || self.groups[id as usize].supplied
    }

    /// From now on each block of a group takes a whole segment, where its memory comes in such.
    pub fn keep_whole(&mut self, id: GroupId) {
        self.groups[id as usize].whole = self.is_plain_group(id);
    }

    /// How large a segment for a request is, as in PyTorch: 2 MiB for small ones, 20 MiB up to 10 MiB,
    /// the request rounded up to 2 MiB above (`kSmallBuffer`, `kLargeBuffer`, `kMinLargeAlloc`).
    pub(super) fn segment_size(&self, size: u64, id: GroupId) -> u64 {
        if self.groups[id as usize].whole {
            size.next_multiple_of(2 << 20)
        } else if size <= super::SMALL {
            2 << 20
        } else if size < 10 << 20 {
            20 << 20
        } else {
            size.next_multiple_of(2 << 20)
        }
    }

    /// Takes a plain segment from the driver.
    pub(super) fn add_segment(&mut self, size: u64, id: GroupId) -> Result<BlockId, Refusal> {
        let bytes = self.segment_size(size, id);
        let address = self.gpu.allocate(bytes)?;
        Ok(self.hold_segment(address, bytes, id))
    }

    /// A group whose memory is supplied gets so many bytes more, a multiple of 512, at an address that is
    /// one, too. They are its own until [`Pool::take_returned`] names them.
    pub fn supply(&mut self, address: u64, bytes: u64, id: GroupId) {
        self.hold_segment(address, bytes, id);
    }

    /// A supplied segment that is not needed any more, by address and size: no work uses it. It is not
    /// named again.
    pub fn take_returned(&mut self) -> Option<(u64, u64)> {
        self.returned.pop()
    }

    fn hold_segment(&mut self, address: u64, bytes: u64, id: GroupId) -> BlockId {
        let group = &mut self.groups[id as usize];
        group.segments.insert(address, bytes);
        group.reserved += bytes;
        let idle = group.idle;
        self.counters.growths += 1;
        self.counters.chunk_added(bytes);
        self.journal.note(Happening::Taken(address, bytes));
        let block = self.blocks.add(address, bytes, idle, State::Free);
        self.counters.hole_added(bytes);
        self.slots.get_mut(idle).insert(&mut self.blocks, block);
        block
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
            returned,
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
            match group.supplied {
                true => returned.push((hole.address, hole.size)),
                false => gpu.free(hole.address, hole.size),
            }
            counters.chunk_removed(hole.size);
            journal.note(Happening::GivenBack(hole.address, hole.size));
            bytes += hole.size;
        }
        bytes
    }
}
