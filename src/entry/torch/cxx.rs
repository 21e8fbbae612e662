//! Objects of C++'s standard library as PyTorch and this library hand them to each other: those of
//! libstdc++, whose layout is part of its ABI and has not changed since GCC 5.

use super::symbols::Library;
use crate::entry::panic_guard::guard;
use concertina_engine::ipc::Imported;
use std::ffi::c_void;
use std::mem::transmute;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
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

/// So many bytes that C++ may free. `None` where there is no libstdc++.
pub fn allocate(bytes: usize) -> Option<*mut c_void> {
    // SAFETY: a plain allocation.
    new().map(|new| unsafe { new(bytes) })
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

/// `std::vector`.
#[repr(C)]
pub struct CxxVector<T> {
    begin: *mut T,
    end: *mut T,
    capacity: *mut T,
}

impl<T> CxxVector<T> {
    /// What is in it.
    pub fn elements(&self) -> &[T] {
        // An empty one may have no memory.
        match self.begin.is_null() {
            true => &[],
            // SAFETY: its elements lie from the one to the other; they are not changed while this is
            // borrowed.
            false => unsafe {
                slice::from_raw_parts(self.begin, self.end.offset_from_unsigned(self.begin))
            },
        }
    }

    /// Whoever takes it over frees it, and its elements. `None` where there is no libstdc++.
    pub fn of(elements: Vec<T>) -> Option<CxxVector<T>> {
        let count = elements.len();
        // SAFETY: a plain allocation, aligned for all that is no larger than two words, with room for the
        // elements, which move there: the vector is left without them.
        unsafe {
            let begin = new()?(size_of::<T>() * count).cast::<T>();
            let mut elements = elements;
            begin.copy_from_nonoverlapping(elements.as_ptr(), count);
            elements.set_len(0);
            let end = begin.add(count);
            Some(CxxVector {
                begin,
                end,
                capacity: end,
            })
        }
    }
}

/// `std::shared_ptr<void>`.
#[repr(C)]
pub struct SharedPointer {
    address: *mut c_void,
    counts: *mut Counts,
}

// SAFETY: what C++ shares by such pointers it counts, and lets go of, on any thread.
unsafe impl Send for SharedPointer {}

impl Clone for SharedPointer {
    fn clone(&self) -> Self {
        if !self.counts.is_null() {
            // SAFETY: they live as long as anybody points by them, and this one does.
            unsafe { (*self.counts).users.fetch_add(1, Relaxed) };
        }
        SharedPointer { ..*self }
    }
}

impl Drop for SharedPointer {
    fn drop(&mut self) {
        if self.counts.is_null() {
            return;
        }
        // SAFETY: as above, until the weak count, of which all users together have one, is down to 0. The
        // functions are those of the class, from its first on.
        unsafe {
            let table = (*self.counts).functions;
            if (*self.counts).users.fetch_sub(1, AcqRel) == 1 {
                ((*table).dispose)(self.counts);
                if (*self.counts).weak.fetch_sub(1, AcqRel) == 1 {
                    ((*table).destroy)(self.counts);
                }
            }
        }
    }
}

impl SharedPointer {
    /// What it points at.
    pub fn address(&self) -> *mut c_void {
        self.address
    }

    /// Points at nothing.
    pub const NULL: SharedPointer = SharedPointer {
        address: ptr::null_mut(),
        counts: ptr::null_mut(),
    };

    /// Points into opened memory, and holds it until the last copy is gone.
    pub fn to(opened: Arc<Imported>) -> SharedPointer {
        let address = opened.address() as *mut c_void;
        let counts = Box::new(Counts {
            functions: &raw const TABLE.functions,
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

/// What a `std::shared_ptr` counts its copies in: `std::_Sp_counted_base`, and behind it what is held where
/// it is one of ours.
#[repr(C)]
struct Counts {
    functions: *const Functions,
    /// C++ counts both.
    users: AtomicI32,
    weak: AtomicI32,
    opened: Option<Arc<Imported>>,
}

type Function = unsafe extern "C-unwind" fn(*mut Counts);

#[repr(C)]
struct Table {
    /// The object's offset, and its type, which nobody asks for.
    before: [usize; 2],
    functions: Functions,
}

/// The virtual functions of `std::_Sp_counted_base`, in their order.
#[repr(C)]
struct Functions {
    in_place_destructor: Function,
    deleting_destructor: Function,
    dispose: Function,
    destroy: Function,
    get_deleter: unsafe extern "C" fn(*mut Counts, *const c_void) -> *mut c_void,
}

static TABLE: Table = Table {
    before: [0; 2],
    functions: Functions {
        in_place_destructor: dispose,
        deleting_destructor: destroy,
        dispose,
        destroy,
        get_deleter,
    },
};

/// The last user is gone.
unsafe extern "C-unwind" fn dispose(counts: *mut Counts) {
    // SAFETY: C++ calls this once, with what `SharedPointer::to` made; nobody else has it then.
    guard((), || unsafe { (*counts).opened = None });
}

/// Nobody knows of the counts any more.
unsafe extern "C-unwind" fn destroy(counts: *mut Counts) {
    // SAFETY: as above, and nobody uses them from here on.
    guard((), || drop(unsafe { Box::from_raw(counts) }));
}

/// There is no deleter to be asked for.
unsafe extern "C" fn get_deleter(_: *mut Counts, _: *const c_void) -> *mut c_void {
    ptr::null_mut()
}
