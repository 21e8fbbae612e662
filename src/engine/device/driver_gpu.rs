//! The pool's seam to one device, over the driver's functions.

use crate::core::{ALL_STREAMS, Event, Gpu, Handle, Refusal, StreamKey, UNORDERED};
use crate::device::captures::{self, NoCapture};
use crate::device::ledger::{Call, Ledger};
use crate::device::live_streams::LiveStreams;
use crate::device::permanent_streams::PermanentStreams;
use crate::device::spans::Spans;
use crate::driver::Functions;
use crate::driver::sys::*;
use crate::util::message;
use crate::util::reentrancy::{self, Inside};
pub use crate::util::thread::thread_number;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

const OUT_OF_MEMORY: u32 = CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;

/// Legacy default stream and per-thread default stream, as handles (`CU_STREAM_LEGACY`,
/// `CU_STREAM_PER_THREAD` in `cuda.h`).
const LEGACY: u64 = 1;
pub const PER_THREAD: u64 = 2;

/// Stands for the id of a stream that is being captured, which cannot be asked for, where it is not known
/// already ([`Streams`]). So to the pool it is another stream than before and after the capture, whose
/// memory it can only have as any other could. Two streams of one handle, each captured, the first
/// destroyed before the second was made, are one stream to it; PyTorch's own streams are never destroyed.
const CAPTURED: u64 = u64::MAX;

/// What one device is.
#[derive(Clone, Debug)]
pub struct Properties {
    pub name: String,
    pub device: CUdevice,
    pub context: usize,
    pub total: u64,
    /// 0 where memory cannot be mapped.
    pub granularity: u64,
    /// This device and those that can reach its memory: all get access to what is mapped.
    pub reachable_by: Vec<CUdevice>,
    /// Whether chunks can be made so that another process can have a file descriptor of them.
    pub exportable: bool,
    /// Whether they can be made so that network cards reach them, as they do `cudaMalloc`'s memory.
    pub rdma: bool,
    /// Tells the device from every other, in every process.
    pub uuid: [u8; 16],
}

/// Something that the driver would not take back.
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
    /// A mapping of a chunk, or of several of another process's.
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
    /// A stream of ours through which work of the legacy default stream is waited for, and made to wait: to
    /// touch that one itself would end a capture on any stream that synchronizes with it.
    beside_default: usize,
    /// What the driver did not take back when it was asked to; asked again before more is taken, and
    /// when all is given back.
    pending_releases: Vec<PendingRelease>,
    /// A stream is being captured: nothing may wait or ask.
    pub capturing: bool,
    /// The same, but only while memory is found for the stream that is.
    attending: bool,
    /// The stream that memory is wanted on just now. It exists.
    wanted_on: Option<StreamKey>,
    /// Chunks are made for all that the device can do with them.
    with_extras: bool,
    /// What time counts from.
    made: Instant,
    /// What other processes may ask for.
    pub spans: Spans,
    /// The context is gone, and all its work with it: there is nothing to wait for.
    pub ended: bool,
    /// Events for waits for the whole device.
    waits: Arc<Mutex<Events>>,
    /// Streams that exist.
    live: Arc<LiveStreams>,
}

/// A device's name and its memory in bytes, without taking it up.
pub fn name_and_bytes(functions: &Functions, ordinal: i32) -> (String, usize) {
    let (mut device, mut name, mut total) = (0, [0; 128], 0);
    // SAFETY: every pointer is to a local that outlives its call; the name is bounded by the length
    // given, and ends in a NUL.
    let name = unsafe {
        if (functions.cuDeviceGet)(&mut device, ordinal) == 0 {
            (functions.cuDeviceGetName)(name.as_mut_ptr(), name.len() as i32 - 1, device);
            (functions.cuDeviceTotalMem_v2)(&mut total, device);
        }
        CStr::from_ptr(name.as_ptr())
    };
    (name.to_string_lossy().into_owned(), total)
}

