//! Recording a device's memory history, and its memory snapshot in PyTorch's format.

use crate::core::{Origin, Segment, SegmentBlock};
use crate::device::history::{self, Action, Context, History};
use crate::device::private_pools::pool_at;
use crate::device::{Device, PoolId, State};
use crate::util::lock::Guard;
use serde_json::{Value, json};

impl Device {
    /// Starts or stops recording as the plan says. `clear` drops what was recorded.
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

    /// Records an allocation, after the pool's events that it led to.
    pub fn record_allocated(&self, address: u64, size: u64, stream: u64, context: Context) {
        let mut state = self.lock_recorded(stream, &context);
        let pool = state.pool_at(address);
        state
            .history
            .record_allocated(address, size, stream, context, pool);
    }

    /// Records that a block is about to be freed.
    pub fn record_freed(&self, address: u64, size: u64, stream: u64, context: Context) {
        let mut state = self.lock_recorded(0, &None);
        let completed = !state.pool.is_multi_stream_at(address);
        let pool = state.pool_at(address);
        state
            .history
            .record_freed(address, size, stream, context, pool, completed);
    }

    /// Records that memory ran out for a request to a pool.
    pub fn record_out_of_memory(&self, size: u64, stream: u64, context: Context, pool: PoolId) {
        let mut state = self.lock_recorded(stream, &context);
        let free = state.pool.gpu().memory_info().map_or(0, |(free, _)| free);
        state
            .history
            .record(Action::OutOfMemory, free, size, stream, context, pool);
    }

    /// Records the pool's events since the last call, with this traceback.
    pub fn record_events(&self, context: Context) {
        drop(self.lock_recorded(0, &context));
    }

    /// Records the pool's events so far, and returns the state, locked.
    pub(super) fn lock_recorded(&self, stream: u64, context: &Context) -> Guard<'_, State> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let events = state.pool.event_log_mut().drain();
        let (pool, private) = (&state.pool, &state.private);
        state
            .history
            .record_events(events, stream, context, |address| {
                pool_at(pool, private, address)
            });
        guard
    }

    /// The segments, of one private pool or of all, and if `traces` the history, as PyTorch's snapshots have
    /// them. Each has `context`, the number of a traceback, in place of `frames`.
    pub(crate) fn snapshot(&self, only: Option<PoolId>, traces: bool) -> (Vec<Value>, Value) {
        drop(self.lock_flushed());
        let mut state = self.lock_recorded(0, &None);
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
        // The entry of this snapshot is in the next one.
        let traces = state.history.json();
        if history::is_noted() {
            state
                .history
                .record(Action::Snapshot, 0, active, 0, None, (0, 0));
        }
        (segments, traces)
    }
}

/// A segment as PyTorch's snapshots have it. Small and large blocks share segments here, so every segment
/// counts as large; its stream is that of its first block.
///
/// A block that another library allocated is shown as inactive, and as `other_library`, so that the sums of a
/// snapshot are those of PyTorch's counters.
fn segment_json(device: i32, segment: &Segment, pool: PoolId, history: &History) -> Value {
    let blocks = &segment.blocks;
    let foreign = |block: &SegmentBlock| block.origin == Origin::Cuda;
    let sum = |of: &dyn Fn(&SegmentBlock) -> u64| blocks.iter().map(of).sum::<u64>();
    let own = |of: &dyn Fn(&SegmentBlock) -> u64| {
        let own = blocks.iter().filter(|block| !foreign(block));
        own.map(of).sum::<u64>()
    };
    let listed = blocks.iter().map(|block| {
        if foreign(block) {
            return json!({
                "address": block.address,
                "size": block.size,
                "requested_size": 0,
                "state": "inactive",
                "stream": block.stream,
                "context": null,
                "other_library": true,
            });
        }
        json!({
            "address": block.address,
            "size": block.size,
            "requested_size": block.requested,
            "state": match (block.live, block.pending) {
                (true, _) => "active_allocated",
                (_, true) => "active_pending_free",
                _ => "inactive",
            },
            "stream": block.stream,
            "context": history.context_of(block.address),
        })
    });
    json!({
        "device": device,
        "address": blocks[0].address,
        "total_size": sum(&|block| block.size),
        "allocated_size": own(&|block| if block.live { block.size } else { 0 }),
        "active_size": own(&|block| if block.live || block.pending { block.size } else { 0 }),
        "requested_size": own(&|block| block.requested),
        "stream": blocks[0].stream,
        "segment_type": "large",
        "segment_pool_id": [pool.0, pool.1],
        "is_expandable": segment.expandable,
        "context": null,
        "blocks": listed.collect::<Vec<_>>(),
    })
}
