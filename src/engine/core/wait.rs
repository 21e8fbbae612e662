//! What other streams still use: events on their way, blocks that wait for them, and waiting itself.

use super::block::{BlockId, State};
use super::gpu::{Event, Gpu};
use super::pool::Pool;
use super::stream::StreamKey;

/// Why a freed block is not free yet: what another stream must get past.
enum Use {
    Event(Event),
    /// No event could be recorded; tried again later.
    Stream(StreamKey),
}

/// A block that the program gave back while other streams may still use it.
pub struct Pending {
    block: BlockId,
    uses: Vec<Use>,
}

impl<G: Gpu> Pool<G> {
    /// A freed block that other streams were recorded on waits for events on them.
    #[cold]
    #[inline(never)]
    pub(super) fn defer(&mut self, id: BlockId) {
        let uses = self.uses.remove(&id).unwrap_or_default();
        self.blocks[id].state = State::Pending;
        self.counters.pending_bytes += self.blocks[id].size;
        let uses = uses
            .into_iter()
            .map(|stream| match self.gpu.record(stream) {
                Some(event) => Use::Event(event),
                None => Use::Stream(stream),
            })
            .collect();
        self.pending.push_back(Pending { block: id, uses });
    }

    /// Looks at the events on their way. True if any hole changed hands or any block came free.
    pub(super) fn advance(&mut self, slot: u16) -> bool {
        let mut changed = self.poll_pending();
        if self.slots.streams() > 1 {
            let Self { slots, gpu, .. } = self;
            let mut passed = Vec::new();
            for (other, it) in slots.streams_mut() {
                if other != slot {
                    it.mark(gpu);
                }
                if it.poll(gpu) {
                    passed.push(other);
                }
            }
            for slot in passed {
                changed |= self.release_passed(slot);
            }
        }
        changed
    }

    /// Frees blocks whose other uses are done, in the order of being freed; gives up after a few
    /// that are not, so that many waiting blocks do not make every miss slow.
    fn poll_pending(&mut self) -> bool {
        let (mut at, mut waiting, mut changed) = (0, 0, false);
        while at < self.pending.len() && waiting < 16 {
            let Self { pending, gpu, .. } = self;
            pending[at].uses.retain_mut(|other| {
                if let Use::Stream(stream) = other
                    && let Some(event) = gpu.record(*stream)
                {
                    *other = Use::Event(event);
                }
                match other {
                    Use::Event(event) if gpu.passed(*event) => {
                        gpu.forget(*event);
                        false
                    }
                    _ => true,
                }
            });
            if pending[at].uses.is_empty() {
                if let Some(done) = self.pending.remove(at) {
                    self.finish_pending(done.block);
                    changed = true;
                }
            } else {
                at += 1;
                waiting += 1;
            }
        }
        changed
    }

    fn finish_pending(&mut self, id: BlockId) {
        self.counters.pending_bytes -= self.blocks[id].size;
        self.retire(id);
    }

    /// Holes whose work is done become idle. True if there were any.
    pub(super) fn release_passed(&mut self, slot: u16) -> bool {
        let mut changed = false;
        self.slots.get_mut(slot).keep_order(&mut self.blocks);
        loop {
            let it = self.slots.get_mut(slot);
            let passed = it.passed;
            let Some(id) = it.oldest().filter(|id| self.blocks[*id].detail <= passed) else {
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

    /// Waits until everything that was freed is idle. False where waiting is not possible.
    pub fn settle(&mut self) -> bool {
        let busy = !self.pending.is_empty()
            || self
                .slots
                .iter()
                .any(|(slot, it)| slot != it.idle && it.passed != it.clock);
        if !busy {
            return true;
        }
        self.counters.syncs += 1;
        if !self.gpu.synchronize() {
            return false;
        }
        for done in std::mem::take(&mut self.pending) {
            for other in done.uses {
                if let Use::Event(event) = other {
                    self.gpu.forget(event);
                }
            }
            self.finish_pending(done.block);
        }
        let Self { slots, gpu, .. } = self;
        let mut all = Vec::new();
        for (slot, it) in slots.streams_mut() {
            it.settle(gpu);
            all.push(slot);
        }
        for slot in all {
            self.release_passed(slot);
        }
        true
    }
}
