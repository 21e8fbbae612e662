//! Pieces of work in a stream's queue, and executing them.

use crate::memory::{Memory, Span};
use std::ffi::c_void;

/// A range of device memory: address and bytes.
pub(crate) type Range = (u64, u64);

/// A piece of work. Host addresses are plain numbers: the caller that enqueued it keeps them valid.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    /// So many words of `width` bytes (1, 2 or 4), the low ones of `value`.
    Fill {
        to: u64,
        value: u32,
        width: u8,
        count: u64,
    },
    /// `between`: the devices that reach `to` and `from`, where that is not the stream's.
    Copy {
        to: u64,
        from: u64,
        bytes: u64,
        between: Option<(usize, usize)>,
    },
    Read {
        to: usize,
        from: u64,
        bytes: u64,
    },
    /// The bytes are taken when the copy is enqueued, as the driver stages pageable memory.
    Write {
        to: u64,
        bytes: Vec<u8>,
    },
    /// From host memory, which is read when the copy's turn comes: page-locked memory.
    Fetch {
        to: u64,
        from: usize,
        bytes: u64,
    },
    /// Within host memory.
    Host {
        to: usize,
        from: usize,
        bytes: u64,
    },
    /// Ends an allocation of a pool.
    Free {
        address: u64,
        bytes: u64,
    },
    Call {
        function: unsafe extern "C" fn(*mut c_void),
        argument: usize,
    },
    /// An event record, a wait, or a mere place in the order.
    Mark,
}

/// An address that work could not reach.
#[derive(Debug)]
pub(crate) struct Fault(pub u64);

impl Work {
    /// The device memory it reads and the memory it writes.
    pub fn accesses(&self) -> (Option<Range>, Option<Range>) {
        match *self {
            Work::Fill {
                to, width, count, ..
            } => (None, Some((to, count * u64::from(width)))),
            Work::Copy {
                to, from, bytes, ..
            } => (Some((from, bytes)), Some((to, bytes))),
            Work::Read { from, bytes, .. } => (Some((from, bytes)), None),
            Work::Write { to, ref bytes } => (None, Some((to, bytes.len() as u64))),
            Work::Fetch { to, bytes, .. } => (None, Some((to, bytes))),
            // Whoever still uses it is a race, as if it were written.
            Work::Free { address, bytes } => (None, Some((address, bytes))),
            Work::Host { .. } | Work::Call { .. } | Work::Mark => (None, None),
        }
    }

    /// What messages call it.
    pub fn describe(&self) -> String {
        match *self {
            Work::Fill {
                to, width, count, ..
            } => format!("fill of {} bytes at {to:#x}", count * u64::from(width)),
            Work::Copy {
                to, from, bytes, ..
            } => {
                format!("copy of {bytes} bytes from {from:#x} to {to:#x}")
            }
            Work::Read { from, bytes, .. } => format!("copy of {bytes} bytes from {from:#x}"),
            Work::Write { to, ref bytes } => format!("copy of {} bytes to {to:#x}", bytes.len()),
            Work::Fetch { to, bytes, .. } => format!("copy of {bytes} bytes to {to:#x}"),
            Work::Free { address, bytes } => format!("free of {bytes} bytes at {address:#x}"),
            Work::Host { bytes, .. } => format!("copy of {bytes} bytes within host memory"),
            Work::Call { .. } => "host function".to_string(),
            Work::Mark => "event".to_string(),
        }
    }

    /// Does it, through the mappings as they are now; nothing at all if a byte is out of reach.
    pub fn execute(&self, memory: &mut Memory, device: usize) -> Result<(), Fault> {
        if let Work::Free { address, .. } = self {
            return memory.free(*address).map_err(|_| Fault(*address));
        }
        let (from, to) = self.accesses();
        let (to_device, from_device) = match self {
            Work::Copy {
                between: Some(devices),
                ..
            } => *devices,
            _ => (device, device),
        };
        let mut reach = |device, range: Option<Range>, writes| match range {
            Some((address, bytes)) => memory.reach(device, address, bytes, writes).map_err(Fault),
            None => Ok(Vec::new()),
        };
        let (from, to) = (
            reach(from_device, from, false)?,
            reach(to_device, to, true)?,
        );
        match self {
            Work::Fill { value, width, .. } => {
                let word = &value.to_le_bytes()[..usize::from(*width)];
                to.iter().for_each(|&span| fill(span, word));
            }
            Work::Copy { .. } => copy(&to, &from),
            Work::Read { to, bytes, .. } => copy(&[Span::host(*to, *bytes)], &from),
            Work::Fetch { from, bytes, .. } => copy(&to, &[Span::host(*from, *bytes)]),
            Work::Host { to, from, bytes } => {
                copy(&[Span::host(*to, *bytes)], &[Span::host(*from, *bytes)]);
            }
            Work::Write { bytes, .. } => {
                let from = Span::host(bytes.as_ptr() as usize, bytes.len() as u64);
                copy(&to, &[from]);
            }
            Work::Free { .. } | Work::Call { .. } | Work::Mark => {}
        }
        Ok(())
    }
}

/// Fills a span with a word. Mappings start and end on granules, so spans hold whole words.
fn fill(span: Span, word: &[u8]) {
    let bytes = span.host as *mut u8;
    let mut done = word.len().min(span.length);
    // SAFETY: `reach` found the span mapped, open and backed, and the machine's lock, held here,
    // keeps it so.
    unsafe { std::ptr::copy_nonoverlapping(word.as_ptr(), bytes, done) };
    // By doubling what is there: as fast as memory allows, in unoptimised tests too.
    while done < span.length {
        let more = done.min(span.length - done);
        // SAFETY: as above; the filled part ends where the other begins.
        unsafe { std::ptr::copy_nonoverlapping(bytes, bytes.add(done), more) };
        done += more;
    }
}

/// Copies between two lists of spans of equal total length.
fn copy(to: &[Span], from: &[Span]) {
    let (mut to, mut from) = (to.iter().copied(), from.iter().copied());
    let (mut target, mut source) = (to.next(), from.next());
    while let (Some(mut t), Some(mut f)) = (target, source) {
        let length = t.length.min(f.length);
        // SAFETY: device spans are mapped, open and backed while the machine's lock is held; host
        // spans are good by the promise of whoever enqueued. Aliases may overlap: a move.
        unsafe { std::ptr::copy(f.host as *const u8, t.host as *mut u8, length) };
        for span in [&mut t, &mut f] {
            span.host += length;
            span.length -= length;
        }
        target = if t.length > 0 { Some(t) } else { to.next() };
        source = if f.length > 0 { Some(f) } else { from.next() };
    }
}
