//! Messages to the user: lines on standard error.

use std::sync::atomic::{AtomicBool, Ordering};

/// Writes `concertina: line` and a line feed to standard error, in one system call so that lines of several
/// threads and processes stay whole. Allocates nothing, takes no lock, keeps `errno`, and ignores a closed
/// standard error.
pub fn print(line: &str) {
    let part = |text: &str| libc::iovec {
        iov_base: text.as_ptr() as *mut _,
        iov_len: text.len(),
    };
    let parts = [part("concertina: "), part(line), part("\n")];
    // SAFETY: errno's location is this thread's own; writev only reads the three strings, which
    // outlive the call.
    unsafe {
        let errno = libc::__errno_location();
        let before = *errno;
        while libc::writev(libc::STDERR_FILENO, parts.as_ptr(), parts.len() as i32) < 0
            && *errno == libc::EINTR
        {}
        *errno = before;
    }
}

/// Prints the result of `line` on the first call with this `printed`, and nothing on later ones.
pub fn print_once<L: AsRef<str>>(printed: &AtomicBool, line: impl FnOnce() -> L) {
    if !printed.load(Ordering::Relaxed) && !printed.swap(true, Ordering::Relaxed) {
        print(line().as_ref());
    }
}
