//! Threads that the library starts, and a number for every thread.

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

/// Starts a thread that blocks all signals, so that the program's handlers run on its own threads. Returns
/// false if the system starts no thread.
pub fn start(body: impl FnOnce() + Send + 'static) -> bool {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are filled in before they are read, and the mask is put back.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let started = thread::Builder::new().name("concertina".into()).spawn(body);
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        started.is_ok()
    }
}

/// A number that no other thread of the process has or had; never 0, but in the destructors of a thread's
/// locals once its number is gone.
pub fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static NUMBER: u64 = NEXT.fetch_add(1, Relaxed));
    // A thread that is ending may free memory from the destructors of its thread-locals.
    NUMBER.try_with(|number| *number).unwrap_or(0)
}
