//! What a device's history is told, and what PyTorch's snapshots tell of the device.

use crate::core::{Origin, Segment, SegmentBlock};
use crate::device::history::{self, Action, Context, History};
use crate::device::private_pools::pool_at;
use crate::device::{Device, PoolId, State};
use crate::util::lock::Guard;
use serde_json::{Value, json};

impl Device {
    /// Begins or ends recording, as the plan says; drops what was recorded if `clear`.
    pub(crate) fn follow_recording_plan(&self, clear: bool) {
        let mut state = self.lock_flushed();
        let plan = history::plan();
        state.pool.event_log_mut().enable(history::is_noted());
        if clear {
            state.history.clear();
        }
        if plan.is_none() {
            state.history.stop();
        }
    }

    /// Notes an allocation. What the pool did to meet it comes before it.
    pub fn note_allocated(&self, address: u64, size: u64, stream: u64, context: Context) {
        let mut state = self.caught_up(stream, &context);
        let pool = state.pool_at(address);
        state
            .history
            .allocated(address, size, stream, context, pool);
    }

    /// Notes that a block is about to be freed.
    pub fn note_freed(&self, address: u64, size: u64, stream: u64, context: Context) {
        let mut state = self.caught_up(0, &None);
        let completed = !state.pool.is_multi_stream_at(address);
        let pool = state.pool_at(address);
        state
            .history
            .freed(address, size, stream, context, pool, completed);
    }

    /// Notes that memory ran out for a request to a pool.
    pub fn note_out_of_memory(&self, size: u64, stream: u64, context: Context, pool: PoolId) {
        let mut state = self.caught_up(stream, &context);
        let free = state.pool.gpu().memory_info().map_or(0, |(free, _)| free);
        state
            .history
            .note(Action::OutOfMemory, free, size, stream, context, pool);
    }

    /// Notes what the pool did just now, and where in the program that was.
    pub fn note_happenings(&self, context: Context) {
        drop(self.caught_up(0, &context));
    }

    /// The state with all that the pool did in its history.
    pub(super) fn caught_up(&self, stream: u64, context: &Context) -> Guard<'_, State> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let happenings = state.pool.event_log_mut().drain();
        let (pool, private) = (&state.pool, &state.private);
        state
            .history
            .catch_up(happenings, stream, context, |address| {
                pool_at(pool, private, address)
            });
        guard
    }

    /// The segments, of one private pool or of all, and the history, as PyTorch's snapshots have
    /// them, but for `context` in the place of `frames`.
    pub(crate) fn snapshot(&self, only: Option<PoolId>, traces: bool) -> (Vec<Value>, Value) {
        drop(self.lock_flushed());
        let mut state = self.caught_up(0, &None);
        let segments: Vec<Value> = state
            .pool
            .segments()
            .iter()
            .map(|segment| (segment, state.pool_of(segment.arena)))
            .filter(|(_, pool)| only.is_none_or(|only| only == *pool))
            .map(|(segment, pool)| segment_json(self.ordinal, segment, pool, &state.history))
            .collect();
        if !traces {
            return (segments, Value::Array(Vec::new()));
        }
        let active = state.pool.stats().all.active_bytes.current;
        // It is in those that come.
        let traces = state.history.json();
        if history::is_noted() {
            state
                .history
                .note(Action::Snapshot, 0, active, 0, None, (0, 0));
        }
        (segments, traces)
    }
}

/// A segment as PyTorch's snapshots have it. Memory of all sizes is shared here, so that every
/// segment is large; its stream is that of its first block.
///
/// A block of another library's is none of PyTorch's that is in use, so that the sums of a snapshot are those
/// of PyTorch's counters; it is said of it what it is.
fn segment_json(device: i32, segment: &Segment, pool: PoolId, history: &History) -> Value {
    let pieces = &segment.blocks;
    let foreign = |piece: &SegmentBlock| piece.origin == Origin::Cuda;
    let sum = |of: &dyn Fn(&SegmentBlock) -> u64| pieces.iter().map(of).sum::<u64>();
    let own = |of: &dyn Fn(&SegmentBlock) -> u64| {
        let own = pieces.iter().filter(|piece| !foreign(piece));
        own.map(of).sum::<u64>()
    };
    let blocks = pieces.iter().map(|piece| {
        if foreign(piece) {
            return json!({
                "address": piece.address,
                "size": piece.size,
                "requested_size": 0,
                "state": "inactive",
                "stream": piece.stream,
                "context": null,
                "other_library": true,
            });
        }
        json!({
            "address": piece.address,
            "size": piece.size,
            "requested_size": piece.requested,
            "state": match (piece.live, piece.pending) {
                (true, _) => "active_allocated",
                (_, true) => "active_pending_free",
                _ => "inactive",
            },
            "stream": piece.stream,
            "context": history.context_of(piece.address),
        })
    });
    json!({
        "device": device,
        "address": pieces[0].address,
        "total_size": sum(&|piece| piece.size),
        "allocated_size": own(&|piece| if piece.live { piece.size } else { 0 }),
        "active_size": own(&|piece| if piece.live || piece.pending { piece.size } else { 0 }),
        "requested_size": own(&|piece| piece.requested),
        "stream": pieces[0].stream,
        "segment_type": "large",
        "segment_pool_id": [pool.0, pool.1],
        "is_expandable": segment.expandable,
        "context": null,
        "blocks": blocks.collect::<Vec<_>>(),
    })
}
