//! Tensors' memory: the virtual functions of PyTorch's allocator object that allocate and free.
//!
//! PyTorch's own call the pluggable functions, and keep a map of blocks with their sizes, devices and streams
//! under a lock, to pass those to the function that frees. The pool knows them itself, so these functions go
//! straight to it.
//!
//! PyTorch is asked for the current stream, and for the handles of the streams that it never destroys.

use super::abi::CUstream_st;
use super::pluggable::{allocate, free, release};
use super::symbols::{Library, member};
use super::vtable::{RAW_ALLOC, RAW_DELETE};
use super::{devices, notify};
use crate::entry::panic_guard::guard;
use concertina_engine::device::InsertOnlyMap;
use concertina_engine::device::owner_hint;
use std::ffi::{CStr, c_int, c_void};
use std::mem::transmute;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

type This = *mut c_void;

/// `c10::cuda::CUDAStream`, passed and returned in two registers.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CxxStream {
    /// `c10::Device`: kind and index.
    device: [i8; 2],
    id: i64,
}

/// `c10::DataPtr`: the address, a `std::unique_ptr` that frees it, whose function libstdc++ puts before
/// what it is to free, and the device.
#[repr(C)]
pub struct DataPtr {
    data: *mut c_void,
    free: *const (),
    context: *mut c_void,
    device: [i8; 2],
}

/// `c10::DeviceType::CUDA`.
const CUDA: i8 = 1;

type Allocate = unsafe extern "C-unwind" fn(*mut DataPtr, This, usize) -> *mut DataPtr;
type RawAlloc = unsafe extern "C-unwind" fn(This, usize) -> *mut c_void;
type RawAllocOn = unsafe extern "C-unwind" fn(This, usize, *mut CUstream_st) -> *mut c_void;
type RawDeleter = unsafe extern "C-unwind" fn(This) -> *const ();
type GetDevice = unsafe extern "C-unwind" fn(*mut i8) -> c_int;
type CurrentStream = unsafe extern "C-unwind" fn(i8) -> CxxStream;
type Handle = unsafe extern "C-unwind" fn(*const CxxStream) -> *mut CUstream_st;

/// Functions of PyTorch's.
struct Functions {
    // The object's own, for what is not as expected.
    allocate: Allocate,
    raw_alloc: RawAlloc,
    raw_alloc_on: RawAllocOn,
    /// Answers the function that frees a tensor's memory, which calls [`raw_delete`].
    raw_deleter: RawDeleter,
    get_device: GetDevice,
    current_stream: CurrentStream,
    handle: Handle,
}

static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();

/// `c10::cuda::CUDAStream::stream() const`.
fn handle_function() -> Option<Handle> {
    static HANDLE: OnceLock<Option<Handle>> = OnceLock::new();
    *HANDLE.get_or_init(|| {
        let c10 = Library::loaded(c"libc10_cuda.so")?;
        let function = c10.symbol(c"_ZNK3c104cuda10CUDAStream6streamEv")?;
        // SAFETY: the mangled name says what it takes, and PyTorch's header what it gives.
        Some(unsafe { transmute::<*mut c_void, Handle>(function) })
    })
}

/// The names of PyTorch's functions, and ours in their place; none where PyTorch lacks a function that those
/// need.
pub fn slots() -> Vec<(&'static CStr, *const ())> {
    if FUNCTIONS.get_or_init(Functions::find).is_none() {
        return Vec::new();
    }
    let mut slots = vec![
        (RAW_ALLOC, raw_alloc as *const ()),
        (RAW_ALLOC_ON, raw_alloc_with_stream as *const ()),
        (RAW_DELETE, raw_delete as *const ()),
    ];
    // It returns a class; ours takes the memory for it as its first argument, as x86-64 passes it.
    if cfg!(target_arch = "x86_64") {
        slots.push((ALLOCATE, allocate_tensor as *const ()));
    }
    slots
}

const ALLOCATE: &CStr = member!("8allocateEm");
const RAW_ALLOC_ON: &CStr = member!("21raw_alloc_with_streamEmP11CUstream_st");
/// It is a `const` member, and so mangled differently.
const RAW_DELETER: &CStr =
    c"_ZNK5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator11raw_deleterEv";

/// They were found when the functions of this file were put into the table.
#[inline(always)]
fn functions() -> Option<&'static Functions> {
    FUNCTIONS.get()?.as_ref()
}

impl Functions {
    fn find() -> Option<Functions> {
        let torch = Library::loaded(c"libtorch_cuda.so")?;
        let c10 = Library::loaded(c"libc10_cuda.so")?;
        let device = c10.symbol(c"_ZN3c104cuda9GetDeviceEPa")?;
        let stream = c10.symbol(c"_ZN3c104cuda20getCurrentCUDAStreamEa")?;
        // SAFETY: the mangled names say what each takes, and PyTorch's headers what they give.
        unsafe {
            Some(Functions {
                allocate: transmute::<*mut c_void, Allocate>(torch.symbol(ALLOCATE)?),
                raw_alloc: transmute::<*mut c_void, RawAlloc>(torch.symbol(RAW_ALLOC)?),
                raw_alloc_on: transmute::<*mut c_void, RawAllocOn>(torch.symbol(RAW_ALLOC_ON)?),
                raw_deleter: transmute::<*mut c_void, RawDeleter>(torch.symbol(RAW_DELETER)?),
                get_device: transmute::<*mut c_void, GetDevice>(device),
                current_stream: transmute::<*mut c_void, CurrentStream>(stream),
                handle: handle_function()?,
            })
        }
    }

    /// This thread's device; `None` where CUDA has an error.
    #[inline(always)]
    fn device(&self) -> Option<i8> {
        let mut device = -1;
        // SAFETY: `device` outlives the call.
        (unsafe { (self.get_device)(&mut device) } == 0).then_some(device)
    }

