//! What the process has loaded of PyTorch, symbol by symbol.
//!
//! PyTorch's libraries are loaded for themselves alone, so each is asked by its own name; none is
//! loaded by this.

use std::ffi::{CStr, c_void};

/// A library that the process has loaded already.
pub struct Library(*mut c_void);

impl Library {
    /// `None` where the process has not loaded it.
    pub fn loaded(name: &CStr) -> Option<Library> {
        // SAFETY: the name ends in a zero. Nothing is loaded, so no code runs.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        match handle.is_null() {
            true => None,
            false => Some(Library(handle)),
        }
    }

    /// The address of a symbol that it, or a library that it needs, defines.
    pub fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the handle is a live one, and the name ends in a zero.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }

    /// The same with the size in bytes that the symbol table gives.
    pub fn object(&self, name: &CStr) -> Option<(*mut c_void, usize)> {
        let address = self.symbol(name)?;
        let mut symbol: *const libc::Elf64_Sym = std::ptr::null();
        // SAFETY: a zeroed `Dl_info` is a valid one, and with RTLD_DL_SYMENT the last argument is
        // where a pointer to the symbol is put; the symbol lives as long as its library.
        unsafe {
            let mut info: libc::Dl_info = std::mem::zeroed();
            let found = dladdr1(address, &mut info, (&raw mut symbol).cast(), RTLD_DL_SYMENT);
            if found == 0 || symbol.is_null() || info.dli_saddr != address {
                return None;
            }
            Some((address, (*symbol).st_size as usize))
        }
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: `loaded` counted one user more; the program's own use keeps the library.
        unsafe { libc::dlclose(self.0) };
    }
}

/// glibc's, from `dlfcn.h`.
const RTLD_DL_SYMENT: i32 = 1;

/// cbindgen:ignore
#[allow(
    unused_doc_comments,
    reason = "the tool that makes the header reads it"
)]
unsafe extern "C" {
    fn dladdr1(
        address: *const c_void,
        info: *mut libc::Dl_info,
        extra: *mut *mut c_void,
        flags: i32,
    ) -> i32;
}

/// The mangled name of a member of PyTorch's `CUDAPluggableAllocator`, given what comes after the class's.
macro_rules! member {
    ($name:literal) => {
        match std::ffi::CStr::from_bytes_with_nul(
            concat!(
                "_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator",
                $name,
                "\0"
            )
            .as_bytes(),
        ) {
            Ok(name) => name,
            Err(_) => panic!("a zero inside"),
        }
    };
}
pub(super) use member;
