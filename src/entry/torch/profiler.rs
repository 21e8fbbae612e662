//! `torch.profiler` with `profile_memory=True`: PyTorch's allocators report each block to it.

use super::state::{PROFILER, may_have_observer, set_observer};
use super::symbols::Library;

use crate::entry::panic_guard::guard;
use concertina_engine::device::Device;
use concertina_engine::device::MemoryInUse;
use std::ffi::c_void;
use std::mem::transmute;
use std::sync::OnceLock;

/// `c10::Device`, passed in a register.
#[repr(C)]
#[derive(Clone, Copy)]
struct CxxDevice {
    /// `c10::DeviceType`; 1 is CUDA.
    kind: i8,
    index: i8,
}

type Enabled = unsafe extern "C-unwind" fn() -> bool;
type Memory = unsafe extern "C-unwind" fn(*mut c_void, i64, usize, usize, CxxDevice);
type OutOfMemory = unsafe extern "C-unwind" fn(i64, usize, usize, CxxDevice);

struct Profiler {
    enabled: Enabled,
    memory: Memory,
    out_of_memory: OutOfMemory,
}

static FUNCTIONS: OnceLock<Profiler> = OnceLock::new();

/// Called by `attach.py`, which sees profilers start: whether one may be active. To ask PyTorch costs as much
/// as to allocate.
pub extern "C" fn set_profiling(active: bool) {
    set_observer(PROFILER, active);
}

/// Looks PyTorch's functions up. Answers whether all are there.
pub fn find() -> bool {
    let Some(c10) = Library::loaded(c"libc10.so") else {
        return false;
    };
    let enabled = c10.symbol(c"_ZN3c1022memoryProfilingEnabledEv");
    let memory = c10.symbol(c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE");
    let out_of_memory = c10.symbol(c"_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE");
    let (Some(enabled), Some(memory), Some(out_of_memory)) = (enabled, memory, out_of_memory)
    else {
        return false;
    };
    // SAFETY: the mangled names say what each takes, and PyTorch's header what the first gives.
    let profiler = unsafe {
        Profiler {
            enabled: transmute::<*mut c_void, Enabled>(enabled),
            memory: transmute::<*mut c_void, Memory>(memory),
            out_of_memory: transmute::<*mut c_void, OutOfMemory>(out_of_memory),
        }
    };
    FUNCTIONS.set(profiler).is_ok() || FUNCTIONS.get().is_some()
}

/// The profiler, while this thread's work is profiled with its memory.
#[inline]
fn active() -> Option<&'static Profiler> {
    if !may_have_observer(PROFILER) {
        return None;
    }
    // SAFETY: takes nothing, and reads this thread's state.
    FUNCTIONS.get().filter(|it| unsafe { (it.enabled)() })
}

/// Whether this thread's work is profiled with its memory.
#[inline]
pub fn is_enabled() -> bool {
    active().is_some()
}

/// Reports that a block was allocated, or with a negative size, freed.
#[cold]
pub fn report(device: &Device, address: u64, size: i64) {
    if let Some(profiler) = active() {
        let usage = usage(device);
        // SAFETY: as the header has it; no lock of ours is held, and an exception goes on to PyTorch.
        unsafe {
            (profiler.memory)(
                address as *mut c_void,
                size,
                usage.live_of_allocator as usize,
                usage.reserved as usize,
                cxx(device),
            )
        };
    }
}

/// Reports that a request for `size` bytes could not be met.
#[cold]
pub fn report_out_of_memory(device: &Device, size: usize) {
    if let Some(profiler) = active() {
        let usage = usage(device);
        // SAFETY: as above.
        unsafe {
            (profiler.out_of_memory)(
                size as i64,
                usage.live_of_allocator as usize,
                usage.reserved as usize,
                cxx(device),
            )
        };
    }
}

fn usage(device: &Device) -> MemoryInUse {
    guard(MemoryInUse::default(), || device.usage())
}

fn cxx(device: &Device) -> CxxDevice {
    CxxDevice {
        kind: 1,
        index: device.ordinal() as i8,
    }
}
