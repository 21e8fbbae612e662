//! Spans: ranges of a device's memory that other processes may import, each a list of chunks or one plain
//! segment.

use crate::util::secret::Secret;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes of an IPC handle, the library's own or CUDA's.
pub const HANDLE_SIZE: usize = 64;

/// CUDA's own handle of a plain segment (`CUipcMemHandle`).
pub type SegmentHandle = [u8; HANDLE_SIZE];

/// Why memory could not be exported or imported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IpcError {
    /// There is no block in use at the address.
    Unknown,
    /// The memory was freed, or its process has ended.
    Gone,
    /// The system or the driver refused, as the text says.
    Forbidden(String),
}

impl IpcError {
    pub(crate) fn without_secret(error: io::Error) -> IpcError {
        IpcError::Forbidden(format!("the system has no random bytes for it: {error}"))
    }
}

impl fmt::Display for IpcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IpcError::Unknown => {
                write!(f, "it is none of the memory that this allocator allocated")
            }
            IpcError::Gone => write!(
                f,
                "it was freed, or the process that shares it has ended or cannot be reached from \
                 here (another network namespace, as another container has)"
            ),
            IpcError::Forbidden(why) => write!(f, "{why}"),
        }
    }
}

/// Memory that other processes may import: chunks at consecutive addresses, or one plain segment.
pub struct Span {
    /// Unique in the process, and never used again.
    pub number: u64,
    /// A process that knows it may import the whole span.
    pub secret: Secret,
    /// Each chunk's handle, or the segment's address, and its size in bytes.
    pub parts: Vec<(u64, u64)>,
    /// Whether the parts are chunks.
    pub mapped: bool,
}

impl Span {
    /// Bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|(_, size)| size).sum()
    }
}

/// What a process that imports a span is sent.
pub enum Export {
    /// File descriptors of some of its chunks.
    Chunks(Vec<OwnedFd>),
    /// The segment's handle.
    Segment(SegmentHandle),
    /// The driver refused, with this status.
    Failed(u32),
}

/// The spans of one device, by their numbers and by their parts.
#[derive(Default)]
pub struct Spans {
    list: HashMap<u64, Arc<Span>>,
    numbers: HashMap<Vec<(u64, u64)>, u64>,
    /// Spans that the last [`Spans::sweep`] left.
    swept: usize,
}

impl Spans {
    /// The span of these parts, which is added if there is none.
    pub fn find_or_add(
        &mut self,
        parts: Vec<(u64, u64)>,
        mapped: bool,
    ) -> Result<Arc<Span>, IpcError> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if let Some(number) = self.numbers.get(&parts) {
            return Ok(self.list[number].clone());
        }
        let span = Arc::new(Span {
            number: NEXT.fetch_add(1, Relaxed),
            secret: Secret::new().map_err(IpcError::without_secret)?,
            parts: parts.clone(),
            mapped,
        });
        self.numbers.insert(parts, span.number);
        self.list.insert(span.number, span.clone());
        Ok(span)
    }

    /// A span by its number.
    pub fn get(&self, number: u64) -> Option<Arc<Span>> {
        self.list.get(&number).cloned()
    }

    /// Removes the spans of a chunk (by handle) or segment (by address) that is released to the driver.
    pub fn remove_part(&mut self, part: u64) {
        if !self.list.is_empty() {
            self.retain(|span| !span.parts.iter().any(|(it, _)| *it == part));
        }
    }

    /// Whether there are twice as many spans as the last [`Spans::sweep`] left, and at least 1024.
    pub fn needs_sweep(&self) -> bool {
        self.list.len() >= 2 * self.swept.max(512)
    }

    /// Removes spans whose chunks are not at consecutive addresses any more: they were remapped, so no
    /// exported block is in use there. `home` has the address of each chunk.
    pub fn sweep(&mut self, home: &HashMap<u64, u64>) {
        self.retain(|span| {
            let mut next = None;
            let mut parts = span.parts.iter();
            !span.mapped
                || parts.all(|(chunk, size)| {
                    let here = home.get(chunk).copied();
                    let adjoins = here.is_some() && (next.is_none() || next == here);
                    next = here.map(|here| here + size);
                    adjoins
                })
        });
        self.swept = self.list.len();
    }

    fn retain(&mut self, keep: impl Fn(&Span) -> bool) {
        let Spans { list, numbers, .. } = self;
        list.retain(|_, span| keep(span));
        numbers.retain(|_, number| list.contains_key(number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_has_its_number_until_a_part_goes_or_moves() {
        let mut spans = Spans::default();
        let number = |spans: &mut Spans, parts: &[(u64, u64)]| {
            let span = spans.find_or_add(parts.to_vec(), true).expect("a secret");
            assert!(
                spans
                    .get(span.number)
                    .is_some_and(|it| it.secret.matches(&span.secret))
            );
            span.number
        };
        let (long, short) = (vec![(1, 10), (2, 20)], vec![(2, 20)]);
        let first = number(&mut spans, &long);
        assert_eq!(number(&mut spans, &long), first);
        let other = number(&mut spans, &short);
        assert_ne!(other, first);
        assert_eq!(
            spans.get(first).map(|it| it.parts.clone()),
            Some(long.clone())
        );
        spans.sweep(&HashMap::from([(1, 100), (2, 110)]));
        assert!(spans.get(first).is_some() && spans.get(other).is_some());
        // The second chunk moved.
        spans.sweep(&HashMap::from([(1, 100), (2, 120)]));
        assert!(spans.get(first).is_none() && spans.get(other).is_some());
        let again = number(&mut spans, &long);
        assert_ne!(again, first);
        spans.remove_part(1);
        assert!(spans.get(again).is_none() && spans.get(other).is_some());
        assert_eq!(number(&mut spans, &short), other);
        spans.remove_part(2);
        assert!(spans.list.is_empty() && spans.numbers.is_empty());
    }
}
