//! The table of virtual functions of PyTorch's allocator object, `torch::cuda::CUDAPluggableAllocator`.
//!
//! The class has no hook for much of what PyTorch asks of an allocator: it throws, or does nothing. Its
//! virtual functions are exported, so each is found in the table by its address; a copy of the table with
//! functions of this library in those places is then put into the object. A function that is not found where
//! it is looked for stays PyTorch's, and what a program loses by that is named.

use super::layouts::Release;
use super::pluggable::{allocate, concertina_free, concertina_malloc, release};
use super::symbols::{Library, member};
use crate::entry::panic_guard::guard;
use concertina_engine::util::message;
use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering, Ordering::Relaxed};

/// Where in the table a function stands.
pub enum Location {
    /// Where this exported function of `CUDAPluggableAllocator` stands.
    Of(&'static CStr),
    /// A function without a symbol: this index of a range, where the range has one of these lengths.
    In(&'static SlotRange, usize, &'static [usize]),
    /// As [`Of`](Location::Of), for a function that returns a class with a destructor. This library's
    /// functions take the memory for the result as their first argument, as x86-64 passes it; AArch64, for
    /// one, does not.
    Returns(&'static CStr),
}
use Location::{In, Of, Returns};

/// A range of slots in which functions without symbols stand, between two that have some.
pub struct SlotRange {
    /// The first function; its name differs between releases.
    pub from: &'static [&'static CStr],
    /// The first function behind the range.
    pub to: &'static CStr,
}

/// A virtual function to be replaced.
pub struct Slot {
    pub location: Location,
    /// `None` where PyTorch's own stays in this release.
    pub function: Option<*const ()>,
    /// What a program loses where it is not replaced; `None` if a hook of the pluggable allocator does the
    /// same.
    pub loss: Option<&'static str>,
}

/// `raw_alloc` and `raw_delete`, which all classes of allocators have.
pub const RAW_ALLOC: &CStr = member!("9raw_allocEm");
pub const RAW_DELETE: &CStr = member!("10raw_deleteEPv");

/// What is known of tables once one has been replaced.
struct Tables {
    /// Where the first functions of a `CUDAPluggableAllocator`'s tables are: PyTorch's, and ours.
    begin: [usize; 2],
    /// The indices of `raw_alloc` and `raw_delete`.
    raw: Option<(usize, usize)>,
    /// Replaced functions whose arguments or results are of PyTorch's classes.
    of_classes: Vec<Replaced>,
}

struct Replaced {
    slot: &'static AtomicUsize,
    original: usize,
    loss: Option<&'static str>,
}

static TABLES: OnceLock<Tables> = OnceLock::new();

/// `raw_alloc` and `raw_delete` of one of PyTorch's allocators. `None` where they are not known, or end in
/// [`allocate`].
///
/// # Safety
/// `object` is a live `CUDAAllocator`.
pub unsafe fn raw_functions(object: *mut c_void) -> Option<(*const (), *const ())> {
    let tables = TABLES.get()?;
    let (alloc, delete) = tables.raw?;
    // SAFETY: an object begins with a pointer to its table, whose first part is the same for all classes of
    // allocators; the second word of a `CUDAPluggableAllocator` is the function that allocates.
    unsafe {
        let words = &*object.cast::<[AtomicUsize; 2]>();
        let table = words[0].load(Relaxed);
        let ours = [allocate as *const (), concertina_malloc as *const ()];
        if tables.begin.contains(&table) && ours.contains(&(words[1].load(Relaxed) as *const ())) {
            return None;
        }
        let table = table as *const *const ();
        Some((*table.add(alloc), *table.add(delete)))
    }
}

/// Words before the first function of a table: the object's offset, and its type.
const HEADER: usize = 2;

/// `c10::cuda::CUDACachingAllocator::allocator`, a `std::atomic<CUDAAllocator*>`.
const CURRENT: &CStr = c"_ZN3c104cuda20CUDACachingAllocator9allocatorE";
const TABLE: &CStr = c"_ZTVN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocatorE";

/// PyTorch's current allocator, which is a `CUDAPluggableAllocator`.
pub struct Object {
    torch: Library,
    words: &'static [AtomicUsize; 6],
    /// Its table as PyTorch made it, with the words before the first function.
    table: &'static [usize],
}

impl Object {
    /// `None` where PyTorch's allocator is another, or is not found where it was looked for.
    pub fn current() -> Option<Object> {
        let torch = Library::loaded(c"libtorch_cuda.so")?;
        let current = Library::loaded(c"libc10_cuda.so")?.symbol(CURRENT)?;
        let (table, bytes) = torch.object(TABLE)?;
        // SAFETY: the symbols are a pointer that PyTorch reads and writes atomically, and a constant
        // of `bytes` bytes. Allocators and libraries live as long as the process. An object begins
        // with a pointer to its table's first function; one of this class is far larger than six
        // words.
        unsafe {
            let object = (*current.cast::<AtomicPtr<AtomicUsize>>()).load(Relaxed);
            let table =
                std::slice::from_raw_parts(table.cast::<usize>(), bytes / size_of::<usize>());
            let plain = table.as_ptr_range().start.wrapping_add(HEADER) as usize;
            if object.is_null() || (*object).load(Relaxed) != plain {
                return None;
            }
            Some(Object {
                torch,
                words: &*object.cast::<[AtomicUsize; 6]>(),
                table,
            })
        }
    }

