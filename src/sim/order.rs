//! Enqueueing: the order of work, and the checks that follow from it.
//!
//! The order follows from CUDA's rules only, never from the order in which the simulation happens to execute
//! work, so a missing dependency is found on every run.

use crate::memory::Piece;
use crate::shadow::Touch;
use crate::state::State;
use crate::stream::{Item, Kind};
use crate::work::Work;

impl State {
    /// Puts work at the end of a stream, after the given work of another slot too; answers with
    /// its sequence number. Accesses are checked here.
    pub fn submit(&mut self, slot: u32, work: Work, wait: Option<(u32, u64)>) -> u64 {
        let after = self.order(slot, wait);
        let (sequence, device) = {
            let stream = self.streams.get(slot);
            (stream.enqueued, stream.device)
        };
        if self.config.checks {
            let (reads, writes) = work.accesses();
            if let Some((address, bytes)) = reads {
                self.check_access(slot, sequence, address, bytes, false);
            }
            if let Some((address, bytes)) = writes {
                self.check_access(slot, sequence, address, bytes, true);
            }
            if !self.streams.get(slot).unseen {
                self.streams.get_mut(slot).unseen = true;
                self.devices[device].unseen.push(slot);
            }
        }
        self.ordinal += 1;
        let ordinal = self.ordinal;
        self.streams.push(
            slot,
            Item {
                sequence,
                ordinal,
                after,
                work,
            },
        );
        self.pacer.schedule(slot, sequence);
        sequence
    }

    /// Takes the next sequence number of a stream and joins into its clock all that comes before
    /// it; answers with the work of other slots that is still to be done first.
    fn order(&mut self, slot: u32, wait: Option<(u32, u64)>) -> Vec<(u32, u64)> {
        let mut after = Vec::new();
        let checks = self.config.checks;
        let mut clock = std::mem::take(&mut self.streams.get_mut(slot).clock);
        if let Some((other, sequence)) = wait
            && other != slot
            && !self.streams.done(other, sequence)
        {
            after.push((other, sequence));
        }
        let stream = self.streams.get(slot);
        let (device, kind) = (stream.device, stream.kind);
        if checks && stream.host_seen != self.host_version {
            clock.join(&self.host);
            self.streams.get_mut(slot).host_seen = self.host_version;
        }
        match kind {
            // The legacy stream comes after all blocking streams' work so far …
            Kind::Legacy => {
                for other in std::mem::take(&mut self.devices[device].dirty) {
                    let blocking = self.streams.get_mut(other);
                    if blocking.kind != Kind::Blocking || blocking.device != device {
                        continue;
                    }
                    blocking.dirty = false;
                    if checks {
                        clock.join(&blocking.clock);
                    }
                    if blocking.done < blocking.enqueued {
                        after.push((other, blocking.enqueued));
                    }
                }
            }
            // … and before all that they enqueue later.
            Kind::Blocking => {
                let legacy_slot = self.streams.legacy(device);
                let legacy = self.streams.get(legacy_slot);
                let (enqueued, done) = (legacy.enqueued, legacy.done);
                if self.streams.get(slot).legacy_seen != enqueued {
                    if checks {
                        clock.join(&legacy.clock);
                    }
                    if done < enqueued {
                        after.push((legacy_slot, enqueued));
                    }
                    self.streams.get_mut(slot).legacy_seen = enqueued;
                }
                if !self.streams.get(slot).dirty {
                    self.streams.get_mut(slot).dirty = true;
                    self.devices[device].dirty.push(slot);
                }
            }
            Kind::NonBlocking => {}
        }
        let stream = self.streams.get_mut(slot);
        stream.enqueued += 1;
        if checks {
            clock.set(slot, stream.enqueued);
        }
        stream.clock = clock;
        after
    }

