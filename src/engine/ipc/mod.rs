//! Memory shared with other processes that have this library.
//!
//! The pool's memory lies in chunks, which CUDA's own handles for other processes
//! (`cudaIpcGetMemHandle`) do not reach. What another process gets is a [`Handle`] of ours, of the same
//! 64 bytes: it names the process and a *span*, the chunks that a block lies in. Whoever wants to open
//! it asks that process, over a Unix socket (`socket`), for file descriptors of the chunks, and maps
//! them side by side (`imported`). A socket needs no permission to look into the other process, which
//! many systems and containers refuse, as `pidfd_getfd` would. Only who has the handle gets an answer: a
//! secret of the span's, or of the allocation's, is in it (`secret`).
//!
//! A block in use keeps its chunks where they are and from the driver, so a span is good for as long as
//! the block is; whoever shares memory has to keep it until the others are done with it, as with CUDA's
//! own. Chunks may move later: to the other processes they stay what they are. A span is forgotten when
//! the first of its chunks goes back to the driver.
//!
//! A plain segment is shared by CUDA's own handle, which opens the whole of it.

mod exported;
mod imported;
mod secret;
mod socket;

pub use exported::{forget, give, note_tensor};
pub use imported::{Imported, open, open_segment};
pub use secret::Secret;
pub(crate) use socket::stop_listening;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The size of a handle in bytes: that of CUDA's own.
pub const HANDLE_SIZE: usize = 64;

/// A handle of CUDA's own for a plain segment (`CUipcMemHandle`).
pub type SegmentHandle = [u8; HANDLE_SIZE];

/// Tells a handle of ours from CUDA's and from other bytes. The last byte is the protocol's version.
const MARK: [u8; 8] = *b"concert\x02";

/// What another process needs to find memory of this one, and to be let have it: plain bytes, which may
/// travel any way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Handle {
    mark: [u8; 8],
    /// A number that no other process has.
    process: [u8; 16],
    /// That of the span, or of an allocation, whose handle ends when it is freed.
    number: u64,
    /// Bytes from the span's start to the memory.
    offset: u64,
    /// Bytes of the memory.
    size: u64,
    /// What belongs to the number.
    secret: Secret,
}

const _: () = assert!(size_of::<Handle>() == HANDLE_SIZE);

impl Handle {
    /// A handle of this process's, which answers for it from now on: of so many bytes, from so many on behind
    /// the start of a span.
    pub(crate) fn new(
        (number, secret): (u64, Secret),
        offset: u64,
        size: u64,
    ) -> Result<Handle, Unshared> {
        Ok(Handle {
            mark: MARK,
            process: socket::serve()?,
            number,
            offset,
            size,
            secret,
        })
    }

    /// The handle that these bytes are; `None` where they are another's.
    pub fn of(bytes: &[u8]) -> Option<Handle> {
        let bytes: [u8; HANDLE_SIZE] = bytes.try_into().ok()?;
        // SAFETY: 64 bytes, of which any make a handle: it is numbers throughout.
        let handle: Handle = unsafe { std::mem::transmute(bytes) };
        (handle.mark == MARK).then_some(handle)
    }

    /// The handle as bytes.
    pub fn bytes(self) -> [u8; HANDLE_SIZE] {
        // SAFETY: numbers throughout, without a gap.
        unsafe { std::mem::transmute(self) }
    }

    /// Whether it is this process's own.
    pub fn is_own(&self) -> bool {
        socket::own_number() == Some(self.process)
    }

    /// Bytes from the span's start to the memory.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes of the memory.
    pub fn size(&self) -> u64 {
        self.size
    }
}

/// Why memory cannot be shared, or what was shared cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unshared {
    /// No block in use is there.
    Unknown,
    /// It is not to be had any more: it was freed, or its process has ended.
    Gone,
    /// The system or the driver does not allow it; says what and why.
    Forbidden(String),
}

impl Unshared {
    fn without_secret(error: io::Error) -> Unshared {
        Unshared::Forbidden(format!("the system has no random bytes for it: {error}"))
    }
}