impl Properties {
    /// Asks the driver. The primary context is retained for good: it is the one that the CUDA
    /// runtime, and so PyTorch, works in.
    pub fn of(functions: &Functions, ordinal: i32, devices: i32) -> Result<Self, String> {
        let failed = |what: &str, status| {
            format!(
                "device {ordinal}: {what} failed: {}",
                functions.error_name(status)
            )
        };
        let mut device = 0;
        // SAFETY: in this function every pointer is to a local that outlives its call.
        let status = unsafe { (functions.cuDeviceGet)(&mut device, ordinal) };
        if status != 0 {
            return Err(failed("cuDeviceGet", status));
        }
        let mut name = [0; 128];
        let mut total = 0;
        let mut context: CUcontext = ptr::null_mut();
        // SAFETY: as above; the name is bounded by the length given.
        unsafe {
            (functions.cuDeviceGetName)(name.as_mut_ptr(), name.len() as i32 - 1, device);
            (functions.cuDeviceTotalMem_v2)(&mut total, device);
            let status = (functions.cuDevicePrimaryCtxRetain)(&mut context, device);
            if status != 0 {
                return Err(failed("cuDevicePrimaryCtxRetain", status));
            }
        }
        let can = |what| {
            let mut value = 0;
            // SAFETY: as above.
            let status = unsafe { (functions.cuDeviceGetAttribute)(&mut value, what, device) };
            status == 0 && value != 0
        };
        let exportable = can(
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        );
        let rdma =
            can(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
        let mut granularity = 0;
        if can(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
            let option = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
            let properties = allocation_properties(device, exportable, rdma);
            // SAFETY: as above.
            let status = unsafe {
                (functions.cuMemGetAllocationGranularity)(&mut granularity, &properties, option)
            };
            if status != 0 || !granularity.is_power_of_two() {
                granularity = 0;
            }
        }
        let mut reachable_by = vec![device];
        for peer in (0..devices).filter(|peer| *peer != ordinal) {
            let (mut other, mut can) = (0, 0);
            // SAFETY: as above.
            let known = unsafe {
                (functions.cuDeviceGet)(&mut other, peer) == 0
                    && (functions.cuDeviceCanAccessPeer)(&mut can, other, device) == 0
            };
            if known && can != 0 {
                reachable_by.push(other);
            }
        }
        let mut uuid = [0; 16];
        // SAFETY: as above; a `CUuuid` is 16 bytes. Where the driver has none the name is all zeros.
        unsafe { (functions.cuDeviceGetUuid_v2)(uuid.as_mut_ptr().cast(), device) };
        let name = name
            .iter()
            .take_while(|c| **c != 0)
            .map(|c| *c as u8 as char)
            .collect();
        Ok(Properties {
            name,
            device,
            context: context as usize,
            total: total as u64,
            granularity: granularity as u64,
            reachable_by,
            exportable,
            rdma,
            uuid,
        })
    }
}

/// What a file descriptor of a chunk is called.
pub const FILE: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

fn allocation_properties(device: CUdevice, exportable: bool, rdma: bool) -> CUmemAllocationProp {
    // SAFETY: the structure is plain data for which zeros are valid; CUDA asks for zeros in what
    // is not set.
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location(device);
    if exportable {
        properties.requestedHandleTypes = FILE;
    }
    properties.allocFlags.gpuDirectRDMACapable = rdma.into();
    properties
}

/// Access of these devices, to read and to write.
pub fn access_of(devices: &[CUdevice]) -> Vec<CUmemAccessDesc> {
    devices
        .iter()
        .map(|device| CUmemAccessDesc {
            location: location(*device),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        })
        .collect()
}

fn location(device: CUdevice) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device,
    }
}

fn refusal(status: u32) -> Result<(), Refusal> {
    match status {
        0 => Ok(()),
        OUT_OF_MEMORY => Err(Refusal::OutOfMemory),
        other => Err(Refusal::Failed(other)),
    }
}

/// The identity of a stream, given its handle. The default stream is never destroyed and needs
/// no call; the per-thread one is named by its thread; for others the driver is asked, but for those
/// that are known to last.
#[inline]
pub fn stream_key(
    functions: &Functions,
    context: usize,
    permanent: &PermanentStreams,
    handle: u64,
) -> StreamKey {
    match handle {
        0 | LEGACY => StreamKey { handle: 0, id: 0 },
        PER_THREAD => StreamKey {
            handle,
            id: thread_number(),
        },
        _ => {
            let known = permanent.get(handle);
            let id = known.unwrap_or_else(|| stream_id(functions, context, handle));
            StreamKey { handle, id }
        }
    }
}

/// Has the driver never asked again for the identity of a stream that is never destroyed. No effect
/// while the stream is captured: it cannot be asked for then.
#[cold]
pub fn add_permanent_stream(
    functions: &Functions,
    context: usize,
    permanent: &PermanentStreams,
    handle: u64,
) {
    if let Some(key) = created_stream(functions, context, handle) {
        permanent.insert(handle, key.id);
    }
}

