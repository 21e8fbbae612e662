//! The pool's [`Gpu`] over the driver's functions: chunks, mappings, segments and events of one device.

use crate::core::{ALL_STREAMS, Event, Gpu, Handle, Refusal, StreamKey, UNORDERED};
use crate::device::captures::{self, NoCapture};
use crate::device::context::{Properties, RelaxedMode, access_of, allocation_properties, current};
use crate::device::ledger::{Call, Ledger};
use crate::device::live_streams::LiveStreams;
use crate::device::spans::Spans;
use crate::device::stream_key::{PER_THREAD, is_capturing};
use crate::device::synchronize::{Events, OUT_OF_MEMORY, synchronize, synchronize_in_capture};
use crate::driver::Functions;
use crate::driver::sys::*;
use crate::util::message;
use crate::util::thread::thread_number;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// A release that the driver refused.
#[derive(Clone, Copy)]
enum PendingRelease {
    Chunk {
        handle: Handle,
        size: u64,
    },
    Segment {
        address: u64,
        size: u64,
    },
    /// A mapping of a chunk, or of several imported ones.
    Mapping {
        address: u64,
        size: u64,
        chunk: Option<Handle>,
    },
    Addresses {
        address: u64,
        size: u64,
    },
    /// A plain segment of another process.
    Imported {
        address: u64,
    },
}

/// The driver's side of one device's pool.
pub struct DriverGpu {
    functions: Functions,
    properties: Arc<Properties>,
    ledger: Arc<Ledger>,
    access: Vec<CUmemAccessDesc>,
    events: Events,
    /// Streams of other devices, with their contexts, and events recorded on those.
    foreign: HashMap<StreamKey, usize>,
    foreign_events: HashMap<Event, usize>,
    /// A stream of ours that events are recorded on, and waits queued on, in place of the legacy default
    /// stream: a call with that one would break a capture on any stream that synchronizes with it.
    beside_default: usize,
    /// Releases that the driver refused; tried again before growth, and when all memory is released.
    pending_releases: Vec<PendingRelease>,
    /// Whether a stream is being captured: nothing may wait or query events.
    pub capturing: bool,
    /// Whether the stream of the request that is being served is captured, or may be.
    requester_captured: bool,
    /// The stream of the request that is being served. It exists.
    requesting: Option<StreamKey>,
    /// Whether chunks are created with every capability of the device.
    with_extras: bool,
    /// Where the clock starts.
    made: Instant,
    /// Spans that other processes may import.
    pub spans: Spans,
    /// The context has ended, and all its work with it: there is nothing to wait for.
    pub ended: bool,
    /// Events for waits for the whole device.
    waits: Arc<Mutex<Events>>,
    /// Streams known to exist.
    live: Arc<LiveStreams>,
}

fn refusal(status: u32) -> Result<(), Refusal> {
    match status {
        0 => Ok(()),
        OUT_OF_MEMORY => Err(Refusal::OutOfMemory),
        other => Err(Refusal::Failed(other)),
    }
}

impl DriverGpu {
    pub fn new(
        functions: Functions,
        properties: Arc<Properties>,
        ledger: Arc<Ledger>,
        waits: Arc<Mutex<Events>>,
        live: Arc<LiveStreams>,
    ) -> Self {
        let access = access_of(&properties.reachable_by);
        DriverGpu {
            functions,
            properties,
            ledger,
            access,
            events: Events::default(),
            foreign: HashMap::new(),
            foreign_events: HashMap::new(),
            beside_default: 0,
            pending_releases: Vec::new(),
            capturing: false,
            requester_captured: false,
            requesting: None,
            with_extras: true,
            made: Instant::now(),
            spans: Spans::default(),
            ended: false,
            waits,
            live,
        }
    }

    /// Makes a counted call in the device's context.
    fn call(&self, call: Call, body: impl FnOnce(&Functions) -> u32) -> u32 {
        let _current = current(&self.functions, self.properties.context);
        let _relaxed = RelaxedMode::enter(&self.functions);
        self.ledger.call(call, || body(&self.functions))
    }

    /// Adds a stream of another device, with its context.
    pub fn add_foreign_stream(&mut self, stream: StreamKey, context: usize) {
        self.foreign.insert(stream, context);
    }

    /// A stream that synchronizes with the legacy default stream, as streams do unless created otherwise.
    fn beside_default(&mut self) -> Option<usize> {
        if self.beside_default == 0 {
            let mut stream: CUstream = ptr::null_mut();
            let _current = current(&self.functions, self.properties.context);
            // SAFETY: `stream` outlives the call.
            if unsafe { (self.functions.cuStreamCreate)(&mut stream, 0) } == 0 {
                self.beside_default = stream as usize;
            }
        }
        Some(self.beside_default).filter(|stream| *stream != 0)
    }

