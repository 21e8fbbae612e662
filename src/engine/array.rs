//! Arrays that grow where they are.
//!
//! Addresses are reserved once, and the system gives memory page by page as it is touched. So to grow
//! copies nothing, however long the array is.

use crate::pages;
use std::alloc::{Layout, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;

/// Bytes of addresses that an array reserves; less where the process may not have so many, and more
/// for an array that becomes longer.
const RESERVED: usize = 1 << 32;

/// Elements of a plain type, one after the other.
pub struct Array<T> {
    /// Dangling where nothing is reserved yet.
    start: NonNull<T>,
    length: usize,
    /// Bytes reserved.
    reserved: usize,
    owns: PhantomData<T>,
}

// SAFETY: the array owns its elements, as a `Vec` does.
unsafe impl<T: Send> Send for Array<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Array<T> {}

impl<T: Copy> Array<T> {
    /// An empty array. Reserves nothing yet.
    pub const fn new() -> Self {
        Array {
            start: NonNull::dangling(),
            length: 0,
            reserved: 0,
            owns: PhantomData,
        }
    }

    /// Appends `count` elements. Like a `Vec`, it ends the process where there is no memory.
    pub fn extend(&mut self, count: usize, value: T) {
        let length = self.length + count;
        if length * size_of::<T>() > self.reserved {
            self.reserve(length);
        }
        for at in self.length..length {
            // SAFETY: inside the reserved range, which is writable and aligned to a page.
            unsafe { self.start.add(at).write(value) };
        }
        self.length = length;
    }

    #[cold]
    #[inline(never)]
    fn reserve(&mut self, length: usize) {
        const { assert!(align_of::<T>() <= 4096) };
        let needed = length * size_of::<T>();
        let mut size = RESERVED.max(needed.next_power_of_two());
        let start = loop {
            match pages::map(size) {
                Some(start) => break start.cast::<T>(),
                None if size / 2 >= needed => size /= 2,
                None => handle_alloc_error(Layout::new::<T>()),
            }
        };
        // SAFETY: two mappings, the new one larger, the old one filled so far.
        unsafe { start.copy_from_nonoverlapping(self.start, self.length) };
        self.unmap();
        (self.start, self.reserved) = (start, size);
    }
}

impl<T> Array<T> {
    fn unmap(&mut self) {
        if self.reserved > 0 {
            // SAFETY: the mapping is the array's own; nothing borrows from it any more.
            unsafe { pages::unmap(self.start.cast(), self.reserved) };
        }
    }
}

impl<T> Drop for Array<T> {
    fn drop(&mut self) {
        self.unmap();
    }
}

impl<T> Deref for Array<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        // SAFETY: so many elements have been written.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl<T> DerefMut for Array<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_where_it_is_and_past_what_is_reserved() {
        let mut array = Array::<u64>::new();
        assert!(array.is_empty());
        array.extend(3, 7);
        let start = array.as_ptr();
        array.extend(1_000_000, 8);
        array[1_000_002] = 9;
        assert_eq!(start, array.as_ptr());
        assert_eq!((array[2], array[3], array[1_000_002]), (7, 8, 9));
        assert_eq!(array.len(), 1_000_003);
        array.reserve(RESERVED / 8 + 1);
        assert_ne!(start, array.as_ptr());
        assert_eq!((array[2], array[3], array[1_000_002]), (7, 8, 9));
    }
}
