//! The C functions for statistics and the version.

use super::panic_guard::guard;
use concertina_engine::process::stats;
use concertina_engine::process::stats_output;
use concertina_engine::util::fork;
use concertina_engine::util::message;
use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

/// How long a call waits for each device that another thread keeps locked.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Writes the statistics of every device, one JSON object, to the caller's `buffer`.
///
/// At most `capacity` bytes are written, the last of them always a terminating NUL; a text that does
/// not fit is cut short. `buffer` may be null if `capacity` is 0, to ask for the length alone.
///
/// Returns the length of the whole text in bytes, without the NUL: a buffer of one byte more would
/// have held it. The text grows as the program runs, so leave some room when asking twice. Returns 0,
/// and an empty text, in a process that was forked from one that had used the library.
///
/// Any thread may call it. A device that another thread keeps locked for a second is marked
/// `"busy": true` and has no figures.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn concertina_stats_json(buffer: *mut c_char, capacity: usize) -> usize {
    guard(0, || {
        let text = match fork::in_forked_child() {
            true => String::new(),
            false => stats::json(LOCK_TIMEOUT),
        };
        if !buffer.is_null() && capacity > 0 {
            let length = text.len().min(capacity - 1);
            // SAFETY: the caller vouches for `capacity` bytes at `buffer`, and none of them can be
            // part of a text that was made here.
            unsafe {
                buffer.copy_from_nonoverlapping(text.as_ptr().cast(), length);
                *buffer.add(length) = 0;
            }
        }
        text.len()
    })
}

/// Writes the statistics of every device, one JSON object and a line feed, to a file.
///
/// In `path`, `%p` stands for the process's id, `%h` for the host's name, `%r` for the rank that a
/// launcher gave the process (RANK, OMPI_COMM_WORLD_RANK or SLURM_PROCID, else 0) and `%%` for a per
/// cent sign. A null `path` means the path in the environment variable CONCERTINA_STATS as it was
/// when the library was loaded. The string stays the caller's.
///
/// The file appears whole or not at all: it is written under another name in the same directory and
/// renamed. A regular file of the same user's is replaced; anything else at `path` is left alone.
///
/// Returns 0, or an errno value after one line on standard error that says what went wrong: EINVAL
/// for a path that means nothing (or a null one without CONCERTINA_STATS), ELOOP for a symbolic link,
/// EPERM for another user's file, EBUSY when another thread has been writing for a second, ECHILD in
/// a process that was forked from one that had used the library, EIO for a mistake of the library's,
/// and what the system says otherwise.
///
/// Any thread may call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn concertina_dump_stats(path: *const c_char) -> c_int {
    guard(libc::EIO, || {
        // SAFETY: the caller vouches for a string that ends in a NUL, if it is not null.
        let path = (!path.is_null()).then(|| unsafe { CStr::from_ptr(path) });
        match stats_output::dump(path) {
            Ok(()) => 0,
            Err(failure) => {
                message::print(&failure.line);
                failure.errno
            }
        }
    })
}

/// Returns the library's version, such as "0.1.0": a string that ends in a NUL, is never freed and
/// lasts as long as the process. Any thread may call it.
#[unsafe(no_mangle)]
pub extern "C" fn concertina_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
