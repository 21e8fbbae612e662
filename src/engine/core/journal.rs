//! What happens to memory that the program did not ask for just then: kept only on demand, for
//! whoever writes the history of a program's memory.

/// One thing that happened, with its address and its size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happening {
    /// A block that had been given back while other streams used it came free; the size is what was
    /// asked for, and `stream` the handle of the stream that it was allocated on.
    Completed {
        /// Where the block was.
        address: u64,
        /// What was asked for.
        size: u64,
        /// The stream's handle.
        stream: u64,
    },
    /// A chunk is at home here from now on.
    Mapped(u64, u64),
    /// A chunk is not at home here any more.
    Unmapped(u64, u64),
    /// A plain segment was taken from the driver.
    Taken(u64, u64),
    /// A plain segment was given back to the driver.
    GivenBack(u64, u64),
}

/// The journal: closed at first.
#[derive(Default)]
pub struct Journal(Option<Vec<Happening>>);

impl Journal {
    /// Opens it, or closes it and drops what it has.
    pub fn keep(&mut self, keep: bool) {
        match (keep, &self.0) {
            (true, None) => self.0 = Some(Vec::new()),
            (true, Some(_)) => {}
            (false, _) => self.0 = None,
        }
    }

    /// What happened since this was last asked.
    pub fn take(&mut self) -> Vec<Happening> {
        self.0.as_mut().map(std::mem::take).unwrap_or_default()
    }

    #[inline]
    pub(super) fn note(&mut self, happening: Happening) {
        if let Some(journal) = &mut self.0 {
            journal.push(happening);
        }
    }
}
