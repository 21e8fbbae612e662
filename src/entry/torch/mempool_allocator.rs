//! Allocators that a program passes to `torch.cuda.MemPool`: they supply the memory of that pool.

use super::cxx::SharedPointer;
use super::symbols::Library;
use super::vtable;
use crate::entry::preload::program_calls;
use concertina_engine::device::Supplier;
use std::ffi::{CStr, c_void};
use std::mem::transmute;
use std::sync::Arc;

type This = *mut c_void;
type RawAlloc = unsafe extern "C-unwind" fn(This, usize) -> *mut c_void;
type RawDelete = unsafe extern "C-unwind" fn(This, *mut c_void);

/// A `c10::cuda::CUDACachingAllocator::CUDAAllocator` of the program's.
struct Allocator {
    object: This,
    /// Keeps it alive, where PyTorch counts its users.
    _user: SharedPointer,
    alloc: RawAlloc,
    delete: RawDelete,
}

// SAFETY: PyTorch calls an allocator from every thread, and counts its users atomically.
unsafe impl Send for Allocator {}
// SAFETY: as above.
unsafe impl Sync for Allocator {}

impl Supplier for Allocator {
    fn allocate(&self, bytes: u64) -> Option<u64> {
        // What a preloaded program's allocator takes from CUDA is CUDA's: the pool would look for it here.
        let _own = program_calls::enter();
        // SAFETY: the object's own function, and the object lives as long as this.
        let address = unsafe { (self.alloc)(self.object, bytes as usize) };
        (!address.is_null()).then_some(address as u64)
    }

    fn free(&self, address: u64) {
        let _own = program_calls::enter();
        // SAFETY: as above; the address is one that it gave.
        unsafe { (self.delete)(self.object, address as *mut c_void) }
    }
}

/// The supplier, given the allocator as PyTorch passes it: by a `std::shared_ptr` of the caller's (from 2.11
/// on), or by its address. `None` where the pool's memory is to be this library's.
///
/// # Safety `passed` is what PyTorch passed.
pub unsafe fn of(passed: *const c_void) -> Option<Arc<dyn Supplier>> {
    let user = match is_counted() {
        _ if passed.is_null() => return None,
        // SAFETY: a `std::shared_ptr` that lives until the caller returns.
        true => unsafe { (*passed.cast::<SharedPointer>()).clone() },
        false => SharedPointer::NULL,
    };
    let object = match is_counted() {
        true => user.address(),
        false => passed.cast_mut(),
    };
    if object.is_null() {
        return None;
    }
    // SAFETY: an allocator, which lives.
    let (alloc, delete) = unsafe { vtable::raw_functions(object) }?;
    // SAFETY: the functions at the places of `raw_alloc` and `raw_delete`.
    let (alloc, delete) = unsafe {
        (
            transmute::<*const (), RawAlloc>(alloc),
            transmute::<*const (), RawDelete>(delete),
        )
    };
    Some(Arc::new(Allocator {
        object,
        _user: user,
        alloc,
        delete,
    }))
}

/// Whether PyTorch counts the users of a pool's allocator, as the way in which pools are made says.
fn is_counted() -> bool {
    const COUNTED: &CStr =
        c"_ZN2at4cuda7MemPoolC1ESt10shared_ptrIN3c104cuda20CUDACachingAllocator13CUDAAllocatorEEbbb";
    Library::loaded(c"libtorch_cuda.so").is_some_and(|torch| torch.symbol(COUNTED).is_some())
}