/// A stream that exists, but for default streams; `None` while it is captured.
pub fn created_stream(functions: &Functions, context: usize, handle: u64) -> Option<StreamKey> {
    if handle <= PER_THREAD {
        return None;
    }
    match stream_id(functions, context, handle) {
        0 | CAPTURED => None,
        id => Some(StreamKey { handle, id }),
    }
}

/// The driver's id for a stream, [`CAPTURED`] while it is captured, 0 where the driver does not know it.
#[inline]
fn stream_id(functions: &Functions, context: usize, handle: u64) -> u64 {
    ask_id(functions, handle).unwrap_or_else(|| stream_id_in(functions, context, handle))
}

/// The same on a thread that has no context yet.
#[cold]
fn stream_id_in(functions: &Functions, context: usize, handle: u64) -> u64 {
    let _current = current(functions, context);
    ask_id(functions, handle).unwrap_or(0)
}

/// To ask a captured stream for its id would end the capture; to ask whether it is captured does not
/// (H100, driver 580, every capture mode).
#[inline]
fn ask_id(functions: &Functions, handle: u64) -> Option<u64> {
    let (mut capturing, mut id) = (0, 0);
    // SAFETY: both outlive the calls; the program vouches for the handle that it passed.
    unsafe {
        if (functions.cuStreamIsCapturing)(handle as CUstream, &mut capturing) != 0 {
            return None;
        }
        if capturing != 0 {
            return Some(CAPTURED);
        }
        ((functions.cuStreamGetId)(handle as CUstream, &mut id) == 0).then_some(id)
    }
}

/// Whether a stream is being captured; `None` where the driver will not say, as for the default
/// stream while a stream that waits for it is.
pub fn is_capturing(functions: &Functions, context: usize, handle: u64) -> Option<bool> {
    let _current = current(functions, context);
    let mut status = 0;
    // SAFETY: `status` outlives the call; the program is using the stream just now.
    match unsafe { (functions.cuStreamIsCapturing)(handle as CUstream, &mut status) } {
        0 => Some(status != 0),
        _ => None,
    }
}

/// The context of another device that a stream belongs to; `None` where it is this device's, or a
/// default stream, which is taken to be.
pub fn foreign_context(functions: &Functions, context: usize, handle: u64) -> Option<usize> {
    if handle <= PER_THREAD {
        return None;
    }
    let _current = current(functions, context);
    let mut owner: CUcontext = ptr::null_mut();
    // SAFETY: `owner` outlives the call; the program is using the stream just now.
    let status = unsafe { (functions.cuStreamGetCtx)(handle as CUstream, &mut owner) };
    (status == 0 && owner as usize != context).then_some(owner as usize)
}

/// Bytes of an allocation that is made only to be freed.
const LEAST: usize = 512;

/// Waits for all work of a context, whatever is being captured, and breaks no capture: `cuMemFree` waits
/// for the device, and a thread may call it in relaxed mode while streams capture. With `as_program` in the
/// thread's own mode, in which it fails where the program's own call would. The driver's status.
pub fn synchronize_in_capture(functions: &Functions, context: usize, as_program: bool) -> u32 {
    let _current = current(functions, context);
    let _relaxed = (!as_program).then(|| RelaxedMode::enter(functions));
    let (mut address, mut host) = (0, ptr::null_mut());
    // SAFETY: both outlive the calls, and are freed only where the driver gave them.
    unsafe {
        match (functions.cuMemAlloc_v2)(&mut address, LEAST) {
            0 => (functions.cuMemFree_v2)(address),
            // To free page-locked memory waits as well.
            OUT_OF_MEMORY => match (functions.cuMemAllocHost_v2)(&mut host, LEAST) {
                0 => (functions.cuMemFreeHost)(host),
                status => status,
            },
            status => status,
        }
    }
}

/// What calls this thread may make while streams capture: all that end no capture, until dropped.
struct RelaxedMode<'a> {
    functions: &'a Functions,
    before: CUstreamCaptureMode,
}

impl<'a> RelaxedMode<'a> {
    fn enter(functions: &'a Functions) -> Self {
        let mut before = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: `before` outlives the call, which writes the thread's mode to it.
        unsafe { (functions.cuThreadExchangeStreamCaptureMode)(&mut before) };
        RelaxedMode { functions, before }
    }
}

impl Drop for RelaxedMode<'_> {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { (self.functions.cuThreadExchangeStreamCaptureMode)(&mut self.before) };
    }
}

