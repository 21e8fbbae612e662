//! `dlsym`: a program that looks up a driver's function that is interposed gets the hook.
//!
//! Any other look-up is passed on to the real `dlsym` by a jump, with its arguments and its return address as they
//! came: what `RTLD_NEXT` and `RTLD_DEFAULT` mean depends on the caller. On the way there is no allocation, no lock
//! and no thread-local variable, since memory allocators and constructors look symbols up before any of these work.

use super::exports::Hook;
use super::{driver_table, mutation, preloaded, program_calls};
use crate::entry::panic_guard::guard;
use concertina_engine::driver::symbol::real_dlsym;
use std::ffi::{CStr, c_char, c_void};

/// The result of a look-up.
#[repr(C)]
struct Lookup {
    /// The answer, or the real `dlsym`.
    address: *const c_void,
    /// 1 where it is the answer.
    is_answer: usize,
}

/// Answers a look-up, or says that the real `dlsym` shall.
///
/// # Safety
/// `name` is null or a NUL-terminated string.
unsafe extern "C" fn look_up(library: *mut c_void, name: *const c_char) -> Lookup {
    // SAFETY: as promised by the caller.
    let function = match unsafe { hook_of(name) } {
        Some(hook) => guard(None, || {
            // SAFETY: a string, as it was found in the list.
            resolve(library, unsafe { CStr::from_ptr(name) }, hook)
        }),
        None => None,
    };
    match function {
        Some(address) => Lookup {
            address,
            is_answer: 1,
        },
        None => Lookup {
            address: real_dlsym() as *const c_void,
            is_answer: 0,
        },
    }
}

/// The hook of this name. `None` without preloading, and for calls that are not the program's.
#[inline]
unsafe fn hook_of(name: *const c_char) -> Option<&'static Hook> {
    if name.is_null() {
        return None;
    }
    // SAFETY: not null, so a string as promised by the caller, at least one byte long; the second
    // byte is there if the first is no NUL.
    unsafe {
        if *name.cast::<u8>() != b'c' || *name.cast::<u8>().add(1) != b'u' {
            return None;
        }
        let hook = Hook::of(CStr::from_ptr(name).to_bytes())?;
        if mutation::is_on("dlsym") {
            return None;
        }
        (preloaded::is_on() && !program_calls::is_inside()).then_some(hook)
    }
}

/// The hook, if the real `dlsym` would find the driver's own function; else what that would find. `None` leaves the
/// look-up to the linker.
#[cold]
fn resolve(library: *mut c_void, name: &CStr, hook: &Hook) -> Option<*const c_void> {
    let own = hook.function.0;
    // SAFETY: the program's handle, or the one for what comes after us, and a string. The error of a
    // search that fails stays for the program's `dlerror`.
    let search = |library| unsafe { real_dlsym()(library, name.as_ptr()) }.cast_const();
    if library == libc::RTLD_NEXT {
        // Where nobody behind us has it, it is we whom the linker would find. Else it knows best.
        let found = search(libc::RTLD_NEXT);
        return found.is_null().then_some(found);
    }
    let mut found = search(library);
    if found == own || library == libc::RTLD_DEFAULT {
        // The global scope, where we come first: is there another one behind us?
        found = search(libc::RTLD_NEXT);
    }
    if found.is_null() {
        return Some(found);
    }
    let genuine = driver_table::find(name).cast_const();
    // A search of this library that failed must not be what the program's `dlerror` reports.
    // SAFETY: no arguments; the text is not looked at.
    unsafe { libc::dlerror() };
    Some(if found == genuine { own } else { found })
}

macro_rules! entry {
    ($($instruction:literal),*) => {
        /// The C library's function of this name.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void {
            std::arch::naked_asm!($($instruction),*, way = sym look_up)
        }
    };
}

// Two pushes and eight bytes more align the stack.
#[cfg(target_arch = "x86_64")]
entry!(
    "push rdi",
    "push rsi",
    "sub rsp, 8",
    "call {way}",
    "add rsp, 8",
    "pop rsi",
    "pop rdi",
    "test rdx, rdx",
    "jz 2f",
    "ret",
    "2:",
    "jmp rax"
);

#[cfg(target_arch = "aarch64")]
entry!(
    "stp x29, x30, [sp, #-32]!",
    "mov x29, sp",
    "stp x0, x1, [sp, #16]",
    "bl {way}",
    "mov x16, x0",
    "mov x17, x1",
    "ldp x0, x1, [sp, #16]",
    "ldp x29, x30, [sp], #32",
    "cbz x17, 2f",
    "mov x0, x16",
    "ret",
    "2:",
    "br x16"
);
