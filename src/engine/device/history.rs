//! Memory history, as PyTorch's `torch.cuda.memory._record_memory_history` records it: allocations, frees and
//! mappings of a device in order, with the traceback of each. Off until the program turns it on.

use crate::core::MemoryEvent;
use crate::device::PoolId;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};
use std::time::SystemTime;

/// Where in the program something happened. The history keeps it alive, and shows it as a number that the
/// recorder resolves.
pub trait Traceback: Send + Sync {
    /// The number that a snapshot has in its place.
    fn number(&self) -> u64;
}

/// The traceback of an entry, if it was recorded.
pub type Context = Option<Arc<dyn Traceback>>;

/// Which tracebacks are recorded (PyTorch's `context`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Contexts {
    /// None.
    Never,
    /// Where each live block was allocated.
    State,
    /// And for each allocation in the history.
    Alloc,
    /// And for each free.
    All,
}

/// What is recorded.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Entries kept for each device; the oldest are dropped first.
    pub entries: usize,
    /// Which tracebacks are recorded.
    pub contexts: Contexts,
    /// Actions that are not recorded: a bit for each, by the order of [`Action`].
    pub skip: u16,
}

macro_rules! actions {
    ($($variant:ident = $name:literal,)*) => {
        /// What an entry records, by PyTorch's names.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub enum Action { $($variant,)* }

        impl Action {
            /// Every action, in the order of the enum.
            pub const ALL: &[Action] = &[$(Action::$variant,)*];

            /// PyTorch's name.
            pub fn name(self) -> &'static str {
                match self { $(Action::$variant => $name,)* }
            }
        }
    };
}

actions! {
    Alloc = "alloc",
    FreeRequested = "free_requested",
    FreeCompleted = "free_completed",
    SegmentAlloc = "segment_alloc",
    SegmentFree = "segment_free",
    SegmentMap = "segment_map",
    SegmentUnmap = "segment_unmap",
    Snapshot = "snapshot",
    OutOfMemory = "oom",
}

/// 0 if nothing is recorded, else one more than the plan's [`Contexts`].
static RECORDING: AtomicU8 = AtomicU8::new(0);
static PLAN: Mutex<Option<Plan>> = Mutex::new(None);

/// Whether anything is recorded. One relaxed load.
#[inline]
pub fn is_recorded() -> bool {
    RECORDING.load(Relaxed) != 0
}

static TRACKED: AtomicBool = AtomicBool::new(false);

/// Whether trackers are told of events (`trackers.rs`).
#[inline]
pub(crate) fn is_tracked() -> bool {
    TRACKED.load(Relaxed)
}

/// Events are kept for trackers from now on.
pub(crate) fn set_tracked() {
    TRACKED.store(true, Relaxed);
}

/// Whether events are noted: recorded, or kept until trackers are told.
#[inline]
pub fn is_noted() -> bool {
    is_recorded() || is_tracked()
}

/// Whether tracebacks are recorded for this.
pub fn keeps(contexts: Contexts) -> bool {
    RECORDING.load(Relaxed) > contexts as u8
}

/// The plan in force.
pub(crate) fn plan() -> Option<Plan> {
    *PLAN.lock()
}

/// What is to be recorded of all devices from now on; `None` for nothing.
pub(crate) fn set_plan(plan: Option<Plan>) {
    MARKS.lock().annotations.clear();
    *PLAN.lock() = plan;
    RECORDING.store(plan.map_or(0, |plan| plan.contexts as u8 + 1), Relaxed);
}

/// What the program says of itself, for all devices.
struct Marks {
    /// The compiled regions (`torch.compile`) that it is in, the innermost last.
    regions: Vec<Arc<str>>,
    metadata: Option<Arc<str>>,
    annotations: VecDeque<Annotation>,
}

static MARKS: Mutex<Marks> = Mutex::new(Marks {
    regions: Vec::new(),
    metadata: None,
    annotations: VecDeque::new(),
});

/// The begin or end of a named range of the program (PyTorch's external annotations).
struct Annotation {
    device: i32,
    time: u64,
    name: String,
    stage: String,
}

