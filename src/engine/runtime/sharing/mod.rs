//! Memory shared with other processes that have this library.
//!
//! The pool's memory lies in chunks, which CUDA's own handles for other processes
//! (`cudaIpcGetMemHandle`) do not reach. What another process gets is a [`Handle`] of ours, of the same
//! 64 bytes: it names the process and a *span*, the chunks that a block lies in. Whoever wants to open
//! it asks that process, over a Unix socket (`socket`), for file descriptors of the chunks, and maps
//! them side by side (`opened`). A socket needs no permission to look into the other process, which
//! many systems and containers refuse, as `pidfd_getfd` would.
//!
//! A block in use keeps its chunks where they are and from the driver, so a span is good for as long as
//! the block is; whoever shares memory has to keep it until the others are done with it, as with CUDA's
//! own. Chunks may move later: to the other processes they stay what they are. A span is forgotten when
//! the first of its chunks goes back to the driver.
//!
//! A plain segment is shared by CUDA's own handle, which opens the whole of it.

mod given;
mod opened;
mod socket;

pub use given::{forget, give};
pub use opened::{Opened, open, open_given, open_segment};

use std::collections::HashMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The size of a handle in bytes: that of CUDA's own.
pub const HANDLE_SIZE: usize = 64;

/// A handle of CUDA's own for a plain segment (`CUipcMemHandle`).
pub type SegmentHandle = [u8; HANDLE_SIZE];

/// Tells a handle of ours from CUDA's and from other bytes. The last byte is the protocol's version.
const MARK: [u8; 8] = *b"concert\x01";

/// What another process needs to find memory of this one: plain bytes, which may travel any way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Handle {
    mark: [u8; 8],
    /// A number that no other process has.
    process: [u8; 16],
    /// The device that the memory is on.
    device: [u8; 16],
    span: u64,
    /// Bytes from the span's start to the memory.
    offset: u64,
    /// The number under which the memory was given away, where that ends when it is freed; else 0.
    given: u64,
}

const _: () = assert!(size_of::<Handle>() == HANDLE_SIZE);

impl Handle {
    /// A handle of this process's, which answers for it from now on.
    pub(super) fn new(
        device: [u8; 16],
        span: u64,
        offset: u64,
        given: u64,
    ) -> Result<Handle, Unshared> {
        Ok(Handle {
            mark: MARK,
            process: socket::serve()?,
            device,
            span,
            offset,
            given,
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

impl fmt::Display for Unshared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unshared::Unknown => write!(f, "it is not in use"),
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
    /// The chunks' handles, or the segment's address, with their sizes in bytes.
    pub parts: Vec<(u64, u64)>,
    /// They are chunks.
    pub mapped: bool,
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

/// The spans of one device, by their numbers.
#[derive(Default)]
pub struct Spans {
    list: HashMap<u64, Arc<Span>>,
}

impl Spans {
    /// The number of the span of these parts, which is made if there is none. No other span of the
    /// process ever had it.
    pub fn number(&mut self, parts: Vec<(u64, u64)>, mapped: bool) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let known = self.list.iter().find(|(_, span)| span.parts == parts);
        if let Some((number, _)) = known {
            return *number;
        }
        let number = NEXT.fetch_add(1, Relaxed);
        self.list.insert(number, Arc::new(Span { parts, mapped }));
        number
    }

    /// The span of a number.
    pub fn get(&self, number: u64) -> Option<Arc<Span>> {
        self.list.get(&number).cloned()
    }

    /// A chunk, or a segment, goes back to the driver.
    pub fn forget(&mut self, part: u64) {
        if !self.list.is_empty() {
            let has = |span: &Span| span.parts.iter().any(|(it, _)| *it == part);
            self.list.retain(|_, span| !has(span));
        }
    }
}