    /// The stream that this thread's work on the device goes to, by its handle.
    #[inline(always)]
    fn stream(&self, device: i8) -> *mut CUstream_st {
        // SAFETY: the number of a device, which PyTorch answered just now.
        let stream = unsafe { (self.current_stream)(device) };
        handle(self.handle, stream)
    }
}

/// The handles of streams that PyTorch keeps, by number and device.
static HANDLES: InsertOnlyMap<2048> = InsertOnlyMap::new();

/// The handle of one of PyTorch's streams. The default stream's number is 0 and its handle null. PyTorch
/// never destroys the streams that it made; the number of a stream that it was given is its handle.
#[inline(always)]
fn handle(ask: Handle, stream: CxxStream) -> *mut CUstream_st {
    if stream.id == 0 {
        return std::ptr::null_mut();
    }
    let key = (stream.id as u64) << 8 | u64::from(stream.device[1] as u8);
    match HANDLES.get(key) {
        Some(handle) => handle as *mut CUstream_st,
        None => ask_handle(ask, stream, key),
    }
}

#[cold]
fn ask_handle(ask: Handle, stream: CxxStream, key: u64) -> *mut CUstream_st {
    // SAFETY: a stream of PyTorch's that outlives the call.
    let handle = unsafe { ask(&stream) };
    if handle as i64 != stream.id {
        guard((), || {
            let device = devices::in_use(stream.device[1].into());
            // Nothing is kept before the device is open.
            if let Some(device) = device {
                device.add_permanent_stream(handle as u64);
                HANDLES.insert(key, handle as u64);
            }
        });
    }
    handle
}

/// The handle of a stream that PyTorch names; `None` where PyTorch has no function to ask.
pub fn handle_of(stream: CxxStream) -> Option<*mut CUstream_st> {
    Some(handle(handle_function()?, stream))
}

/// [`allocate`], and a hint for the free.
#[inline(always)]
unsafe fn allocate_on_stream(size: usize, device: i8, stream: *mut CUstream_st) -> *mut c_void {
    // SAFETY: PyTorch, which called, lets exceptions through.
    let address = unsafe { allocate(size, device.into(), stream) };
    owner_hint::set(address as u64, device.into(), stream as u64);
    address
}

unsafe extern "C-unwind" fn raw_alloc(this: This, size: usize) -> *mut c_void {
    let Some(functions) = functions() else {
        return std::ptr::null_mut();
    };
    // SAFETY: as PyTorch calls it.
    unsafe {
        match functions.device() {
            Some(device) => allocate_on_stream(size, device, functions.stream(device)),
            None => (functions.raw_alloc)(this, size),
        }
    }
}

unsafe extern "C-unwind" fn raw_alloc_with_stream(
    this: This,
    size: usize,
    stream: *mut CUstream_st,
) -> *mut c_void {
    let Some(functions) = functions() else {
        return std::ptr::null_mut();
    };
    // SAFETY: as PyTorch calls it.
    unsafe {
        match functions.device() {
            Some(device) => allocate_on_stream(size, device, stream),
            None => (functions.raw_alloc_on)(this, size, stream),
        }
    }
}

/// Whether a `DataPtr` is laid out as expected: [`UNKNOWN`] until one of PyTorch's own was looked at.
static LAYOUT: AtomicU8 = AtomicU8::new(UNKNOWN);
const UNKNOWN: u8 = 0;
const KNOWN: u8 = 1;
const OTHER: u8 = 2;

unsafe extern "C-unwind" fn allocate_tensor(
    result: *mut DataPtr,
    this: This,
    size: usize,
) -> *mut DataPtr {
    let Some(functions) = functions() else {
        return result;
    };
    // SAFETY: as PyTorch calls it; `result` has room for a `c10::DataPtr`.
    unsafe {
        let free = (functions.raw_deleter)(this);
        match functions.device() {
            Some(device) if LAYOUT.load(Relaxed) == KNOWN => {
                let data = allocate_on_stream(size, device, functions.stream(device));
                result.write(DataPtr {
                    data,
                    free,
                    context: data,
                    device: [CUDA, device],
                });
            }
            device => {
                (functions.allocate)(result, this, size);
                if LAYOUT.load(Relaxed) == UNKNOWN && size > 0 {
                    let made = &*result;
                    let expected = made.free == free
                        && made.context == made.data
                        && Some(made.device[1]) == device
                        && made.device[0] == CUDA
                        && devices::in_use(made.device[1].into())
                            .is_some_and(|it| it.size_of(made.data as u64).is_some());
                    LAYOUT.store(if expected { KNOWN } else { OTHER }, Relaxed);
                }
            }
        }
    }
    result
}

/// Frees what these functions allocated, or PyTorch's own before them.
extern "C-unwind" fn raw_delete(_: This, pointer: *mut c_void) {
    if notify::is_observed() {
        return delete_observed(pointer);
    }
    guard((), || {
        let (device, stream) = owner_hint::get(pointer as u64);
        free(pointer, device, stream);
    });
}

/// [`raw_delete`] while blocks are observed: observers are told the size and the stream.
#[cold]
fn delete_observed(pointer: *mut c_void) {
    let found = guard(None, || {
        devices::all_in_use().find_map(|device| {
            let (size, stream) = device.block_at(pointer as u64)?;
            Some((size, device.ordinal(), stream))
        })
    });
    match found {
        Some((size, device, stream)) => {
            release(pointer, size as usize, device, stream as *mut CUstream_st);
        }
        // Prints that it is not in use.
        None => guard((), || free(pointer, 0, 0)),
    }
}
