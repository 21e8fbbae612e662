//! Memory events that no call of the program accounts for, such as mapping a chunk. They are logged only
//! while somebody records a memory history.

/// One event. Numbers are the address and the size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryEvent {
    /// A deferred free has completed: no stream uses the block any more.
    FreeCompleted {
        /// Where the block was.
        address: u64,
        /// The bytes that had been requested.
        size: u64,
        /// The handle of the stream that it was allocated on.
        stream: u64,
    },
    /// A chunk was mapped here, or remapped to here.
    SegmentMapped(u64, u64),
    /// A chunk was unmapped here, or remapped to another address.
    SegmentUnmapped(u64, u64),
    /// A plain segment was allocated by the driver, or supplied.
    SegmentAllocated(u64, u64),
    /// A plain segment was freed.
    SegmentFreed(u64, u64),
}

/// The log of memory events; off at first.
#[derive(Default)]
pub struct EventLog(Option<Vec<MemoryEvent>>);

impl EventLog {
    /// Turns the log on, or turns it off and drops its events.
    pub fn enable(&mut self, on: bool) {
        match (on, &self.0) {
            (true, None) => self.0 = Some(Vec::new()),
            (true, Some(_)) => {}
            (false, _) => self.0 = None,
        }
    }

    /// Takes the events since the last call.
    pub fn drain(&mut self) -> Vec<MemoryEvent> {
        self.0.as_mut().map(std::mem::take).unwrap_or_default()
    }

    #[inline]
    pub(super) fn push(&mut self, event: MemoryEvent) {
        if let Some(log) = &mut self.0 {
            log.push(event);
        }
    }
}