    /// Whether the object allocates and frees by this library's functions. If those are the exported ones, since the
    /// object was made before `attach.py` ran, they are replaced by [`allocate`] and [`release`].
    ///
    /// Its first members are the `std::function`s that allocate and free, of four words each; the first word
    /// of one that PyTorch made is the address of the function.
    pub fn take_over_if_ours(&self) -> bool {
        let turn = |word: &AtomicUsize, from: *const (), to: *const ()| {
            let turned = word.compare_exchange(from as usize, to as usize, Relaxed, Relaxed);
            turned.is_ok() || turned == Err(to as usize)
        };
        turn(
            &self.words[1],
            concertina_malloc as *const (),
            allocate as *const (),
        ) && turn(
            &self.words[5],
            concertina_free as *const (),
            release as *const (),
        )
    }

    /// The release of PyTorch, where its classes are known.
    pub fn release(&self) -> Option<&'static Release> {
        Release::loaded(self.table.len())
    }

    /// Replaces virtual functions: `plain` ones, whose arguments are numbers, addresses and classes of
    /// libstdc++; those `of_classes` of PyTorch; and `tensors`, by their names, all of them or none. Answers
    /// what a program loses by those that were not found.
    pub fn replace(
        &self,
        plain: Vec<Slot>,
        of_classes: Vec<Slot>,
        tensors: Vec<(&'static CStr, *const ())>,
    ) -> Vec<&'static str> {
        let mut table = self.table.to_vec();
        let mut missing = Vec::new();
        let mut replaced = Vec::new();
        let is_release_known = self.release().is_some();
        let plain = plain.into_iter().map(|slot| (slot, false));
        let of_classes = of_classes.into_iter().map(|slot| (slot, true));
        for (slot, is_of_classes) in plain.chain(of_classes) {
            match (self.find(&slot.location), slot.function) {
                (Some(at), Some(function)) => {
                    table[at] = function as usize;
                    if is_of_classes {
                        replaced.push((at, slot.loss));
                    }
                }
                // A known release with a shorter range has no such function.
                (None, Some(_)) if is_release_known && self.is_beyond(&slot.location) => {}
                _ => missing.extend(slot.loss.filter(|loss| !missing.contains(loss))),
            }
        }
        // All or none: PyTorch's own free only what PyTorch's own have allocated.
        let tensors: Option<Vec<_>> = tensors
            .into_iter()
            .map(|(name, function)| Some((self.find_named(name)?, function)))
            .collect();
        for (at, function) in tensors.into_iter().flatten() {
            table[at] = function as usize;
        }
        // It stays for the life of the process, as the object does.
        let table: Vec<AtomicUsize> = table.into_iter().map(AtomicUsize::new).collect();
        let table: &'static [AtomicUsize] = Box::leak(table.into_boxed_slice());
        let replaced = replaced.into_iter().map(|(at, loss)| Replaced {
            slot: &table[at],
            original: self.table[at],
            loss,
        });
        let raw = self
            .find_named(RAW_ALLOC)
            .zip(self.find_named(RAW_DELETE))
            .map(|(alloc, delete)| (alloc - HEADER, delete - HEADER));
        if raw.is_none() {
            missing.push("allocators of a torch.cuda.MemPool's own");
        }
        let begin = [
            self.table[HEADER..].as_ptr() as usize,
            table[HEADER..].as_ptr() as usize,
        ];
        // Release: a thread that sees the table sees what is in it.
        self.words[0].store(begin[1], Ordering::Release);
        // Only the first object whose table is replaced stays PyTorch's.
        let _ = TABLES.set(Tables {
            begin,
            raw,
            of_classes: replaced.collect(),
        });
        missing
    }

    fn find(&self, location: &Location) -> Option<usize> {
        match location {
            Of(name) => self.find_named(name),
            Returns(name) if cfg!(target_arch = "x86_64") => self.find_named(name),
            Returns(_) => None,
            In(range, index, lengths) => {
                let mut ranges = self.ranges(range);
                let (start, _) = ranges.find(|(_, length)| lengths.contains(length))?;
                Some(start + index)
            }
        }
    }

    /// Whether the location is behind the end of its range, which this release has shorter.
    fn is_beyond(&self, location: &Location) -> bool {
        let In(range, _, lengths) = location else {
            return false;
        };
        let mut found = self.ranges(range).peekable();
        found.peek().is_some() && found.all(|(_, length)| lengths.iter().all(|it| length < *it))
    }

    /// Where a range may begin, and how long it is then.
    fn ranges(&self, range: &SlotRange) -> impl Iterator<Item = (usize, usize)> {
        let end = self.find_named(range.to);
        let starts = range.from.iter().filter_map(|name| self.find_named(name));
        starts.filter_map(move |start| Some((start, end?.checked_sub(start)?)))
    }

    /// The one index at which the function of this name stands.
    fn find_named(&self, name: &CStr) -> Option<usize> {
        let function = self.torch.symbol(name)? as usize;
        let is_it = |word: &usize| *word == function;
        let functions = &self.table[HEADER..];
        let at = functions.iter().position(is_it)?;
        let once = functions.iter().rposition(is_it) == Some(at);
        once.then_some(HEADER + at)
    }

    /// The object's address.
    pub fn address(&self) -> *mut c_void {
        ptr::from_ref(self.words).cast_mut().cast()
    }
}

/// Called by `attach.py` where PyTorch reads other numbers than those of the test pattern: its classes are
/// not those of its release. PyTorch's own functions with arguments or results of its classes are put back.
pub extern "C" fn restore_class_functions() {
    guard((), || {
        let mut missing = Vec::new();
        for replaced in TABLES.get().into_iter().flat_map(|it| &it.of_classes) {
            replaced.slot.store(replaced.original, Relaxed);
            missing.extend(replaced.loss.filter(|loss| !missing.contains(loss)));
        }
        if !missing.is_empty() {
            message::print(&format!(
                "this PyTorch's classes are not those of its release; what works as under any \
                 pluggable allocator only: {}",
                missing.join(", ")
            ));
        }
    });
}
