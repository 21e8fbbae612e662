//! The race detector's record of the last accesses to each chunk.
//!
//! A write must be ordered after all earlier accesses, a read after the last write; two reads do not race.
//! Accesses are recorded by granules of 512 bytes, as ranges.

use crate::clock::Clock;
use crate::interval::Intervals;

/// The granularity of the record: the smallest allocation of the driver.
pub(crate) const GRANULE: u64 = 512;

/// One access: the stream slot, and the sequence number of its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Touch {
    pub slot: u32,
    pub sequence: u64,
}

impl Touch {
    /// Whether this access is ordered before work on `slot` with this `clock`.
    pub fn before(self, slot: u32, clock: &Clock) -> bool {
        self.slot == slot || clock.get(self.slot) >= self.sequence
    }
}

/// An access that the new one is not ordered after.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conflict {
    pub offset: u64,
    pub earlier: Touch,
    pub wrote: bool,
}

#[derive(Clone, Debug, Default)]
struct History {
    write: Option<Touch>,
    /// Reads since that write, those only that no later read is ordered after.
    reads: Vec<Touch>,
}

/// The last accesses of one physical chunk.
#[derive(Debug, Default)]
pub(crate) struct Shadow(Intervals<History>);

impl Shadow {
    /// Records an access to the bytes `[from, to)` and returns the first race found. The new access replaces
    /// the one that it races with, so that one mistake is reported once.
    pub fn touch(
        &mut self,
        (from, to): (u64, u64),
        writes: bool,
        me: Touch,
        clock: &Clock,
    ) -> Option<Conflict> {
        let from = from - from % GRANULE;
        let to = to.next_multiple_of(GRANULE);
        if writes {
            self.write(from, to, me, clock)
        } else {
            self.read(from, to, me, clock)
        }
    }

    fn write(&mut self, from: u64, to: u64, me: Touch, clock: &Clock) -> Option<Conflict> {
        let mut conflict = None;
        for (start, _, history) in self.0.overlapping(from, to) {
            let offset = start.max(from);
            let write = history.write.iter().map(|earlier| (earlier, true));
            let reads = history.reads.iter().map(|earlier| (earlier, false));
            conflict = write
                .chain(reads)
                .find(|(earlier, _)| !earlier.before(me.slot, clock))
                .map(|(&earlier, wrote)| Conflict {
                    offset,
                    earlier,
                    wrote,
                });
            if conflict.is_some() {
                break;
            }
        }
        self.0.set(
            from,
            to,
            History {
                write: Some(me),
                reads: Vec::new(),
            },
        );
        conflict
    }

    fn read(&mut self, from: u64, to: u64, me: Touch, clock: &Clock) -> Option<Conflict> {
        let mut conflict = None;
        self.0
            .update(from, to, History::default(), |offset, history| {
                if let Some(earlier) = history.write
                    && !earlier.before(me.slot, clock)
                {
                    conflict = conflict.or(Some(Conflict {
                        offset,
                        earlier,
                        wrote: true,
                    }));
                    history.write = None;
                }
                history
                    .reads
                    .retain(|earlier| !earlier.before(me.slot, clock));
                history.reads.push(me);
            });
        conflict
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock(of: &[u64]) -> Clock {
        let mut clock = Clock::default();
        for (slot, sequence) in of.iter().enumerate() {
            clock.set(slot as u32, *sequence);
        }
        clock
    }

    fn at(slot: u32, sequence: u64) -> Touch {
        Touch { slot, sequence }
    }

    #[test]
    fn writes_need_order_and_reads_share() {
        let mut shadow = Shadow::default();
        assert!(
            shadow
                .touch((0, 4096), true, at(0, 1), &clock(&[1]))
                .is_none()
        );
        // Ordered readers on two streams, not ordered among themselves.
        assert!(
            shadow
                .touch((0, 4096), false, at(1, 1), &clock(&[1, 1]))
                .is_none()
        );
        assert!(
            shadow
                .touch((0, 4096), false, at(2, 1), &clock(&[1, 0, 1]))
                .is_none()
        );
        // A writer that knows of one reader only.
        let conflict = shadow
            .touch((512, 513), true, at(0, 2), &clock(&[2, 1]))
            .unwrap();
        assert_eq!(
            (conflict.offset, conflict.earlier, conflict.wrote),
            (512, at(2, 1), false)
        );
        // Outside that granule the readers still count; one that knows both is in order.
        assert!(
            shadow
                .touch((0, 512), true, at(0, 3), &clock(&[3, 1, 1]))
                .is_none()
        );
        assert!(
            shadow
                .touch((1024, 4096), false, at(3, 1), &Clock::default())
                .is_some()
        );
    }

    #[test]
    fn accesses_are_rounded_to_granules() {
        let mut shadow = Shadow::default();
        assert!(shadow.touch((0, 1), true, at(0, 1), &clock(&[1])).is_none());
        assert!(
            shadow
                .touch((511, 512), true, at(1, 1), &clock(&[0, 1]))
                .is_some()
        );
        assert!(
            shadow
                .touch((512, 600), true, at(2, 1), &clock(&[0, 0, 1]))
                .is_none()
        );
    }
}