    /// Records an event on a stream that exists. `None` if it is being captured.
    fn record_on(&mut self, stream: usize, foreign: Option<usize>) -> Option<Event> {
        let context = foreign.unwrap_or(self.properties.context);
        let functions = self.functions;
        let _current = current(&functions, context);
        let is_captured = || is_capturing(&functions, context, stream as u64) != Some(false);
        if is_captured() {
            return None;
        }
        let mut fresh = Events::default();
        let events = match foreign {
            Some(_) => &mut fresh,
            None => &mut self.events,
        };
        let event = events.take(&functions)?;
        // SAFETY: an event and a stream of this context, both of which exist.
        let status = self.ledger.call(Call::Record, || unsafe {
            (functions.cuEventRecord)(event as CUevent, stream as CUstream)
        });
        // If a capture has started meanwhile the event is part of it: to query it would break the capture.
        if status != 0 || is_captured() {
            // SAFETY: an event of ours that nobody waits for.
            unsafe { (functions.cuEventDestroy_v2)(event as CUevent) };
            return None;
        }
        if let Some(context) = foreign {
            self.foreign_events.insert(event as Event, context);
        }
        Some(event as Event)
    }

    /// Records an event behind all work of the device.
    fn record_device(&mut self) -> Option<Event> {
        let _no_capture = NoCapture::hold()?;
        let context = self.properties.context;
        let functions = self.functions;
        let _current = current(&functions, context);
        let event = self.events.take(&functions)?;
        // SAFETY: an event of this context, which was retained.
        let status = self.ledger.call(Call::RecordDevice, || unsafe {
            (functions.cuCtxRecordEvent)(context as CUcontext, event as CUevent)
        });
        if status != 0 {
            self.events.0.push(event);
            return None;
        }
        Some(event as Event)
    }

    /// Whether chunks can be shared with other processes.
    pub fn is_exportable(&self) -> bool {
        self.with_extras && self.properties.exportable
    }

    /// Gives devices access to what is mapped.
    fn set_access(
        &self,
        address: u64,
        size: u64,
        access: &[CUmemAccessDesc],
    ) -> Result<(), Refusal> {
        // SAFETY: a mapping of the pool's; `access` outlives the call.
        refusal(self.call(Call::SetAccess, |f| unsafe {
            (f.cuMemSetAccess)(address, size as usize, access.as_ptr(), access.len())
        }))
    }

    /// Gives access to each device in turn, where the driver refuses it to all at once: only the device
    /// itself, which comes first, has to have it. A device that is refused is not tried again, unless memory
    /// ran out.
    #[cold]
    fn set_access_one_by_one(&mut self, address: u64, size: u64) -> Result<(), Refusal> {
        static SAID: AtomicBool = AtomicBool::new(false);
        let mut given = Vec::with_capacity(self.access.len());
        for (at, one) in self.access.iter().enumerate() {
            match self.set_access(address, size, std::slice::from_ref(one)) {
                Ok(()) => given.push(*one),
                Err(refusal) if at == 0 => return Err(refusal),
                Err(refusal) => {
                    message::print_once(&SAID, || {
                        format!(
                            "device {} says that it reaches the memory of device {}, but the driver does \
                             not give it access ({refusal:?}): copies between them may take longer, and \
                             kernels of the one cannot use the memory of the other",
                            one.location.id, self.properties.device,
                        )
                    });
                    if refusal == Refusal::OutOfMemory {
                        given.push(*one);
                    }
                }
            }
        }
        self.access = given;
        Ok(())
    }

    fn try_create(&self, size: u64, exportable: bool, rdma: bool) -> Result<Handle, Refusal> {
        let mut handle = 0;
        let properties = allocation_properties(self.properties.device, exportable, rdma);
        // SAFETY: both pointers are to locals.
        refusal(self.call(Call::Create, |f| unsafe {
            (f.cuMemCreate)(&mut handle, size as usize, &properties, 0)
        }))?;
        Ok(handle)
    }

    /// Whether a mapping that could not be unmapped is in the way, so that this has to be released after it.
    /// A chunk's memory is free only without a mapping.
    fn is_held(&self, what: PendingRelease) -> bool {
        self.pending_releases
            .iter()
            .any(|left| match (*left, what) {
                (PendingRelease::Mapping { chunk, .. }, PendingRelease::Chunk { handle, .. }) => {
                    chunk == Some(handle)
                }
                (
                    PendingRelease::Mapping { address: at, .. },
                    PendingRelease::Addresses { address, size },
                ) => (address..address + size).contains(&at),
                _ => false,
            })
    }

