//! The history of a device's memory, in PyTorch's terms (`_record_memory_history` in
//! `torch/cuda/memory.py`): what was allocated, freed and mapped, in order, and where in the program
//! that was. Nothing is kept until somebody asks for it.

use crate::core::MemoryEvent;
use crate::device::PoolId;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::Relaxed};
use std::time::SystemTime;

/// Where the program was at some time. What that is, and how it is shown, is the business of whoever
/// records; to the history it is a number.
pub trait Place: Send + Sync {
    /// The number that stands for it in a snapshot.
    fn number(&self) -> u64;
}

/// A place, if one was noted.
pub type Context = Option<Arc<dyn Place>>;

/// What the history keeps of places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Contexts {
    /// None.
    Never,
    /// Where each live block was allocated.
    State,
    /// The same for each allocation in the history.
    Alloc,
    /// And where blocks were freed.
    All,
}

/// What is recorded from now on.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// How many entries are kept for each device; the oldest go first.
    pub entries: usize,
    /// Which places are kept.
    pub contexts: Contexts,
    /// Actions that leave no entry, as bits by [`Action`].
    pub skip: u16,
}

macro_rules! actions {
    ($($variant:ident = $name:literal,)*) => {
        /// What happened, by PyTorch's names.
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

/// How much is recorded: 0 for nothing, else one more than the [`Contexts`].
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

/// Whether such places are wanted.
pub fn wants(contexts: Contexts) -> bool {
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

/// What a program says of itself beside its allocations, of all devices.
struct Marks {
    /// The compiled regions that it is in, the innermost last.
    regions: Vec<Arc<str>>,
    metadata: Option<Arc<str>>,
    annotations: VecDeque<Annotation>,
}

static MARKS: Mutex<Marks> = Mutex::new(Marks {
    regions: Vec::new(),
    metadata: None,
    annotations: VecDeque::new(),
});

/// A named stretch of the program began or ended.
struct Annotation {
    device: i32,
    time: u64,
    name: String,
    stage: String,
}

/// The program enters a compiled region: entries from now on have its name.
pub fn enter_region(name: &str) {
    MARKS.lock().regions.push(name.into());
}

/// The program leaves the region that it entered last.
pub fn leave_region() {
    MARKS.lock().regions.pop();
}

/// Entries from now on have this text.
pub fn set_metadata(text: &str) {
    MARKS.lock().metadata = Some(text.into()).filter(|_| !text.is_empty());
}

/// A named stretch of the program began or ended, as `stage` says; the device is the current one.
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

/// The stretches, as PyTorch's snapshots have them.
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
    /// The device's free bytes where memory ran out.
    pub address: u64,
    /// In bytes.
    pub size: u64,
    /// The stream's handle.
    pub stream: u64,
    /// Microseconds since 1970.
    time: u64,
    context: Context,
    /// The pool that the memory belongs to.
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
    /// Where blocks in use were allocated, and in which pool, by address.
    live: HashMap<u64, (Context, PoolId)>,
    /// The pools of segments of private ones, by address: when one goes, its pool may be gone.
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

    /// Drops everything, as PyTorch's own allocator does; of blocks in use nobody notes from now on when
    /// they are freed.
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

    pub fn note(
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

    pub fn allocated(
        &mut self,
        address: u64,
        size: u64,
        stream: u64,
        context: Context,
        pool: PoolId,
    ) {
        self.note(Action::Alloc, address, size, stream, context.clone(), pool);
        self.live.insert(address, (context, pool));
    }

    /// `completed` where nothing else may still use the block.
    pub fn freed(
        &mut self,
        address: u64,
        size: u64,
        stream: u64,
        context: Context,
        pool: PoolId,
        completed: bool,
    ) {
        let context = context.or_else(|| self.live.get(&address)?.0.clone());
        self.note(Action::FreeRequested, address, size, stream, context, pool);
        if completed {
            self.completed(address, size, stream, pool);
        }
    }

    /// `pool` is that of a block that was allocated before the history began.
    fn completed(&mut self, address: u64, size: u64, stream: u64, pool: PoolId) {
        let (context, pool) = self.live.remove(&address).unwrap_or((None, pool));
        self.note(Action::FreeCompleted, address, size, stream, context, pool);
    }

    /// Enters what the pool did meanwhile, for this stream and at this place as far as is known.
    /// `pool_at` answers which pool an address belongs to now.
    pub fn catch_up(
        &mut self,
        happenings: Vec<MemoryEvent>,
        stream: u64,
        context: &Context,
        pool_at: impl Fn(u64) -> PoolId,
    ) {
        for happening in happenings {
            let (action, (address, size)) = match happening {
                MemoryEvent::FreeCompleted {
                    address,
                    size,
                    stream,
                } => {
                    self.completed(address, size, stream, pool_at(address));
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
            self.note(action, address, size, stream, context.clone(), pool);
        }
    }

    /// Where a block in use was allocated.
    pub fn context_of(&self, address: u64) -> Option<u64> {
        let context = self.live.get(&address)?.0.as_ref()?;
        Some(context.number())
    }

    /// The entries as PyTorch's snapshots have them, but for `context`: the number of the place.
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
