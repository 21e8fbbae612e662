//! The simulated GPU behaves as the real driver promises, and reports programs that break the driver's rules.
//!
//! For each area, every promise has a test that relies on it, and every check one that provokes it.

mod captures;
mod contexts;
mod copies;
mod failures_on_demand;
mod graphs;
mod mappings;
mod memory;
mod memory_pools;
mod ownership;
mod pace;
mod race_detector;
mod signatures;
mod simulation_cost;
mod streams;

use concertina_sim::*;
use cudarc::driver::sys::{
    CUcontext, CUdevice_attribute, CUevent, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationProp, CUmemAllocationType, CUmemLocationType,
    CUresult, CUstream,
};
use std::ffi::c_void;
use std::ptr::{null_mut, without_provenance_mut};

/// The granularity of the machines here.
const CHUNK: u64 = 2 << 20;

/// A status that a call should answer with.
fn status(answer: u32, expected: CUresult) {
    assert_eq!(answer, expected as u32, "expected {expected:?}");
}

fn ok(answer: u32) {
    status(answer, CUresult::CUDA_SUCCESS);
}

fn invalid(answer: u32) {
    status(answer, CUresult::CUDA_ERROR_INVALID_VALUE);
}

/// A machine with device 0's context current on this thread.
struct Rig {
    machine: Machine,
    _bound: Bound,
}

impl Rig {
    fn new(config: Config) -> Rig {
        let machine = Machine::new(config);
        let bound = machine.bind();
        // SAFETY: outputs are locals; as everywhere in these tests.
        unsafe {
            ok(cuInit(0));
            let mut context = null_mut();
            ok(cuDevicePrimaryCtxRetain(&mut context, 0));
            ok(cuCtxPushCurrent_v2(context));
        }
        Rig {
            machine,
            _bound: bound,
        }
    }

    /// The usual machine, whose work is held back.
    fn held() -> Rig {
        let rig = Rig::new(Config::default());
        rig.machine.set_pace(Pace::Held);
        rig
    }

    /// Takes the violations, of which there is one, with this in it.
    fn one_violation(&self, part: &str) {
        let violations = self.machine.violations();
        assert!(
            violations.len() == 1 && violations[0].contains(part),
            "{violations:?}"
        );
    }
}

fn properties(device: i32) -> CUmemAllocationProp {
    // SAFETY: plain data, for which zeroes are the documented rest.
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    properties
}

fn create(size: u64) -> u64 {
    let mut handle = 0;
    // SAFETY: reads and writes locals.
    ok(unsafe { cuMemCreate(&mut handle, size as usize, &properties(0), 0) });
    handle
}

fn try_create(device: i32, size: u64) -> u32 {
    let mut handle = 0;
    // SAFETY: reads and writes locals.
    unsafe { cuMemCreate(&mut handle, size as usize, &properties(device), 0) }
}

fn release(handle: u64) {
    // SAFETY: a number.
    ok(unsafe { cuMemRelease(handle) });
}

fn reserve(size: u64) -> u64 {
    let mut address = 0;
    // SAFETY: writes a local.
    ok(unsafe { cuMemAddressReserve(&mut address, size as usize, 0, 0, 0) });
    address
}

fn map(address: u64, size: u64, handle: u64) -> u32 {
    // SAFETY: numbers only.
    unsafe { cuMemMap(address, size as usize, 0, handle, 0) }
}

fn unmap(address: u64, size: u64) -> u32 {
    // SAFETY: no test keeps references into device memory.
    unsafe { cuMemUnmap(address, size as usize) }
}

fn access(address: u64, size: u64, device: i32, flags: CUmemAccess_flags) -> u32 {
    let location = properties(device).location;
    let wish = CUmemAccessDesc { location, flags };
    // SAFETY: reads a local.
    unsafe { cuMemSetAccess(address, size as usize, &wish, 1) }
}

