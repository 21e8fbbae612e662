//! Large zeroed values in memory of their own, backed page by page when first touched: a table can be
//! declared as large as it may ever become, and never has to be copied to grow. Beyond the first 2 MiB it
//! uses transparent huge pages, which spares most TLB misses of random access.

use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};

/// The size of a huge page on x86-64 and, with pages of 4 KiB, on AArch64.
const HUGE: usize = 2 << 20;

/// Types for which zeros are a valid value. Dropping [`Zeroed`] does not drop the value.
///
/// # Safety
/// Zeros are a valid value of the type.
pub unsafe trait Zeroable {}

/// A value in a memory mapping of its own.
pub struct Zeroed<T>(NonNull<T>);

// SAFETY: it owns the value, as a `Box` does.
unsafe impl<T: Send> Send for Zeroed<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Zeroed<T> {}

impl<T: Zeroable> Zeroed<T> {
    /// A value of zeros; `None` if the process cannot have so much address space.
    pub fn new() -> Option<Self> {
        const { assert!(align_of::<T>() <= 4096) };
        map(size_of::<T>()).map(|start| Zeroed(start.cast()))
    }
}

impl<T> Drop for Zeroed<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to the value, and nothing borrows from it any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<T>()) };
    }
}

impl<T> Deref for Zeroed<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: all of it is mapped, and zeros are valid for the type.
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

/// Maps `size` bytes of zeros, writable and not backed yet. `None` if the process cannot have so much address
/// space.
fn map(size: usize) -> Option<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a mapping at an address of the system's choice replaces no other.
    let start = unsafe { libc::mmap(ptr::null_mut(), size, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return None;
    }
    // The first huge page's worth stays in small pages, so that a small table takes little memory.
    let skipped = (start as usize + HUGE).next_multiple_of(HUGE) - start as usize;
    if skipped < size {
        // SAFETY: inside the new mapping; if the advice is not taken, nothing changes.
        unsafe { libc::madvise(start.add(skipped), size - skipped, libc::MADV_HUGEPAGE) };
    }
    NonNull::new(start.cast())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Large([u64; 1 << 28]);
    // SAFETY: zeros are valid numbers.
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
