//! Blocks that several streams of one capture use (`graph_capture_record_stream_reuse`).
//!
//! No work of a capture runs yet, so that no event says when a freed block is unused. Its graph does: what
//! comes after the last node of each stream that used the block may have it again. A freed block notes where
//! those streams stand; once the graph says that all these nodes come before what the block's own stream does
//! next, that stream has the block again, in this capture. No node is added to the graph.
//!
//! That rests on what every reuse on a stream of its own rests on: nobody takes back what a captured stream
//! comes after (`cuStreamUpdateCaptureDependencies` with `CU_STREAM_SET_CAPTURE_DEPENDENCIES`). And as with
//! PyTorch's own allocator, a stream that was recorded has to live until the block is freed.

use crate::core::{LiveBlock, Pool, StreamKey, Unknown};
use crate::device::capture_graph::{Node, add_ancestors, front};
use crate::device::driver_gpu::DriverGpu;
use crate::device::{Device, State};
use std::collections::{HashMap, HashSet};

/// The streams of a capture that use a block which is in use.
pub struct CaptureUsers {
    /// The capture's number.
    capture: u64,
    /// Handles, the block's own stream's not among them.
    streams: Vec<u64>,
}

/// A block that was freed, and waits for other streams.
struct Freed {
    /// What the pool calls it.
    name: u64,
    capture: u64,
    /// The block's own stream, by handle.
    owner: u64,
    /// The last nodes of every stream that used it.
    last: Vec<Node>,
}

/// What is known of captures under way, where the setting asks for it.
pub struct CaptureReuse {
    reuse: bool,
    freed: Vec<Freed>,
    /// What comes before all that a stream of a capture does from now on.
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

    /// Whether anything is to be known.
    pub fn reuse(&self) -> bool {
        self.reuse
    }

    /// What was freed in captures and not taken back waits as all freed blocks do.
    fn forget(&mut self) {
        self.freed.clear();
        self.behind.clear();
    }
}

impl Device {
    /// Whether blocks are reused within a capture that other streams of it have used.
    pub(super) fn set_capture_reuse(state: &mut State, reuse: bool) {
        if std::mem::replace(&mut state.capture_reuse.reuse, reuse) != reuse {
            Device::clear_capture_reuse(state);
        }
    }

    /// No stream is captured any more, or nothing is to be made of it.
    pub(super) fn clear_capture_reuse(state: &mut State) {
        state.capture_reuse.forget();
        state.capture_users.clear();
    }

    /// Notes that a stream uses a block, in the pool and, where it is of a capture, here.
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

    /// Another stream was recorded on a block; `first` says that none was before.
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
            // A use outside the capture is no node of its graph.
            Some(_) => drop(state.capture_users.remove(&address)),
            None => {}
        }
    }

    /// A block has just been freed that streams of a capture use, and waits.
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

    /// A captured stream is about to allocate: it gets back what it freed and other streams used, as far as
    /// its next work comes after theirs.
    ///
    /// Asks the driver once for each node that has come before the stream's work since it last did.
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