    /// Releases something to the driver, or keeps it in `pending_releases` if that fails.
    fn release_or_keep(&mut self, what: PendingRelease) {
        if self.is_held(what) {
            self.pending_releases.push(what);
            return;
        }
        let status = match what {
            PendingRelease::Chunk { handle, .. } => self.call(Call::Release, |f| {
                // SAFETY: the pool created the chunk, and has forgotten it.
                unsafe { (f.cuMemRelease)(handle) }
            }),
            PendingRelease::Segment { address, .. } => self.call(Call::Free, |f| {
                // SAFETY: the pool allocated the segment, and has forgotten it.
                unsafe { (f.cuMemFree_v2)(address) }
            }),
            PendingRelease::Mapping { address, size, .. } => self.call(Call::Unmap, |f| {
                // SAFETY: the pool made the mapping, and nothing uses it.
                unsafe { (f.cuMemUnmap)(address, size as usize) }
            }),
            PendingRelease::Addresses { address, size } => self.call(Call::FreeAddress, |f| {
                // SAFETY: the pool reserved the range, has forgotten it, and nothing is mapped in it.
                unsafe { (f.cuMemAddressFree)(address, size as usize) }
            }),
            PendingRelease::Imported { address } => {
                let _current = current(&self.functions, self.properties.context);
                // SAFETY: opened once for each time that it is closed, and nothing uses it.
                unsafe { (self.functions.cuIpcCloseMemHandle)(address) }
            }
        };
        match what {
            // It is gone with its context. A later call might release what is at the address by then.
            PendingRelease::Segment { size, .. } if self.ended => self.ledger.subtract(size),
            PendingRelease::Imported { .. } if self.ended => {}
            _ if status != 0 => self.pending_releases.push(what),
            PendingRelease::Chunk { size, .. } | PendingRelease::Segment { size, .. } => {
                self.ledger.subtract(size)
            }
            PendingRelease::Mapping { .. }
            | PendingRelease::Addresses { .. }
            | PendingRelease::Imported { .. } => {}
        }
    }

    /// Unmaps imported memory, the first `mapped` bytes of a range that was reserved for it, and frees the
    /// range. Nothing uses it any more.
    pub fn unmap_imported(&mut self, address: u64, mapped: u64, size: u64) {
        self.retry_pending_releases();
        if mapped > 0 {
            self.release_or_keep(PendingRelease::Mapping {
                address,
                size: mapped,
                chunk: None,
            });
        }
        self.release_or_keep(PendingRelease::Addresses { address, size });
    }

    /// Releases the handle of an imported chunk.
    pub fn release_imported(&mut self, chunk: Handle) {
        self.release_or_keep(PendingRelease::Chunk {
            handle: chunk,
            size: 0,
        });
    }

    /// Closes an imported plain segment once.
    pub fn close_segment(&mut self, address: u64) {
        self.retry_pending_releases();
        self.release_or_keep(PendingRelease::Imported { address });
    }

    /// Tries the pending releases once more.
    pub fn retry_pending_releases(&mut self) {
        for what in std::mem::take(&mut self.pending_releases) {
            self.release_or_keep(what);
        }
    }

    /// Free and total bytes of the device, as the driver sees them.
    pub fn memory_info(&self) -> Option<(u64, u64)> {
        let _current = current(&self.functions, self.properties.context);
        let (mut free, mut total) = (0, 0);
        // SAFETY: both outlive the call.
        let status = unsafe { (self.functions.cuMemGetInfo_v2)(&mut free, &mut total) };
        (status == 0).then_some((free as u64, total as u64))
    }
}

impl Gpu for DriverGpu {
    fn granularity(&self) -> u64 {
        self.properties.granularity
    }

    /// Eight times the device's memory: addresses cost next to nothing, and remapping uses them up.
    fn reach(&self) -> u64 {
        (self.properties.total * 8).next_power_of_two().max(1 << 32)
    }

    fn is_limited(&self) -> bool {
        self.ledger.limit() != u64::MAX
    }

    fn has_room(&mut self, size: u64) -> Result<(), Refusal> {
        self.retry_pending_releases();
        match self.memory_info() {
            _ if !self.ledger.allows(size) => Err(Refusal::OverLimit),
            Some((free, _)) if free < size => Err(Refusal::OutOfMemory),
            _ => Ok(()),
        }
    }