/// Enters a compiled region, whose name entries have from now on.
pub fn enter_region(name: &str) {
    MARKS.lock().regions.push(name.into());
}

/// Leaves the region that was entered last.
pub fn leave_region() {
    MARKS.lock().regions.pop();
}

/// Sets the text that entries have as `user_metadata` from now on.
pub fn set_metadata(text: &str) {
    MARKS.lock().metadata = Some(text.into()).filter(|_| !text.is_empty());
}

/// Records that a named range of the program began or ended (`stage`) while this device was the current one.
pub fn annotate(device: i32, name: String, stage: String) {
    let Some(plan) = plan() else { return };
    let annotations = &mut MARKS.lock().annotations;
    while annotations.len() >= plan.entries.max(1) {
        annotations.pop_front();
    }
    annotations.push_back(Annotation {
        device,
        time: now(),
        name,
        stage,
    });
}

/// The annotations, as PyTorch's snapshots have them.
pub(crate) fn annotations() -> Value {
    let marks = MARKS.lock();
    let annotations = marks.annotations.iter().map(
        |it| json!({"device": it.device, "time_us": it.time, "name": it.name, "stage": it.stage}),
    );
    Value::Array(annotations.collect())
}

/// Microseconds since 1970.
fn now() -> u64 {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    time.unwrap_or_default().as_micros() as u64
}

/// An event of a device's memory.
#[derive(Clone)]
pub struct Entry {
    /// What happened.
    pub action: Action,
    /// For [`Action::OutOfMemory`] the device's free bytes.
    pub address: u64,
    /// In bytes.
    pub size: u64,
    /// The stream's handle.
    pub stream: u64,
    /// Microseconds since 1970.
    time: u64,
    context: Context,
    /// The private pool of the memory; (0, 0) for the shared arena.
    pub pool: PoolId,
    /// The compiled region that the program was in.
    pub region: Option<Arc<str>>,
    /// The text that the program had set.
    pub metadata: Option<Arc<str>>,
}

/// One device's history. Its lock is taken after the device's.
#[derive(Default)]
pub(crate) struct History {
    entries: VecDeque<Entry>,
    /// Blocks in use by address: where in the program they were allocated, and their pools.
    live: HashMap<u64, (Context, PoolId)>,
    /// Segments of private pools by address, with their pools: a segment may outlive its pool's name.
    segments: HashMap<u64, PoolId>,
    /// Events that trackers have not been told yet.
    untold: VecDeque<Entry>,
}

impl History {
    /// Notes a segment of a private pool that was there before events were noted.
    pub fn add_segment(&mut self, address: u64, pool: PoolId) {
        self.segments.insert(address, pool);
    }

    /// The oldest event that trackers have not been told.
    pub fn pop_untold(&mut self) -> Option<Entry> {
        self.untold.pop_front()
    }

    /// Drops all entries.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    /// Drops everything, as PyTorch's own allocator does: frees of the blocks in use are not recorded any
    /// more.
    pub fn stop(&mut self) {
        self.clear();
        if is_tracked() {
            // Trackers are told the pools of blocks and segments when those go.
            self.live.values_mut().for_each(|it| it.0 = None);
            return;
        }
        self.live.clear();
        self.segments.clear();
    }

    /// Adds an entry, unless the plan skips the action.
    pub fn record(
        &mut self,
        action: Action,
        address: u64,
        size: u64,
        stream: u64,
        context: Context,
        pool: PoolId,
    ) {
        let plan = plan().filter(|plan| plan.skip & 1 << action as u16 == 0);
        if plan.is_none() && !is_tracked() {
            return;
        }
        let marks = MARKS.lock();
        let entry = Entry {
            action,
            address,
            size,
            stream,
            time: now(),
            context: None,
            pool,
            region: marks.regions.last().cloned(),
            metadata: marks.metadata.clone(),
        };
        drop(marks);
        if is_tracked() {
            self.untold.push_back(entry.clone());
        }
        let Some(plan) = plan else { return };
        while self.entries.len() >= plan.entries.max(1) {
            self.entries.pop_front();
        }
        self.entries.push_back(Entry {
            context: context.filter(|_| plan.contexts >= Contexts::Alloc),
            ..entry
        });
    }