/// Events of one context, to be used again.
#[derive(Default)]
pub struct Events(Vec<usize>);

impl Events {
    fn take(&mut self, functions: &Functions) -> Option<usize> {
        if let Some(event) = self.0.pop() {
            return Some(event);
        }
        let mut event: CUevent = ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: `event` outlives the call.
        let status = unsafe { (functions.cuEventCreate)(&mut event, flags) };
        (status == 0).then_some(event as usize)
    }

    /// Lets go of them, in their context; they went with it where it has `ended`.
    fn drop_all(&mut self, functions: &Functions, ended: bool) {
        for event in self.0.drain(..).filter(|_| !ended) {
            // SAFETY: events of ours that nothing waits for, in a context that lives.
            unsafe { (functions.cuEventDestroy_v2)(event as CUevent) };
        }
    }
}

/// Waits for all work of a context while no stream is captured: the event is recorded while none can begin,
/// and a capture that begins during the wait goes on. The driver's status; `None` where streams capture, or
/// may.
pub fn synchronize(functions: &Functions, context: usize, events: &Mutex<Events>) -> Option<u32> {
    let no_capture = NoCapture::hold()?;
    let _current = current(functions, context);
    let Some(event) = events.lock().take(functions) else {
        // The context has failed: it says how.
        // SAFETY: no arguments.
        return Some(unsafe { (functions.cuCtxSynchronize)() });
    };
    // SAFETY: an event of this context, which was retained.
    let mut status =
        unsafe { (functions.cuCtxRecordEvent)(context as CUcontext, event as CUevent) };
    drop(no_capture);
    if status == 0 {
        let _relaxed = RelaxedMode::enter(functions);
        // SAFETY: an event of ours that was recorded.
        status = unsafe { (functions.cuEventSynchronize)(event as CUevent) };
    }
    events.lock().0.push(event);
    Some(status)
}

/// Waits for a stream that exists, in the thread's own context where it is a default stream.
pub fn synchronize_stream(functions: &Functions, handle: u64) {
    let _inside = reentrancy::enter();
    // SAFETY: the program is using the stream just now. Where it has failed there is nothing to wait for.
    unsafe { (functions.cuStreamSynchronize)(handle as CUstream) };
}

/// Makes the device's primary context current until dropped, if it is not already. Meanwhile the thread is
/// inside: the driver works for us.
pub struct Current<'a> {
    functions: &'a Functions,
    pushed: bool,
    _inside: Inside,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped: CUcontext = ptr::null_mut();
            // SAFETY: pops what `current` pushed on this thread.
            unsafe { (self.functions.cuCtxPopCurrent_v2)(&mut popped) };
        }
    }
}

