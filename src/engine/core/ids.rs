//! Names of streams, arenas, chunks and events.

/// Identifies a stream. A handle alone does not: the driver gives the handle of a destroyed stream to a new
/// one while the old one's work still runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamKey {
    /// The driver's handle (`CUstream`).
    pub handle: u64,
    /// The driver's id of the stream (`cuStreamGetId`), never used twice; 0 where unknown.
    pub id: u64,
}

/// The key of memory that no stream orders, as `cudaMalloc`'s: it may be used on any. Its free blocks are all
/// idle, as they are freed only once nothing uses them. To the driver its handle is the default stream; the
/// id sets it apart, as the driver counts streams from 1.
pub const UNORDERED: StreamKey = StreamKey {
    handle: 0,
    id: u64::MAX,
};

/// The key of all streams of the device together, destroyed ones too.
pub const ALL_STREAMS: StreamKey = StreamKey {
    handle: u64::MAX,
    id: 0,
};

/// An index of an arena in its pool.
pub type ArenaId = u16;

/// The arena that requests go to unless told otherwise.
pub const SHARED_ARENA: ArenaId = 0;

/// The driver's handle of a chunk of physical memory.
pub type Handle = u64;

/// An event recorded on a stream.
pub type Event = u64;
