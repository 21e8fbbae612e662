//! What the library says to the person who runs the program: lines on standard error.

use std::sync::atomic::{AtomicBool, Ordering};

/// Writes `concertina: line` and a line feed to standard error, in one system call so that lines of
/// several threads and processes stay whole. Allocates nothing, takes no lock, leaves `errno` as it
/// was, and gives up without a word when standard error is closed.
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

/// Says what `line` makes the first time that it is called with this `said`, and nothing after.
pub fn print_once<L: AsRef<str>>(said: &AtomicBool, line: impl FnOnce() -> L) {
    if !said.load(Ordering::Relaxed) && !said.swap(true, Ordering::Relaxed) {
        print(line().as_ref());
    }
}
