//! Memory from the system, page by page as it is touched. What lies beyond the first 2 MiB comes in huge
//! pages where the system has them, which spares most of the cost of looking up addresses when what is there
//! is used at random.

use std::ptr::{self, NonNull};

/// The size of a huge page on x86-64 and, with pages of 4 KiB, on AArch64.
const HUGE: usize = 2 << 20;

/// So many bytes of zeros, writable, of which nothing is there until it is touched. `None` where the process
/// may not have so many addresses.
pub fn map(size: usize) -> Option<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a mapping at an address of the system's choice disturbs nothing.
    let start = unsafe { libc::mmap(ptr::null_mut(), size, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return None;
    }
    // What is small is to stay so.
    let skipped = (start as usize + HUGE).next_multiple_of(HUGE) - start as usize;
    if skipped < size {
        // SAFETY: inside the new mapping; advice that is not taken changes nothing.
        unsafe { libc::madvise(start.add(skipped), size - skipped, libc::MADV_HUGEPAGE) };
    }
    NonNull::new(start.cast())
}

/// Gives them back.
///
/// # Safety
/// They are those of one call of [`map`], and nothing uses them any more.
pub unsafe fn unmap(start: NonNull<u8>, size: usize) {
    // SAFETY: a mapping of the caller's own, who says that nothing uses it.
    unsafe { libc::munmap(start.as_ptr().cast(), size) };
}