impl fmt::Display for Unshared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unshared::Unknown => {
                write!(
                    f,
                    "it is none of the memory that this allocator allocated out"
                )
            }
            Unshared::Gone => write!(
                f,
                "it was freed, or the process that shares it has ended or cannot be reached from \
                 here (another network namespace, as another container has)"
            ),
            Unshared::Forbidden(why) => write!(f, "{why}"),
        }
    }
}

/// Memory that other processes may ask for: chunks side by side, or one plain segment.
pub struct Span {
    /// No other span of the process ever had it.
    pub number: u64,
    /// Who has it may ask for any of the span.
    pub secret: Secret,
    /// The chunks' handles, or the segment's address, with their sizes in bytes.
    pub parts: Vec<(u64, u64)>,
    /// They are chunks.
    pub mapped: bool,
}

impl Span {
    /// Bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|(_, size)| size).sum()
    }
}

/// What another process gets of a span.
pub enum Export {
    /// Descriptors of some of its chunks.
    Chunks(Vec<OwnedFd>),
    /// The segment's handle.
    Segment(SegmentHandle),
    /// The driver's status.
    Failed(u32),
}

/// The spans of one device, by their numbers and by their parts.
#[derive(Default)]
pub struct Spans {
    list: HashMap<u64, Arc<Span>>,
    numbers: HashMap<Vec<(u64, u64)>, u64>,
    /// How many there were when they were last looked through.
    kept: usize,
}

impl Spans {
    /// The span of these parts, which is made if there is none.
    pub fn of(&mut self, parts: Vec<(u64, u64)>, mapped: bool) -> Result<Arc<Span>, Unshared> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if let Some(number) = self.numbers.get(&parts) {
            return Ok(self.list[number].clone());
        }
        let span = Arc::new(Span {
            number: NEXT.fetch_add(1, Relaxed),
            secret: Secret::new().map_err(Unshared::without_secret)?,
            parts: parts.clone(),
            mapped,
        });
        self.numbers.insert(parts, span.number);
        self.list.insert(span.number, span.clone());
        Ok(span)
    }

    /// The span of a number.
    pub fn get(&self, number: u64) -> Option<Arc<Span>> {
        self.list.get(&number).cloned()
    }

    /// A chunk, or a segment, goes back to the driver.
    pub fn forget(&mut self, part: u64) {
        if !self.list.is_empty() {
            self.retain(|span| !span.parts.iter().any(|(it, _)| *it == part));
        }
    }

    /// Whether there are so many that it is time to look through them: twice as many as were kept when
    /// that was last done.
    pub fn are_many(&self) -> bool {
        self.list.len() >= 2 * self.kept.max(512)
    }

    /// Keeps those whose parts lie side by side, in their order: no block in use lies in any other, and
    /// none ever will that somebody has the number of. `home` says where a chunk is.
    pub fn keep_together(&mut self, home: &HashMap<u64, u64>) {
        self.retain(|span| {
            let mut next = None;
            let mut parts = span.parts.iter();
            !span.mapped
                || parts.all(|(chunk, size)| {
                    let here = home.get(chunk).copied();
                    let flight = here.is_some() && (next.is_none() || next == here);
                    next = here.map(|here| here + size);
                    flight
                })
        });
        self.kept = self.list.len();
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
            let span = spans.of(parts.to_vec(), true).expect("a secret");
            assert!(
                spans
                    .get(span.number)
                    .is_some_and(|it| it.secret.is(&span.secret))
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
        spans.keep_together(&HashMap::from([(1, 100), (2, 110)]));
        assert!(spans.get(first).is_some() && spans.get(other).is_some());
        // The second chunk moved.
        spans.keep_together(&HashMap::from([(1, 100), (2, 120)]));
        assert!(spans.get(first).is_none() && spans.get(other).is_some());
        let again = number(&mut spans, &long);
        assert_ne!(again, first);
        spans.forget(1);
        assert!(spans.get(again).is_none() && spans.get(other).is_some());
        assert_eq!(number(&mut spans, &short), other);
        spans.forget(2);
        assert!(spans.list.is_empty() && spans.numbers.is_empty());
    }
}
