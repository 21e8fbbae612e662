//! What other streams still use: blocks that wait for them, events on their way, and waiting itself.
//!
//! Events are only ever recorded on a stream while the program passes it to an allocation or to
//! [`Pool::record_use`], or if it is the default stream, which always exists. So nothing is asked of
//! a stream that may have been destroyed, which the driver would not survive.

use super::block::{BlockId, NONE, State};
use super::gpu::Gpu;
use super::pool::{Pool, Unknown};
use super::stream::StreamKey;

/// The legacy default stream's handle.
const DEFAULT: u64 = 0;

/// A block that the program gave back while other streams may still use it: what each of them has to
/// get past.
pub struct Pending {
    block: BlockId,
    waits: Vec<(u16, u64)>,
}

impl<G: Gpu> Pool<G> {
    /// Notes that another stream uses the block, so that freeing it waits for that stream too.
    pub fn record_use(&mut self, address: u64, stream: StreamKey) -> Result<(), Unknown> {
        let id = self.table.get(address);
        if id == NONE {
            return Err(Unknown);
        }
        let own = self.slots.get(self.blocks[id].slot);
        if own.key == stream {
            return Ok(());
        }
        let (group, idle) = (own.group, own.idle);
        let Some(slot) = self.slots.of(stream, group, idle) else {
            // Too many streams: nobody gets the block before everything is done.
            self.blocks[id].shared = true;
            self.uses.entry(id).or_default().push(self.blocks[id].slot);
            return Ok(());
        };
        self.blocks[id].shared = true;
        let uses = self.uses.entry(id).or_default();
        let other = self.slots.get_mut(slot);
        if !uses.contains(&slot) {
            uses.push(slot);
            other.users += 1;
        }
        other.visit(u64::MAX, &mut self.gpu);
        Ok(())
    }

    /// A freed block that other streams were recorded on waits for them.
    #[cold]
    #[inline(never)]
    pub(super) fn defer(&mut self, id: BlockId) {
        self.blocks[id].state = State::Pending;
        self.counters.pending_bytes += self.blocks[id].size;
        let uses = self.uses.remove(&id).unwrap_or_default();
        let waits = uses
            .into_iter()
            .map(|slot| (slot, self.slots.get_mut(slot).await_now()));
        let waits = waits.collect();
        self.pending.push(Pending { block: id, waits });
    }

    /// Looks at the events on their way, and lets go what they held up. True if any hole changed
    /// hands or any block came free.
    pub(super) fn advance(&mut self) -> bool {
        if self.slots.streams() < 2 {
            return false;
        }
        let Self { slots, gpu, .. } = self;
        for (_, it) in slots.streams_mut() {
            if it.key.handle == DEFAULT {
                it.mark(gpu);
            }
            it.poll(gpu);
        }
        self.let_go()
    }

    /// What streams have got past, whoever found that out, becomes idle or free.
    fn let_go(&mut self) -> bool {
        let mut changed = self.finish_pending();
        let due = self
            .slots
            .streams_mut()
            .filter(|(_, it)| it.released != it.passed);
        let due: Vec<u16> = due.map(|(slot, _)| slot).collect();
        for slot in due {
            changed |= self.release_passed(slot);
        }
        changed
    }

    /// Frees the blocks whose other uses are done. True if there were any.
    fn finish_pending(&mut self) -> bool {
        let slots = &self.slots;
        let is_done = |waiting: &Pending| {
            waiting
                .waits
                .iter()
                .all(|(slot, clock)| slots.get(*slot).passed >= *clock)
        };
        let (done, waiting) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition(is_done);
        self.pending = waiting;
        let done: Vec<Pending> = done;
        for Pending { block, waits } in &done {
            for (slot, _) in waits {
                let other = self.slots.get_mut(*slot);
                other.users = other.users.saturating_sub(1);
            }
            self.counters.pending_bytes -= self.blocks[*block].size;
            self.retire(*block);
        }
        !done.is_empty()
    }

    /// Holes whose work is done become idle. True if there were any.
    fn release_passed(&mut self, slot: u16) -> bool {
        let mut changed = false;
        self.slots.get_mut(slot).keep_order(&mut self.blocks);
        loop {
            let it = self.slots.get_mut(slot);
            let passed = it.passed;
            let Some(id) = it.oldest().filter(|id| self.blocks[*id].detail <= passed) else {
                it.released = passed;
                it.forget_order();
                return changed;
            };
            it.remove(&mut self.blocks, id);
            let idle = it.idle;
            self.counters.hole_removed(self.blocks[id].size);
            self.add_hole(id, idle, 0);
            changed = true;
        }
    }

    /// Whether memory is held up by a stream that is gone: only waiting for the device frees it.
    pub(super) fn is_held_up(&self) -> bool {
        self.slots
            .iter()
            .any(|(_, it)| it.dead && (!it.bins.is_empty() || it.awaited > it.passed))
    }

    /// Waits until everything that was freed is idle. False where waiting is not possible.
    pub fn settle(&mut self) -> bool {
        let busy = |(slot, it): (u16, &super::stream::Slot)| {
            slot != it.idle && (it.passed != it.clock || !it.bins.is_empty())
        };
        if self.pending.is_empty() && !self.slots.iter().any(busy) {
            return true;
        }
        self.counters.syncs += 1;
        if !self.gpu.synchronize() {
            return false;
        }
        // Twice: blocks that waited for other streams are freed on their own only now, and the work
        // before that is done as well.
        for _ in 0..2 {
            let Self { slots, gpu, .. } = self;
            slots.streams_mut().for_each(|(_, it)| it.settle(gpu));
            self.let_go();
        }
        true
    }
}