fn open(address: u64, size: u64) -> u32 {
    access(
        address,
        size,
        0,
        CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    )
}

/// A fresh chunk of memory, mapped and open; its handle is released.
fn mapped(size: u64) -> u64 {
    let address = reserve(size);
    let handle = create(size);
    ok(map(address, size, handle));
    ok(open(address, size));
    release(handle);
    address
}

fn alloc(bytes: u64) -> u64 {
    let mut address = 0;
    // SAFETY: writes a local.
    ok(unsafe { cuMemAlloc_v2(&mut address, bytes as usize) });
    address
}

fn free(address: u64) -> u32 {
    // SAFETY: no test keeps references into device memory.
    unsafe { cuMemFree_v2(address) }
}

const LEGACY: CUstream = null_mut();

fn per_thread() -> CUstream {
    without_provenance_mut(2)
}

fn stream_with(flags: u32) -> CUstream {
    let mut stream = null_mut();
    // SAFETY: writes a local.
    ok(unsafe { cuStreamCreate(&mut stream, flags) });
    stream
}

/// A non-blocking stream.
fn stream() -> CUstream {
    stream_with(1)
}

fn destroy(stream: CUstream) {
    // SAFETY: a handle.
    ok(unsafe { cuStreamDestroy_v2(stream) });
}

fn event() -> CUevent {
    let mut event = null_mut();
    // SAFETY: writes a local.
    ok(unsafe { cuEventCreate(&mut event, 2) });
    event
}

fn record(event: CUevent, stream: CUstream) {
    // SAFETY: handles.
    ok(unsafe { cuEventRecord(event, stream) });
}

/// A new event, recorded.
fn recorded(stream: CUstream) -> CUevent {
    let event = event();
    record(event, stream);
    event
}

fn wait(stream: CUstream, event: CUevent) {
    // SAFETY: handles.
    ok(unsafe { cuStreamWaitEvent(stream, event, 0) });
}

fn query(event: CUevent) -> u32 {
    // SAFETY: a handle.
    unsafe { cuEventQuery(event) }
}

fn not_ready(answer: u32) {
    status(answer, CUresult::CUDA_ERROR_NOT_READY);
}

fn synchronise() -> u32 {
    // SAFETY: has no arguments.
    unsafe { cuCtxSynchronize() }
}

fn synchronise_stream(stream: CUstream) -> u32 {
    // SAFETY: a handle.
    unsafe { cuStreamSynchronize(stream) }
}

fn fill(address: u64, value: u32, bytes: u64, stream: CUstream) -> u32 {
    // SAFETY: device memory only.
    unsafe { cuMemsetD32Async(address, value, bytes as usize / 4, stream) }
}

fn copy(to: u64, from: u64, bytes: u64, stream: CUstream) -> u32 {
    // SAFETY: device memory only.
    unsafe { cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream) }
}

/// The first word at an address, once the stream has got there.
fn word(address: u64, stream: CUstream) -> u32 {
    let mut word = 0_u32;
    // SAFETY: the local lives until the synchronise below.
    ok(unsafe { cuMemcpyDtoHAsync_v2((&raw mut word).cast(), address, 4, stream) });
    ok(synchronise_stream(stream));
    word
}

/// Enqueues a host function that adds to a counter, which must outlive it.
fn count_up(stream: CUstream, counter: &'static std::sync::atomic::AtomicU32) -> u32 {
    unsafe extern "C" fn add(counter: *mut c_void) {
        // SAFETY: the argument below.
        let counter = unsafe { &*counter.cast::<std::sync::atomic::AtomicU32>() };
        counter.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
    }
    // SAFETY: the counter is static.
    unsafe { cuLaunchHostFunc(stream, Some(add), (&raw const *counter).cast_mut().cast()) }
}

/// A counter for [`count_up`].
fn counter() -> &'static std::sync::atomic::AtomicU32 {
    Box::leak(Box::default())
}