    /// Records an allocation.
    pub fn record_allocated(
        &mut self,
        address: u64,
        size: u64,
        stream: u64,
        context: Context,
        pool: PoolId,
    ) {
        self.record(Action::Alloc, address, size, stream, context.clone(), pool);
        self.live.insert(address, (context, pool));
    }

    /// Records that the program frees a block. `completed` if no other stream may still use it.
    pub fn record_freed(
        &mut self,
        address: u64,
        size: u64,
        stream: u64,
        context: Context,
        pool: PoolId,
        completed: bool,
    ) {
        let context = context.or_else(|| self.live.get(&address)?.0.clone());
        self.record(Action::FreeRequested, address, size, stream, context, pool);
        if completed {
            self.record_completed(address, size, stream, pool);
        }
    }

    /// Records that no stream uses a freed block any more. `pool` counts for a block that was allocated
    /// before the history began.
    fn record_completed(&mut self, address: u64, size: u64, stream: u64, pool: PoolId) {
        let (context, pool) = self.live.remove(&address).unwrap_or((None, pool));
        self.record(Action::FreeCompleted, address, size, stream, context, pool);
    }

    /// Records the pool's events since the last call, with the stream and the traceback of the call that led
    /// to them. `pool_at` tells which pool an address belongs to now.
    pub fn record_events(
        &mut self,
        events: Vec<MemoryEvent>,
        stream: u64,
        context: &Context,
        pool_at: impl Fn(u64) -> PoolId,
    ) {
        for event in events {
            let (action, (address, size)) = match event {
                MemoryEvent::FreeCompleted {
                    address,
                    size,
                    stream,
                } => {
                    self.record_completed(address, size, stream, pool_at(address));
                    continue;
                }
                MemoryEvent::SegmentMapped(address, size) => (Action::SegmentMap, (address, size)),
                MemoryEvent::SegmentUnmapped(address, size) => {
                    (Action::SegmentUnmap, (address, size))
                }
                MemoryEvent::SegmentAllocated(address, size) => {
                    (Action::SegmentAlloc, (address, size))
                }
                MemoryEvent::SegmentFreed(address, size) => (Action::SegmentFree, (address, size)),
            };
            let pool = match action {
                Action::SegmentUnmap | Action::SegmentFree => self.segments.remove(&address),
                _ => None,
            };
            let pool = pool.unwrap_or_else(|| pool_at(address));
            if matches!(action, Action::SegmentMap | Action::SegmentAlloc) && pool != (0, 0) {
                self.segments.insert(address, pool);
            }
            self.record(action, address, size, stream, context.clone(), pool);
        }
    }

    /// The traceback of the allocation of a block in use, by number.
    pub fn context_of(&self, address: u64) -> Option<u64> {
        let context = self.live.get(&address)?.0.as_ref()?;
        Some(context.number())
    }

    /// The entries as PyTorch's snapshots have them, but for `context`, the traceback's number.
    pub fn json(&self) -> Value {
        let entries = self.entries.iter().map(|entry| {
            let mut object = Map::new();
            object.insert("action".into(), entry.action.name().into());
            let address = match entry.action {
                Action::OutOfMemory => "device_free",
                _ => "addr",
            };
            object.insert(address.into(), entry.address.into());
            object.insert("size".into(), entry.size.into());
            object.insert("stream".into(), entry.stream.into());
            object.insert("time_us".into(), entry.time.into());
            let region = entry.region.as_deref().unwrap_or("N/A");
            object.insert("compile_context".into(), region.into());
            let metadata = entry.metadata.as_deref().unwrap_or_default();
            object.insert("user_metadata".into(), metadata.into());
            object.insert("pool_id".into(), json!([entry.pool.0, entry.pool.1]));
            let context = entry.context.as_ref().map(|context| context.number());
            object.insert("context".into(), json!(context));
            Value::Object(object)
        });
        Value::Array(entries.collect())
    }
}
