//! Attaches to PyTorch once its current allocator is this library: replaces virtual functions of the
//! allocator object, and registers it where PyTorch looks allocators up by device type.
//!
//! `attach.py` calls [`attach`] when a program changes PyTorch's allocator. Where it could not see that, the
//! first allocation looks.

use super::symbols::Library;
use super::virtual_functions;
use super::vtable::Object;
use super::{exceptions, profiler, slots, tensors};
use crate::entry::attached;
use crate::entry::panic_guard::guard;
use concertina_engine::device;
use concertina_engine::device::captures;
use concertina_engine::process::stats_output;
use concertina_engine::util::message;
use std::ffi::c_void;
use std::mem::transmute;
use std::ptr;
use std::sync::{Mutex, PoisonError};

/// Attaches at the first use of the library, if it is PyTorch that uses it.
pub fn attach_unless_done() {
    if !crate::entry::preload::is_on() && Library::loaded(c"libc10_cuda.so").is_some() {
        // Other libraries of the process may capture by CUDA's own calls.
        captures::expect_unannounced();
    }
    attach(false);
}

/// Attaches to PyTorch's current allocator if that is this library, which the caller may know. Answers
/// whether it is. One line says what could not be replaced.
pub extern "C" fn attach(known: bool) -> bool {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    guard(false, || {
        let _lock = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        if attached::is_attached() {
            return true;
        }
        let object = Object::current();
        let ours = object.as_ref().is_some_and(Object::take_over_if_ours);
        if !ours && !known {
            return false;
        }
        attached::set_attached();
        device::set_torch_allocator();
        stats_output::expect_statistics();
        let mut missing = Vec::new();
        let mut why = String::from("this PyTorch is not built as expected");
        match object {
            Some(object) => {
                let release = object.release();
                missing = object.replace(
                    slots::plain_slots(),
                    slots::class_slots(release),
                    release.map(|_| tensors::slots()).unwrap_or_default(),
                );
                virtual_functions::enable(ptr::null_mut(), true);
                match release {
                    None => {
                        why = "this release of PyTorch is not known, and its C++ objects are left \
                               alone"
                            .into();
                    }
                    Some(release) if !release.strings => {
                        why = "this PyTorch has the std::string of before GCC 5, which is left \
                               alone"
                            .into();
                    }
                    Some(release) if release.snapshot.is_none() => {
                        let (major, minor) = release.version;
                        why = format!("PyTorch {major}.{minor} is fitted in part");
                    }
                    Some(_) => {}
                }
                if register(&object).is_none() {
                    missing.push("torch.accelerator.memory");
                }
            }
            None => missing.push("torch.backends.cudnn.benchmark, torch.cuda.MemPool"),
        }
        if !exceptions::has_out_of_memory_error() {
            missing.push("torch.OutOfMemoryError (RuntimeError is raised in its place)");
        }
        if !profiler::find() {
            missing.push("torch.profiler with profile_memory=True");
        }
        if !missing.is_empty() {
            message::print(&format!(
                "{why}; what works as under any pluggable allocator only: {}",
                missing.join(", ")
            ));
        }
        true
    })
}

/// Registers the object as the allocator of the device type CUDA, which `torch.accelerator` asks.
fn register(object: &Object) -> Option<()> {
    type SetAllocator = unsafe extern "C-unwind" fn(i8, *mut c_void, u8);
    /// `c10::DeviceType::CUDA`.
    const CUDA: i8 = 1;
    /// That of PyTorch's own allocator, which a lower one does not replace: 0 up to 2.11, then 1.
    const PRIORITY: u8 = 1;
    let set = Library::loaded(c"libc10.so")?
        .symbol(c"_ZN3c1012SetAllocatorENS_10DeviceTypeEPNS_9AllocatorEh")?;
    // SAFETY: the mangled name says what it takes; the object is an allocator that is never freed.
    unsafe { transmute::<*mut c_void, SetAllocator>(set)(CUDA, object.address(), PRIORITY) };
    Some(())
}
