//! One large value that begins as zeros, of which the system gives memory page by page as it is touched.

use crate::pages;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Types of which a value may be all zeros.
///
/// # Safety
/// Zeros are a valid value of the type, which drops nothing and needs no alignment above a page's.
pub unsafe trait Zeroable {}

/// A value in memory of its own.
pub struct Zeroed<T>(NonNull<T>);

// SAFETY: it owns the value, as a `Box` does.
unsafe impl<T: Send> Send for Zeroed<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Zeroed<T> {}

impl<T: Zeroable> Zeroed<T> {
    /// `None` where the process may not have so many addresses.
    pub fn new() -> Option<Self> {
        const { assert!(align_of::<T>() <= 4096) };
        pages::map(size_of::<T>()).map(|start| Zeroed(start.cast()))
    }
}

impl<T> Drop for Zeroed<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping is the value's own; nothing borrows from it any more, and there is nothing to
        // drop in it.
        unsafe { pages::unmap(self.0.cast(), size_of::<T>()) };
    }
}

impl<T> Deref for Zeroed<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: all of it is mapped, and zeros are a value of the type.
        unsafe { self.0.as_ref() }
    }
}

impl<T> DerefMut for Zeroed<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and borrowed mutably.
        unsafe { self.0.as_mut() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Large([u64; 1 << 28]);
    // SAFETY: numbers may be zero.
    unsafe impl Zeroable for Large {}

    #[test]
    fn begins_as_zeros_and_keeps_what_is_written() {
        let mut zeroed = Zeroed::<Large>::new().expect("2 GiB of addresses");
        let Large(numbers) = &mut *zeroed;
        numbers[1 << 27] = 7;
        assert_eq!(
            (numbers[0], numbers[1 << 27], numbers[(1 << 28) - 1]),
            (0, 7, 0)
        );
    }
}
