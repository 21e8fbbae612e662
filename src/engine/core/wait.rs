//! What is still in use somewhere: blocks that wait, events on their way, and waiting itself.

use super::block::{BlockId, NONE, State};
use super::gpu::Gpu;
use super::group::SHARED;
use super::journal::Happening;
use super::pool::{Pool, Unknown};
use super::stream::{Slot, StreamKey, UNORDERED};

/// A block that the program gave back while other streams may still use it, and what the clock has to
/// get past before it is free.
#[derive(Clone, Copy)]
pub(super) struct Pending {
    pub block: BlockId,
    pub until: u64,
}

impl<G: Gpu> Pool<G> {
    /// Notes that another stream uses the block, so that freeing it waits for that stream's work too.
    pub fn record_use(&mut self, address: u64, stream: StreamKey) -> Result<(), Unknown> {
        let id = self.table.get(&self.blocks, address);
        if id == NONE {
            return Err(Unknown);
        }
        self.blocks[id].shared |= self.slots.get(self.blocks[id].slot).key != stream;
        Ok(())
    }

    /// A freed block that other streams were recorded on waits until their work up to now is done.
    #[cold]
    #[inline(never)]
    pub(super) fn defer(&mut self, id: BlockId) {
        let size = self.blocks[id].size;
        self.blocks[id].state = State::Pending;
        self.counters.deferred(size, self.blocks[id].detail);
        let until = self.clock.tick(size);
        if self.pending.is_empty() {
            self.looks = 0;
        }
        self.clock.set_waited(true);
        self.pending.push_back(Pending { block: id, until });
    }

    /// What the block is called that was put off last, as long as it waits.
    pub fn last_pending(&self) -> Option<u64> {
        self.pending.back().map(|pending| pending.until)
    }

    /// What its own stream does from now on comes after all that other streams do with a block that waits,
    /// by this name: that stream has it again. Nothing where it waits no more.
    pub fn rejoin(&mut self, name: u64) {
        // No two frees have the same time, and they wait in its order.
        let found = self.pending.binary_search_by_key(&name, |it| it.until);
        if let Some(Pending { block, until }) = found.ok().and_then(|at| self.pending.remove(at)) {
            self.complete(block);
            self.retire_to(block, self.blocks[block].slot, until);
        }
    }

    /// Looks at the events on their way, and lets go what they held up. True if any hole changed
    /// hands or any block came free.
    pub(super) fn advance(&mut self) -> bool {
        if self.pending.is_empty() && self.slots.streams() < 2 {
            return false;
        }
        self.clock.mark(&mut self.gpu);
        self.clock.poll(&mut self.gpu);
        self.let_go()
    }

    /// With memory of several streams, or blocks that wait, one event for each 16th of the memory freed, and
    /// at least a chunk of it, lets others have it soon. An event costs 163 ns (H100), and as much again
    /// what is asked before it. Twice as many have no fewer chunks moved in prefetch_streams, whose work is
    /// 2 to 50 events late; half as many have more.
    ///
    /// True if a block came free that waited: another hole may be the best now.
    #[inline(always)]
    pub(super) fn keep_time(&mut self, by: StreamKey, reserved: u64) -> bool {
        let least = (reserved / 16).max(self.granularity);
        self.clock.unmarked > least && self.look(by, least)
    }

    /// While blocks wait, also at every allocation whose number is a power of two, counted from when the
    /// first of them was freed, or one came free: the first marks, so that the second can find out. That is
    /// an event and a question a block where the device keeps up, and a few questions in all where it is far
    /// behind.
    #[cold]
    #[inline(never)]
    fn look(&mut self, by: StreamKey, least: u64) -> bool {
        let waits = !self.pending.is_empty();
        self.clock.set_waited(waits);
        self.looks += u64::from(waits);
        let due = waits && self.looks.is_power_of_two() && self.gpu.may_wait();
        let much = self.clock.has_unmarked(least);
        let asked = self.clock.asked() || much && (waits || self.slots.several_hold());
        if !(asked || due) {
            if much {
                self.clock.skip();
            }
            return false;
        }
        self.gpu.attend(Some(by));
        self.clock.poll(&mut self.gpu);
        let came = due && self.let_pending_go();
        if came {
            // It keeps up: so the count begins anew, or where some block always waits it would never end.
            self.looks = 0;
        }
        if asked || !self.pending.is_empty() {
            self.clock.mark(&mut self.gpu);
        }
        self.gpu.attend(None);
        came
    }

    /// What the clock has passed, whoever found that out, becomes free or idle. True if there was any.
    fn let_go(&mut self) -> bool {
        if self.clock.released == self.clock.passed {
            return false;
        }
        let passed = self.clock.passed;
        self.clock.released = passed;
        // A private pool's holes are looked at when memory is wanted there.
        self.let_pending_go() | self.release_group_up_to(SHARED, passed)
    }

    /// Blocks that wait for what the clock has passed become free. True if there were any.
    pub(super) fn let_pending_go(&mut self) -> bool {
        let passed = self.clock.passed;
        let mut changed = false;
        while let Some(done) = self.pending.front()
            && done.until <= passed
        {
            let id = done.block;
            self.pending.pop_front();
            self.complete(id);
            // Its own stream's work before the free is done as well.
            let idle = self.slots.get(self.blocks[id].slot).idle;
            self.retire_to(id, idle, 0);
            changed = true;
        }
        changed
    }

    /// A block that was freed waits for no other stream any more; it is to become a hole.
    pub(super) fn complete(&mut self, id: BlockId) {
        let block = self.blocks[id];
        self.counters.let_go(block.size, block.detail);
        self.journal.note(Happening::Completed {
            address: block.address,
            size: block.detail,
            stream: self.slots.get(block.slot).key.handle,
        });
    }

    /// What no stream orders is idle as it is, and becomes anybody's.
    fn release_unordered(&mut self) {
        let slots = self.unsettled_slots().filter(|(_, it)| it.key == UNORDERED);
        let slots: Vec<u16> = slots.map(|(slot, _)| slot).collect();
        for slot in slots {
            self.release(slot, u64::MAX);
        }
    }

    /// A slot's holes that were freed up to some time become idle. True if there were any.
    pub(super) fn release(&mut self, slot: u16, passed: u64) -> bool {
        let mut changed = false;
        self.slots.get_mut(slot).keep_order(&mut self.blocks);
        loop {
            let it = self.slots.get_mut(slot);
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
        self.release_unordered();
        let is_idle = |(slot, it): (u16, &Slot)| slot == it.idle || it.bins.is_empty();
        if self.pending.is_empty() && self.unsettled_slots().all(is_idle) {
            self.watch_settled();
            return true;
        }
        self.counters.syncs += 1;
        if !self.gpu.synchronize() {
            return false;
        }
        self.clock.settle(&mut self.gpu);
        // Whatever was let go at this clock before has to be looked at again.
        self.clock.released = 0;
        self.let_go();
        self.watch_settled();
        true
    }

    /// The slots of all groups that may have holes which are not idle.
    fn unsettled_slots(&self) -> impl Iterator<Item = (u16, &Slot)> {
        let groups = [SHARED]
            .into_iter()
            .chain(self.due.unsettled.iter().copied());
        groups.flat_map(|id| self.slots.of_group(id))
    }

    /// All work is done: what private pools have free is idle, until more is freed there.
    fn watch_settled(&mut self) {
        for id in std::mem::take(&mut self.due.unsettled) {
            self.release_group_up_to(id, u64::MAX);
            self.groups[id as usize].watched = true;
        }
    }
}
