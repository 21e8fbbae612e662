//! Blocks that several streams of one capture use (`graph_capture_record_stream_reuse`).
//!
//! The work of a capture does not run yet, so no event tells when a freed block is unused. The graph does: a
//! node that depends on the last node of each stream that used the block may use it again. With a freed block
//! the last nodes of those streams are kept; once the next node of the block's own stream depends on all of
//! them, that stream may allocate the block again within the capture. No node is added to the graph.
//!
//! Like every reuse on one stream in a capture, this assumes that no dependency of a captured stream is
//! removed (`cuStreamUpdateCaptureDependencies` with `CU_STREAM_SET_CAPTURE_DEPENDENCIES`). As with PyTorch's
//! own allocator, a stream that was recorded has to exist until the block is freed.

use crate::core::{LiveBlock, Pool, StreamKey, Unknown};
use crate::device::capture_graph::{Node, add_ancestors, front};
use crate::device::driver_gpu::DriverGpu;
use crate::device::{Device, State};
use std::collections::{HashMap, HashSet};

/// The streams of a capture that use a block in use.
pub struct CaptureUsers {
    /// The capture's id.
    capture: u64,
    /// Their handles, without the block's own stream.
    streams: Vec<u64>,
}

/// A freed block that waits for other streams.
struct Freed {
    /// The block in the pool.
    name: u64,
    capture: u64,
    /// The block's own stream, by handle.
    owner: u64,
    /// The last nodes of every stream that used it.
    last: Vec<Node>,
}

/// Reuse within captures under way, if the setting is on.
pub struct CaptureReuse {
    reuse: bool,
    freed: Vec<Freed>,
    /// The nodes that the next node of a captured stream depends on, also indirectly.
    behind: HashMap<(u64, u64), HashSet<Node>>,
}

impl CaptureReuse {
    pub fn new(reuse: bool) -> CaptureReuse {
        CaptureReuse {
            reuse,
            freed: Vec::new(),
            behind: HashMap::new(),
        }
    }

    /// Whether the setting is on.
    pub fn reuse(&self) -> bool {
        self.reuse
    }

    /// Ends reuse within captures: blocks that were freed in them wait as others do.
    fn clear(&mut self) {
        self.freed.clear();
        self.behind.clear();
    }
}

impl Device {
    /// Turns the setting on or off.
    pub(super) fn set_capture_reuse(state: &mut State, reuse: bool) {
        if std::mem::replace(&mut state.capture_reuse.reuse, reuse) != reuse {
            Device::clear_capture_reuse(state);
        }
    }

    /// To be called when no stream is captured any more.
    pub(super) fn clear_capture_reuse(state: &mut State) {
        state.capture_reuse.clear();
        state.capture_users.clear();
    }

    /// Records that a stream uses a block in the pool, and if it is captured also here.
    #[cold]
    pub(super) fn record_use_in_capture(
        &self,
        state: &mut State,
        address: u64,
        stream: StreamKey,
    ) -> Result<(), Unknown> {
        let first = !state.pool.is_multi_stream_at(address);
        state.pool.record_use(address, stream)?;
        if state.pool.is_multi_stream_at(address) {
            self.add_capture_user(state, address, stream.handle, first);
        }
        Ok(())
    }

    /// Adds a stream that uses a block; `first` if it is the first one but the block's own.
    fn add_capture_user(&self, state: &mut State, address: u64, stream: u64, first: bool) {
        let front = front(&self.functions, self.properties.context, stream);
        let here = front.map(|front| front.capture);
        if first && let Some(capture) = here {
            let streams = Vec::new();
            state
                .capture_users
                .insert(address, CaptureUsers { capture, streams });
        }
        match state.capture_users.get_mut(&address) {
            Some(users) if here == Some(users.capture) && users.streams.contains(&stream) => {}
            Some(users) if here == Some(users.capture) => users.streams.push(stream),
            // A use outside the capture is not in its graph.
            Some(_) => drop(state.capture_users.remove(&address)),
            None => {}
        }
    }

    /// Keeps the last nodes of the streams that used a block that was just freed in a capture.
    pub(super) fn defer_in_capture(
        &self,
        state: &mut State,
        block: &LiveBlock,
        users: &CaptureUsers,
    ) {
        let owner = state.pool.owner_of(block).handle;
        let mut last = Vec::new();
        // The owner comes first: if the capture is broken, its other streams may be gone.
        for stream in std::iter::once(&owner).chain(&users.streams) {
            match front(&self.functions, self.properties.context, *stream) {
                Some(front) if front.capture == users.capture => last.extend(front.nodes),
                _ => return,
            }
        }
        if let Some(name) = state.pool.last_deferred_epoch() {
            state.capture_reuse.freed.push(Freed {
                name,
                capture: users.capture,
                owner,
                last,
            });
        }
    }

    /// To be called before a captured stream allocates: its freed blocks are free again if its next node
    /// depends on the last nodes of the other streams that used them. Queries the driver once for each node
    /// that the stream has come to depend on since the last call.
    pub(crate) fn reuse_joined(
        &self,
        branches: &mut CaptureReuse,
        pool: &mut Pool<DriverGpu>,
        stream: u64,
    ) {
        if !branches.freed.iter().any(|it| it.owner == stream) {
            return;
        }
        let context = self.properties.context;
        let Some(front) = front(&self.functions, context, stream) else {
            return;
        };
        let capture = front.capture;
        let behind = branches.behind.entry((capture, stream)).or_default();
        add_ancestors(&self.functions, context, front.nodes, behind);
        branches.freed.retain(|it| {
            let joined = (it.owner, it.capture) == (stream, capture)
                && it.last.iter().all(|node| behind.contains(node));
            if joined {
                pool.reclaim_deferred(it.name);
            }
            !joined
        });
    }
}
