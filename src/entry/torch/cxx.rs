//! Classes of C++'s standard library that PyTorch and this library pass to each other. They are libstdc++'s,
//! whose layout is part of its ABI and has not changed since GCC 5.

use super::symbols::Library;
use crate::entry::panic_guard::guard;
use concertina_engine::ipc::Imported;
use std::ffi::{CStr, c_void};
use std::mem::transmute;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::{Arc, OnceLock};
use std::{ptr, slice};

/// The longest text that `std::string` keeps inside itself.
const SHORT: usize = 15;

type New = unsafe extern "C-unwind" fn(usize) -> *mut c_void;

/// `operator new` of libstdc++, whose `operator delete` frees it.
fn new() -> Option<New> {
    static FOUND: OnceLock<Option<New>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let function = Library::loaded(c"libstdc++.so.6")?.symbol(c"_Znwm")?;
        // SAFETY: the mangled name says what it takes and gives.
        Some(unsafe { transmute::<*mut c_void, New>(function) })
    })
}

/// Memory that C++ frees. `None` where there is no libstdc++.
pub fn allocate(bytes: usize) -> Option<*mut c_void> {
    // SAFETY: a plain allocation.
    new().map(|new| unsafe { new(bytes) })
}

/// `std::string`, in the form that keeps its text outside itself, so that it may be moved as bytes.
#[repr(C)]
pub struct CxxString {
    text: *mut u8,
    length: usize,
    /// The capacity where the text lies outside; else the text.
    capacity: [usize; 2],
}

impl CxxString {
    /// Owned by the C++ that it is passed to. `None` where there is no libstdc++.
    pub fn of(text: &[u8]) -> Option<CxxString> {
        let capacity = text.len().max(SHORT + 1);
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

    /// The same text as `text`, which it has to live no longer than: for C++ that reads it only.
    pub fn borrowing(text: &CStr) -> CxxString {
        let length = text.count_bytes();
        CxxString {
            text: text.as_ptr().cast_mut().cast(),
            length,
            capacity: [length, 0],
        }
    }

    /// The text.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `text` points to `length` bytes, which do not change while this is borrowed.
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

    /// Owned, with its elements, by the C++ that it is passed to. `None` where there is no libstdc++.
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

// SAFETY: C++ copies and frees such pointers on any thread; the counts are atomic.
unsafe impl Send for SharedPointer {}

impl Clone for SharedPointer {
    fn clone(&self) -> Self {
        if !self.counts.is_null() {
            // SAFETY: the counts live as long as one pointer that uses them, which this is.
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
    /// The address that it points to.
    pub fn address(&self) -> *mut c_void {
        self.address
    }

    /// A null pointer.
    pub const NULL: SharedPointer = SharedPointer {
        address: ptr::null_mut(),
        counts: ptr::null_mut(),
    };

    /// Points into memory imported from another process, and keeps it open until the last copy is gone.
    pub fn to(imported: Arc<Imported>) -> SharedPointer {
        let address = imported.address() as *mut c_void;
        let counts = Box::new(Counts {
            functions: &raw const TABLE.functions,
            users: AtomicI32::new(1),
            weak: AtomicI32::new(1),
            imported: Some(imported),
        });
        SharedPointer {
            address,
            counts: Box::into_raw(counts),
        }
    }
}

/// The counts of a `std::shared_ptr`: `std::_Sp_counted_base`. The last field is there in those of this
/// library only.
#[repr(C)]
struct Counts {
    functions: *const Functions,
    users: AtomicI32,
    weak: AtomicI32,
    imported: Option<Arc<Imported>>,
}

type Function = unsafe extern "C-unwind" fn(*mut Counts);

#[repr(C)]
struct Table {
    /// The object's offset, and its type, which is not used.
    header: [usize; 2],
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
    header: [0; 2],
    functions: Functions {
        in_place_destructor: dispose,
        deleting_destructor: destroy,
        dispose,
        destroy,
        get_deleter,
    },
};

/// The last pointer is gone.
unsafe extern "C-unwind" fn dispose(counts: *mut Counts) {
    // SAFETY: C++ calls this once, with what `SharedPointer::to` made, when no pointer uses it.
    guard((), || unsafe { (*counts).imported = None });
}

/// The counts are not used any more.
unsafe extern "C-unwind" fn destroy(counts: *mut Counts) {
    // SAFETY: as above, and it is the last call.
    guard((), || drop(unsafe { Box::from_raw(counts) }));
}

/// There is no deleter.
unsafe extern "C" fn get_deleter(_: *mut Counts, _: *const c_void) -> *mut c_void {
    ptr::null_mut()
}
