//! Memory mappings and files: the crate's only system calls.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// The size of a host page.
pub(crate) const PAGE: u64 = 4096;

/// Flags of address space without memory.
const NOTHING: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

fn map(wanted: u64, size: u64, protection: i32, flags: i32, file: i32, offset: u64) -> Option<u64> {
    // SAFETY: a mapping without MAP_FIXED disturbs nothing; the callers that pass MAP_FIXED are
    // unsafe and promise that the range is theirs.
    let address = unsafe {
        let wanted = wanted as *mut libc::c_void;
        libc::mmap(
            wanted,
            size as usize,
            protection,
            flags,
            file,
            offset as libc::off_t,
        )
    };
    (address != libc::MAP_FAILED).then_some(address as u64)
}

/// An inaccessible address range, unique in the process, at `wanted` if that is free. `size` is a
/// multiple of a page, `alignment` a power of two.
pub(crate) fn reserve(size: u64, alignment: u64, wanted: u64) -> Option<u64> {
    if wanted != 0 && wanted.is_multiple_of(alignment) {
        let flags = NOTHING | libc::MAP_FIXED_NOREPLACE;
        match map(wanted, size, libc::PROT_NONE, flags, -1, 0) {
            Some(address) if address == wanted => return Some(address),
            // A kernel that does not know the flag takes the address for a hint.
            // SAFETY: the range came from mmap a moment ago.
            Some(other) => unsafe { unmap(other, size) },
            None => (),
        }
    }
    if alignment <= PAGE {
        return map(0, size, libc::PROT_NONE, NOTHING, -1, 0);
    }
    let whole = size.checked_add(alignment)?.checked_sub(PAGE)?;
    let start = map(0, whole, libc::PROT_NONE, NOTHING, -1, 0)?;
    let aligned = start.next_multiple_of(alignment);
    // SAFETY: both ends belong to the range just mapped and nobody has seen them.
    unsafe {
        unmap(start, aligned - start);
        unmap(aligned + size, start + whole - (aligned + size));
    }
    Some(aligned)
}

/// Zeroed memory that the kernel backs page by page when it is touched.
pub(crate) fn memory(size: u64) -> Option<u64> {
    map(0, size, libc::PROT_READ | libc::PROT_WRITE, NOTHING, -1, 0)
}

/// Unmaps a range from [`reserve`] or [`memory`].
///
/// # Safety
/// The range is the caller's, and nothing uses it any more.
pub(crate) unsafe fn unmap(address: u64, size: u64) {
    if size > 0 {
        // SAFETY: the caller's promise.
        unsafe { libc::munmap(address as *mut libc::c_void, size as usize) };
    }
}

/// Unmaps what is at a range, which stays reserved and inaccessible.
///
/// # Safety
/// The range lies in a reservation of the caller, and no reference into it lives.
pub(crate) unsafe fn clear(address: u64, size: u64) -> bool {
    map(
        address,
        size,
        libc::PROT_NONE,
        NOTHING | libc::MAP_FIXED,
        -1,
        0,
    )
    .is_some()
}

/// Changes what host code may do with a range.
///
/// # Safety
/// The range lies in a reservation of the caller.
pub(crate) unsafe fn protect(address: u64, size: u64, read: bool, write: bool) -> bool {
    let read = if read {
        libc::PROT_READ
    } else {
        libc::PROT_NONE
    };
    let write = if write {
        libc::PROT_WRITE
    } else {
        libc::PROT_NONE
    };
    // SAFETY: the caller's promise; changing protection moves no data.
    unsafe { libc::mprotect(address as *mut libc::c_void, size as usize, read | write) == 0 }
}

/// Physical memory that can be mapped more than once: a sparse file without a name.
#[derive(Debug)]
pub(crate) struct File {
    file: OwnedFd,
    end: u64,
}

impl File {
    pub fn new() -> Option<File> {
        // SAFETY: the name is a C string; the descriptor is checked before it is owned.
        let file = unsafe {
            match libc::memfd_create(c"concertina-sim".as_ptr(), libc::MFD_CLOEXEC) {
                ..0 => return None,
                file => OwnedFd::from_raw_fd(file),
            }
        };
        Some(File { file, end: 0 })
    }

    /// A new part of the file, at its end. Offsets are never reused: the file is sparse.
    pub fn extend(&mut self, size: u64) -> Option<u64> {
        let start = self.end;
        let end = start.checked_add(size)?;
        // SAFETY: only grows our own file.
        let grown = unsafe { libc::ftruncate(self.file.as_raw_fd(), end as libc::off_t) == 0 };
        if grown {
            self.end = end;
        }
        grown.then_some(start)
    }

    /// The file of a number that a process of this user has open, if it may be mapped.
    pub fn of(process: u32, number: RawFd) -> Option<File> {
        let path = format!("/proc/{process}/fd/{number}");
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).write(true).open(path).ok()?;
        let end = file.metadata().ok().filter(|it| it.is_file())?.len();
        let file = file.into();
        Some(File { file, end })
    }

    /// Its number in this process.
    pub fn number(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub fn size(&self) -> u64 {
        self.end
    }

    /// Maps its first `size` bytes, shared with other processes.
    pub fn memory(&self, size: u64) -> Option<u64> {
        let open = libc::PROT_READ | libc::PROT_WRITE;
        map(0, size, open, libc::MAP_SHARED, self.number(), 0)
    }

    /// Returns the memory of a part to the system.
    pub fn discard(&self, offset: u64, size: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (offset, size) = (offset as libc::off_t, size as libc::off_t);
        // SAFETY: our own file; a failure only keeps host memory busy.
        unsafe { libc::fallocate(self.file.as_raw_fd(), mode, offset, size) };
    }

    /// Maps a part at a range, inaccessible until [`protect`] opens it.
    ///
    /// # Safety
    /// The range lies in a reservation of the caller.
    pub unsafe fn map_at(&self, address: u64, size: u64, offset: u64) -> bool {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        map(
            address,
            size,
            libc::PROT_NONE,
            flags,
            self.file.as_raw_fd(),
            offset,
        )
        .is_some()
    }
}