/// Makes the context current for this thread, until what it answers is dropped.
pub fn current<'a>(functions: &'a Functions, context: usize) -> Current<'a> {
    let _inside = reentrancy::enter();
    let mut now: CUcontext = ptr::null_mut();
    // SAFETY: `now` outlives the call.
    let known = unsafe { (functions.cuCtxGetCurrent)(&mut now) } == 0;
    let is_current = known && now as usize == context;
    // SAFETY: the primary context was retained and stays.
    let push = || unsafe { (functions.cuCtxPushCurrent_v2)(context as CUcontext) } == 0;
    let pushed = !is_current && push();
    Current {
        functions,
        pushed,
        _inside,
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
            attending: false,
            wanted_on: None,
            with_extras: true,
            made: Instant::now(),
            spans: Spans::default(),
            ended: false,
            waits,
            live,
        }
    }

    /// A counted call in the device's context.
    fn call(&self, call: Call, body: impl FnOnce(&Functions) -> u32) -> u32 {
        let _current = current(&self.functions, self.properties.context);
        let _relaxed = RelaxedMode::enter(&self.functions);
        self.ledger.call(call, || body(&self.functions))
    }

    /// Notes that a stream is of another device, whose context this is.
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

    /// Records an event on a stream that exists. `None` where it is being captured.
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
        // Where a capture began in between, the event is part of it: to ask it would end the capture.
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

    /// The same where the driver does not give it to all of them: only the device itself, which comes first,
    /// has to have it. Those that are refused are not tried again, but for want of memory.
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

    /// Whether a mapping that the driver did not take down holds this: it goes after that. A chunk's memory
    /// is the device's again only without a mapping.
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

    /// Gives something back, now or later.
    fn give_back(&mut self, what: PendingRelease) {
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
            // It went with its context. Asked again later, the driver would take back what is there by then.
            PendingRelease::Segment { size, .. } if self.ended => self.ledger.give(size),
            PendingRelease::Imported { .. } if self.ended => {}
            _ if status != 0 => self.pending_releases.push(what),
            PendingRelease::Chunk { size, .. } | PendingRelease::Segment { size, .. } => {
                self.ledger.give(size)
            }
            PendingRelease::Mapping { .. }
            | PendingRelease::Addresses { .. }
            | PendingRelease::Imported { .. } => {}
        }
    }

    /// Takes down what is mapped of another process's memory in a range that was reserved for it: its first
    /// `mapped` bytes. Nothing uses it any more.
    pub fn unmap_shared(&mut self, address: u64, mapped: u64, size: u64) {
        self.retry_pending_releases();
        if mapped > 0 {
            self.give_back(PendingRelease::Mapping {
                address,
                size: mapped,
                chunk: None,
            });
        }
        self.give_back(PendingRelease::Addresses { address, size });
    }

    /// Lets go of the handle of a chunk of another process's, which counts its bytes.
    pub fn release_shared(&mut self, chunk: Handle) {
        self.give_back(PendingRelease::Chunk {
            handle: chunk,
            size: 0,
        });
    }

    /// Closes a plain segment of another process once.
    pub fn close_segment(&mut self, address: u64) {
        self.retry_pending_releases();
        self.give_back(PendingRelease::Imported { address });
    }

    /// Tries once more what could not be given back.
    pub fn retry_pending_releases(&mut self) {
        for what in std::mem::take(&mut self.pending_releases) {
            self.give_back(what);
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

    /// Eight times the device's memory: addresses cost next to nothing, and moving uses them up.
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
            // Some systems say that the device can do more than they then let it.
            created = self.try_create(size, false, false);
            self.with_extras = created.is_err();
        }
        let handle = created?;
        self.ledger.take(size);
        Ok(handle)
    }

    fn release(&mut self, chunk: Handle, size: u64) {
        self.spans.remove_part(chunk);
        self.give_back(PendingRelease::Chunk {
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
        self.give_back(PendingRelease::Addresses { address, size });
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
            self.give_back(PendingRelease::Mapping {
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
        // A capture on any stream forbids the call, unless this thread says that it knows better:
        // the memory is no part of the graph. PyTorch's allocator does the same.
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: `address` and `mode` outlive the calls; the second exchange undoes the first.
        refusal(self.call(Call::Alloc, |f| unsafe {
            (f.cuThreadExchangeStreamCaptureMode)(&mut mode);
            let status = (f.cuMemAlloc_v2)(&mut address, size as usize);
            (f.cuThreadExchangeStreamCaptureMode)(&mut mode);
            status
        }))?;
        self.ledger.take(size);
        Ok(address)
    }

    fn free(&mut self, address: u64, size: u64) {
        self.spans.remove_part(address);
        self.give_back(PendingRelease::Segment { address, size });
    }

    fn now(&self) -> u64 {
        match self.functions.simulated {
            true => 0,
            false => self.made.elapsed().as_nanos() as u64,
        }
    }

    fn set_requesting_stream(&mut self, stream: Option<StreamKey>) {
        let context = self.properties.context;
        self.attending = stream.is_some_and(|stream| {
            is_capturing(&self.functions, context, stream.handle) != Some(false)
        });
        self.wanted_on = stream;
    }

    fn has_several_streams(&self) -> bool {
        self.live.len() + LiveStreams::created().len() > 1
    }

    fn is_idle(&mut self, stream: StreamKey) -> bool {
        // To ask a stream that is being captured would end the capture.
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
            // To ask the default stream may end a capture that its device's other streams are in.
            0 | u64::MAX => false,
            PER_THREAD => stream.id == thread_number() && is_idle(PER_THREAD),
            handle if self.wanted_on == Some(stream) => is_idle(handle),
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
                match self.wanted_on == Some(stream) {
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
        // No one stream's wait holds up all that may use memory of no stream's.
        if stream == UNORDERED || !self.may_wait() {
            return false;
        }
        let no_capture = NoCapture::hold();
        if no_capture.is_none() && !captures::are_unseen() {
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
        // Calls that another thread's capture forbids are made in other ways then, or not at all.
        !self.capturing && !self.attending
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
    /// Lets go of the events that are kept to be used again, and of the stream beside the default one. They
    /// belong to a context, and go with it where it has `ended`.
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