    fn create(&mut self, size: u64) -> Result<Handle, Refusal> {
        self.retry_pending_releases();
        if !self.ledger.allows(size) {
            return Err(Refusal::OverLimit);
        }
        let Properties {
            exportable, rdma, ..
        } = *self.properties;
        let mut created = self.try_create(
            size,
            self.with_extras && exportable,
            self.with_extras && rdma,
        );
        if self.with_extras && matches!(created, Err(Refusal::Failed(_))) {
            // Some systems report capabilities that they then refuse.
            created = self.try_create(size, false, false);
            self.with_extras = created.is_err();
        }
        let handle = created?;
        self.ledger.add(size);
        Ok(handle)
    }

    fn release(&mut self, chunk: Handle, size: u64) {
        self.spans.remove_part(chunk);
        self.release_or_keep(PendingRelease::Chunk {
            handle: chunk,
            size,
        });
    }

    fn reserve(&mut self, size: u64) -> Result<u64, Refusal> {
        let mut address = 0;
        // SAFETY: `address` outlives the call.
        refusal(self.call(Call::Reserve, |f| unsafe {
            (f.cuMemAddressReserve)(&mut address, size as usize, 0, 0, 0)
        }))?;
        Ok(address)
    }

    fn unreserve(&mut self, address: u64, size: u64) {
        self.release_or_keep(PendingRelease::Addresses { address, size });
    }

    fn map(&mut self, address: u64, size: u64, chunk: Handle) -> Result<(), Refusal> {
        // SAFETY: a gap in a range that the pool reserved, and a chunk of that size.
        refusal(self.call(Call::Map, |f| unsafe {
            (f.cuMemMap)(address, size as usize, 0, chunk, 0)
        }))?;
        let mut result = self.set_access(address, size, &self.access);
        if result.is_err() && self.access.len() > 1 {
            result = self.set_access_one_by_one(address, size);
        }
        if result.is_err() {
            self.release_or_keep(PendingRelease::Mapping {
                address,
                size,
                chunk: Some(chunk),
            });
        }
        result
    }

    fn unmap(&mut self, address: u64, size: u64) -> Result<(), Refusal> {
        // SAFETY: a mapping of the pool's that no work uses any more.
        refusal(self.call(Call::Unmap, |f| unsafe {
            (f.cuMemUnmap)(address, size as usize)
        }))
    }

    fn allocate(&mut self, size: u64) -> Result<u64, Refusal> {
        if !self.ledger.allows(size) {
            return Err(Refusal::OverLimit);
        }
        self.retry_pending_releases();
        let mut address = 0;
        // Forbidden during a capture unless the thread is in relaxed mode: the memory is no part of the
        // graph. PyTorch's allocator does the same.
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: `address` and `mode` outlive the calls; the second exchange undoes the first.
        refusal(self.call(Call::Alloc, |f| unsafe {
            (f.cuThreadExchangeStreamCaptureMode)(&mut mode);
            let status = (f.cuMemAlloc_v2)(&mut address, size as usize);
            (f.cuThreadExchangeStreamCaptureMode)(&mut mode);
            status
        }))?;
        self.ledger.add(size);
        Ok(address)
    }

    fn free(&mut self, address: u64, size: u64) {
        self.spans.remove_part(address);
        self.release_or_keep(PendingRelease::Segment { address, size });
    }

    fn now(&self) -> u64 {
        match self.functions.simulated {
            true => 0,
            false => self.made.elapsed().as_nanos() as u64,
        }
    }

    fn set_requesting_stream(&mut self, stream: Option<StreamKey>) {
        let context = self.properties.context;
        self.requester_captured = stream.is_some_and(|stream| {
            is_capturing(&self.functions, context, stream.handle) != Some(false)
        });
        self.requesting = stream;
    }

    fn has_several_streams(&self) -> bool {
        self.live.len() + LiveStreams::created().len() > 1
    }

    fn is_idle(&mut self, stream: StreamKey) -> bool {
        // To query a stream that is being captured would break the capture.
        let Some(_no_capture) = NoCapture::hold().filter(|_| self.may_wait()) else {
            return false;
        };
        let functions = self.functions;
        let context = self.foreign.get(&stream).copied();
        let _current = current(&functions, context.unwrap_or(self.properties.context));
        let is_idle = |handle: u64| {
            self.ledger.call(Call::QueryStream, || {
                // SAFETY: a stream that exists.
                unsafe { (functions.cuStreamQuery)(handle as CUstream) }
            }) == 0
        };
        match stream.handle {
            // To query the default stream may break a capture of the device's other streams.
            0 | u64::MAX => false,
            PER_THREAD => stream.id == thread_number() && is_idle(PER_THREAD),
            handle if self.requesting == Some(stream) => is_idle(handle),
            handle => {
                let asked = self.live.with(stream, || is_idle(handle));
                let asked =
                    asked.or_else(|| LiveStreams::created().with(stream, || is_idle(handle)));
                asked.unwrap_or(false)
            }
        }
    }