    /// Checks an access that a stream's newest work makes: in order after the last ones to the
    /// same physical bytes, and to bytes that someone owns.
    fn check_access(&mut self, slot: u32, sequence: u64, address: u64, bytes: u64, writes: bool) {
        let me = Touch { slot, sequence };
        let verb = if writes { "write" } else { "read" };
        let owners = self.claims && !self.unclaimed_ok;
        let (mut reached, mut left) = (address, bytes);
        let (mut race, mut unowned) = (None, None);
        // What is not mapped now is the executing side's to find: it may be mapped by then.
        while let Some(piece) = self.memory.piece(reached, left) {
            if let Some(mapping) = self.memory.mapping_mut(piece.mapping) {
                mapping.touch(me);
            }
            let clock = &self.streams.get(slot).clock;
            if let Some(chunk) = self.memory.chunk_mut(piece.chunk) {
                let (from, to) = (piece.offset, piece.offset + piece.length);
                if owners && unowned.is_none() {
                    let gap = chunk.owners.first_gap(from, to);
                    unowned = gap.map(|gap| piece.address + (gap - from));
                }
                let conflict = chunk.shadow.touch((from, to), writes, me, clock);
                race = race.or(conflict.map(|conflict| {
                    (
                        piece.address + conflict.offset.saturating_sub(from),
                        conflict,
                    )
                }));
            }
            reached += piece.length;
            left -= piece.length;
        }
        if let Some((at, conflict)) = race {
            let earlier = if conflict.wrote { "write" } else { "read" };
            let (mine, other) = (self.streams.label(slot), conflict.earlier);
            let theirs = self.streams.label(other.slot);
            self.violation(format!(
                "unordered reuse: {verb} of {bytes} bytes at {address:#x} on {mine} is not ordered \
                 after the {earlier} at {at:#x} on {theirs} (its work {})",
                other.sequence
            ));
        }
        if let Some(at) = unowned {
            let mine = self.streams.label(slot);
            self.violation(format!(
                "touches freed memory: {verb} of {bytes} bytes at {address:#x} on {mine}, no owner \
                 at {at:#x}"
            ));
        }
    }

    /// Checks that a mapping which goes away is done with: its work known to be complete, its
    /// owners gone.
    pub fn check_unmap(&mut self, function: &str, mapping: u32) {
        if !self.config.checks {
            return;
        }
        let Some(mapping) = self.memory.mapping(mapping) else {
            return;
        };
        let (address, size, claims) = (mapping.address, mapping.size, mapping.claims);
        let unknown = mapping
            .uses
            .iter()
            .find(|last| self.host.get(last.slot) < last.sequence);
        if let Some(last) = unknown.copied() {
            let label = self.streams.label(last.slot);
            self.violation(format!(
                "unmap overtakes running work: {function} of {size} bytes at {address:#x}, used by \
                 {label} (its work {}), which is not known to be complete",
                last.sequence
            ));
        }
        if claims > 0 {
            self.violation(format!(
                "unmap of owned memory: {function} of {size} bytes at {address:#x}, where {claims} \
                 claims live"
            ));
        }
    }

    // Ownership, as test harnesses declare it.

    /// Notes that the bytes belong to `owner` from now on.
    pub fn claim(&mut self, address: u64, bytes: u64, owner: u64) {
        if !self.config.checks {
            return;
        }
        self.claims = true;
        for piece in self.claimed_pieces("claim", address, bytes) {
            let (from, to) = (piece.offset, piece.offset + piece.length);
            let Some(chunk) = self.memory.chunk_mut(piece.chunk) else {
                continue;
            };
            let other = chunk
                .owners
                .overlapping(from, to)
                .next()
                .map(|(_, _, other)| *other);
            chunk.owners.set(from, to, owner);
            if let Some(mapping) = self.memory.mapping_mut(piece.mapping) {
                mapping.claims += 1;
            }
            if let Some(other) = other {
                self.violation(format!(
                    "overlap: two live owners, {other} and {owner}, of {bytes} bytes at {address:#x}"
                ));
            }
        }
    }

    /// Notes that the bytes, claimed before as they are named now, belong to nobody.
    pub fn disown(&mut self, address: u64, bytes: u64) {
        if !self.config.checks {
            return;
        }
        for piece in self.claimed_pieces("disown", address, bytes) {
            let (from, to) = (piece.offset, piece.offset + piece.length);
            let Some(chunk) = self.memory.chunk_mut(piece.chunk) else {
                continue;
            };
            let gap = chunk.owners.first_gap(from, to);
            chunk.owners.remove(from, to);
            if let Some(mapping) = self.memory.mapping_mut(piece.mapping) {
                mapping.claims = mapping.claims.saturating_sub(1);
            }
            if gap.is_some() {
                self.violation(format!(
                    "disown of {bytes} bytes at {address:#x}, not all of which has an owner"
                ));
            }
        }
    }

    fn claimed_pieces(&mut self, verb: &str, address: u64, bytes: u64) -> Vec<Piece> {
        let pieces: Vec<Piece> = self.memory.pieces(address, bytes).collect();
        if pieces.iter().map(|piece| piece.length).sum::<u64>() < bytes {
            self.violation(format!(
                "{verb} of {bytes} bytes at {address:#x}, not all mapped"
            ));
        }
        pieces
    }
}
