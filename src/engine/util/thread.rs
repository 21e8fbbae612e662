//! Threads of our own in a process that is somebody else's.

use std::mem::MaybeUninit;
use std::ptr;
use std::thread;

/// Starts a thread that takes none of the program's signals. False where there can be none.
pub fn start(life: impl FnOnce() + Send + 'static) -> bool {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are filled in before they are read, and the mask is put back.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        let helper = thread::Builder::new().name("concertina".into()).spawn(life);
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
        helper.is_ok()
    }
}
