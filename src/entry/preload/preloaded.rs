//! Whether hooks are on: only where the library was preloaded, and without `CONCERTINA_DISABLE=1`.
//!
//! Determined when a driver's function is first looked up or called, so that it costs other programs nothing.

use concertina_engine::settings;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

const UNKNOWN: u8 = 0;
const ON: u8 = 1;
const OFF: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);

/// One relaxed load but for the first call.
#[inline]
pub fn is_on() -> bool {
    match STATE.load(Relaxed) {
        UNKNOWN => determine(),
        state => state == ON,
    }
}

#[cold]
fn determine() -> bool {
    let on = !settings::is_disabled() && is_preloaded();
    STATE.store(if on { ON } else { OFF }, Relaxed);
    on
}

/// The dynamic linker keeps what it loaded in order: the program, what was preloaded, then what the
/// program needs. So a library was preloaded if it comes before everything that the program needs,
/// and is none of that itself.
fn is_preloaded() -> bool {
    let mut search = Search {
        own: is_preloaded as *const c_void as usize,
        needed: Vec::new(),
        first: true,
        preloaded: false,
    };
    // SAFETY: `visit` has the signature that is asked for, and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), ptr::from_mut(&mut search).cast()) };
    search.preloaded
}

struct Search {
    /// An address inside this library.
    own: usize,
    /// What the program was linked to.
    needed: Vec<Vec<u8>>,
    first: bool,
    preloaded: bool,
}

/// Looks at one loaded object; answers 1 when nothing more has to be looked at.
unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, search: *mut c_void) -> c_int {
    // SAFETY: the linker hands over a live description, and `is_preloaded` its search.
    let (info, search) = unsafe { (&*info, &mut *search.cast::<Search>()) };
    // SAFETY: an object's program headers stay while it is loaded, and the linker holds its lock.
    let headers =
        unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
    if std::mem::take(&mut search.first) {
        // SAFETY: these are the headers of the program, at its address.
        search.needed = unsafe { needed(info.dlpi_addr as usize, headers) };
        return 0;
    }
    // SAFETY: the linker's string, or null.
    let name = unsafe { base_name(info.dlpi_name) };
    let own = headers.iter().any(|header| {
        let start = info.dlpi_addr as usize + header.p_vaddr as usize;
        header.p_type == libc::PT_LOAD
            && (start..start + header.p_memsz as usize).contains(&search.own)
    });
    let needed = search.needed.contains(&name);
    search.preloaded = own && !needed;
    c_int::from(own || needed)
}

/// The part of a path after the last slash.
///
/// # Safety
/// `path` is null or a NUL-terminated string.
unsafe fn base_name(path: *const c_char) -> Vec<u8> {
    if path.is_null() {
        return Vec::new();
    }
    // SAFETY: as promised by the caller.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    path.rsplit(|byte| *byte == b'/')
        .next()
        .unwrap_or_default()
        .to_vec()
}

/// An entry of an object's dynamic section (`Elf64_Dyn` in `elf.h`).
#[repr(C)]
struct Dynamic {
    tag: i64,
    value: u64,
}
const DT_NULL: i64 = 0;
const DT_NEEDED: i64 = 1;
const DT_STRTAB: i64 = 5;

/// The names of the libraries that an object was linked to.
///
/// # Safety
/// `headers` are those of a loaded object whose addresses start at `base`.
unsafe fn needed(base: usize, headers: &[libc::Elf64_Phdr]) -> Vec<Vec<u8>> {
    let Some(header) = headers.iter().find(|it| it.p_type == libc::PT_DYNAMIC) else {
        return Vec::new();
    };
    let section = (base + header.p_vaddr as usize) as *const Dynamic;
    let mut strings = ptr::null::<c_char>();
    let mut offsets = Vec::new();
    let mut at = 0;
    loop {
        // SAFETY: the section ends with an entry whose tag is DT_NULL, where the loop ends.
        let entry = unsafe { &*section.add(at) };
        match entry.tag {
            DT_NULL => break,
            DT_NEEDED => offsets.push(entry.value as usize),
            // The C library has made an address of it on the machines that CUDA runs on.
            DT_STRTAB => strings = entry.value as *const c_char,
            _ => {}
        }
        at += 1;
    }
    if strings.is_null() {
        return Vec::new();
    }
    let name = |offset: usize| {
        // SAFETY: an offset of the object's own into its table of NUL-terminated strings.
        unsafe { base_name(strings.add(offset)) }
    };
    offsets.into_iter().map(name).collect()
}
