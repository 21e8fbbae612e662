//! Objects of C++'s standard library as PyTorch and this library hand them to each other: those of
//! libstdc++, whose layout is part of its ABI and has not changed since GCC 5.

use super::symbols::Library;
use crate::entry::guard::guard;
use concertina_engine::runtime::sharing::Opened;
use std::ffi::c_void;
use std::mem::transmute;
use std::sync::atomic::AtomicI32;
use std::sync::{Arc, OnceLock};
use std::{ptr, slice};

/// The longest text that `std::string` keeps inside itself.
const INSIDE: usize = 15;

type New = unsafe extern "C-unwind" fn(usize) -> *mut c_void;

/// `operator new`, of the library that frees what it allocates.
fn new() -> Option<New> {
    static FOUND: OnceLock<Option<New>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let function = Library::loaded(c"libstdc++.so.6")?.symbol(c"_Znwm")?;
        // SAFETY: the mangled name says what it takes and gives.
        Some(unsafe { transmute::<*mut c_void, New>(function) })
    })
}

/// `std::string`, in the form that keeps its text outside itself: such a one may be moved as bytes.
#[repr(C)]
pub struct CxxString {
    text: *mut u8,
    length: usize,
    /// The capacity where the text lies outside; else the text.
    capacity: [usize; 2],
}

impl CxxString {
    /// Whoever takes it over frees it. `None` where there is no libstdc++.
    pub fn of(text: &[u8]) -> Option<CxxString> {
        let capacity = text.len().max(INSIDE + 1);
        // SAFETY: a plain allocation, which has room for the text and the zero behind it.
        let to = unsafe {
            let to = new()?(capacity + 1).cast::<u8>();
            to.copy_from_nonoverlapping(text.as_ptr(), text.len());
            to.add(text.len()).write(0);
            to
        };
        Some(CxxString {
            text: to,
            length: text.len(),
            capacity: [capacity, 0],
        })
    }

    /// The text.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: wherever the text lies, it is so long; it is not changed while this is borrowed.
        unsafe { slice::from_raw_parts(self.text, self.length) }
    }
}

/// `std::shared_ptr<void>`.
#[repr(C)]
pub struct SharedPointer {
    address: *mut c_void,
    counts: *mut Counts,
}

impl SharedPointer {
    /// Points at nothing.
    pub const NULL: SharedPointer = SharedPointer {
        address: ptr::null_mut(),
        counts: ptr::null_mut(),
    };

    /// Points into opened memory, and holds it until the last copy is gone.
    pub fn to(opened: Arc<Opened>) -> SharedPointer {
        let address = opened.address() as *mut c_void;
        let counts = Box::new(Counts {
            functions: &TABLE.in_place_destructor,
            users: AtomicI32::new(1),
            weak: AtomicI32::new(1),
            opened: Some(opened),
        });
        SharedPointer {
            address,
            counts: Box::into_raw(counts),
        }
    }
}

/// What a `std::shared_ptr` counts its copies in: `std::_Sp_counted_base`, and behind it what is held.
#[repr(C)]
struct Counts {
    functions: *const Function,
    /// C++ counts both.
    users: AtomicI32,
    weak: AtomicI32,
    opened: Option<Arc<Opened>>,
}

type Function = unsafe extern "C" fn(*mut Counts);

/// The virtual functions of `std::_Sp_counted_base`, in their order.
#[repr(C)]
struct Table {
    /// The object's offset, and its type, which nobody asks for.
    before: [usize; 2],
    in_place_destructor: Function,
    deleting_destructor: Function,
    dispose: Function,
    destroy: Function,
    get_deleter: unsafe extern "C" fn(*mut Counts, *const c_void) -> *mut c_void,
}

static TABLE: Table = Table {
    before: [0; 2],
    in_place_destructor: dispose,
    deleting_destructor: destroy,
    dispose,
    destroy,
    get_deleter,
};

/// The last user is gone.
unsafe extern "C" fn dispose(counts: *mut Counts) {
    // SAFETY: C++ calls this once, with what `SharedPointer::to` made; nobody else has it then.
    guard((), || unsafe { (*counts).opened = None });
}

/// Nobody knows of the counts any more.
unsafe extern "C" fn destroy(counts: *mut Counts) {
    // SAFETY: as above, and nobody uses them from here on.
    guard((), || drop(unsafe { Box::from_raw(counts) }));
}

/// There is no deleter to be asked for.
unsafe extern "C" fn get_deleter(_: *mut Counts, _: *const c_void) -> *mut c_void {
    ptr::null_mut()
}