    fn record_event(&mut self, stream: StreamKey) -> Option<Event> {
        if !self.may_wait() || stream == UNORDERED {
            return None;
        }
        if stream == ALL_STREAMS {
            return self.record_device();
        }
        match stream.handle {
            0 => {
                let beside = self.beside_default()?;
                self.record_on(beside, None)
            }
            PER_THREAD if stream.id == thread_number() => self.record_on(PER_THREAD as usize, None),
            PER_THREAD => None,
            handle => {
                let foreign = self.foreign.get(&stream).copied();
                match self.requesting == Some(stream) {
                    true => self.record_on(handle as usize, foreign),
                    false => {
                        let live = self.live.clone();
                        let mut record = || self.record_on(handle as usize, foreign);
                        let recorded = live.with(stream, &mut record);
                        let recorded =
                            recorded.or_else(|| LiveStreams::created().with(stream, record));
                        recorded.flatten()
                    }
                }
            }
        }
    }

    fn has_completed(&mut self, event: Event) -> bool {
        if !self.may_wait() {
            return false;
        }
        // SAFETY: an event of ours that was recorded.
        self.call(Call::Query, |f| unsafe {
            (f.cuEventQuery)(event as usize as CUevent)
        }) == 0
    }

    fn stream_wait_event(&mut self, event: Event, stream: StreamKey) -> bool {
        // A block of no stream may be used by any stream: to make one stream wait is not enough.
        if stream == UNORDERED || !self.may_wait() {
            return false;
        }
        let no_capture = NoCapture::hold();
        if no_capture.is_none() && !captures::may_be_unannounced() {
            return false;
        }
        let handle = match stream.handle {
            0 => self.beside_default().map(|it| it as u64),
            handle => Some(handle),
        };
        let Some(handle) = handle else { return false };
        let context = self.properties.context;
        if is_capturing(&self.functions, context, handle) != Some(false) {
            return false;
        }
        // SAFETY: an event of ours that was recorded, and a stream that the program passed just now.
        self.call(Call::Order, |f| unsafe {
            (f.cuStreamWaitEvent)(handle as CUstream, event as usize as CUevent, 0)
        }) == 0
    }

    fn release_event(&mut self, event: Event) {
        match self.foreign_events.remove(&event) {
            // SAFETY: an event of ours that nothing asks any more.
            Some(_) => unsafe {
                (self.functions.cuEventDestroy_v2)(event as usize as CUevent);
            },
            None => self.events.0.push(event as usize),
        }
    }

    fn may_wait(&self) -> bool {
        // In a capture, also another thread's, calls that it forbids are avoided.
        !self.capturing && !self.requester_captured
    }

    fn synchronize(&mut self) -> bool {
        if !self.may_wait() {
            return false;
        }
        if self.ended {
            return true;
        }
        let context = self.properties.context;
        let waited = self.ledger.call(Call::Synchronize, || {
            let waited = synchronize(&self.functions, context, &self.waits);
            waited.unwrap_or_else(|| synchronize_in_capture(&self.functions, context, false))
        });
        let foreign: HashSet<usize> = self.foreign.values().copied().collect();
        for context in foreign {
            synchronize_in_capture(&self.functions, context, false);
        }
        waited == 0
    }

    fn retain_foreign(&mut self, streams: &HashSet<StreamKey>) {
        self.foreign.retain(|stream, _| streams.contains(stream));
    }
}

impl DriverGpu {
    /// Destroys the cached events and the stream in place of the default one. If the context has `ended` they
    /// are gone with it.
    pub fn drop_events(&mut self, ended: bool) {
        let _current = current(&self.functions, self.properties.context);
        self.events.drop_all(&self.functions, ended);
        self.waits.lock().drop_all(&self.functions, ended);
        let stream = std::mem::take(&mut self.beside_default);
        if stream != 0 && !ended {
            // SAFETY: a stream of ours, in a context that lives.
            unsafe { (self.functions.cuStreamDestroy_v2)(stream as CUstream) };
        }
    }
}

impl Drop for DriverGpu {
    fn drop(&mut self) {
        self.retry_pending_releases();
        self.drop_events(false);
    }
}
