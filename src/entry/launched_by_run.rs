//! A warning for programs started by `concertina run` in which PyTorch keeps its own allocator.
//!
//! `concertina run` attaches to PyTorch by way of `PYTHONPATH`. Some options have Python ignore it, and a
//! program may start another one with a `PYTHONPATH` of its own. The program that `run` became, such as
//! `python -I train.py`, is warned at its start; processes that it starts only once they use PyTorch and the
//! GPU.

use super::python::{Script, source};
use super::{attached, panic_guard::guard};
use concertina_engine::settings;
use concertina_engine::util::message;
use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::AtomicBool;

/// Holds the id of the process that `concertina run` became.
const VARIABLE: &str = "CONCERTINA_RUN";

static CHECK: Script = Script::new(
    c"<concertina: check_attached.py>",
    source!("check_attached.py"),
    || vec![(c"not_attached", not_attached as extern "C" fn() as usize)],
    "it cannot be told whether PyTorch keeps its own allocator in this process",
);

/// Checks the process's arguments when the library is loaded; warns only if it was preloaded.
///
/// # Safety
/// `arguments` points to `count` strings that end in a NUL.
pub unsafe fn check_arguments(
    count: c_int,
    arguments: *const *const c_char,
    is_preloaded: fn() -> bool,
) {
    let program = settings::variable_text(VARIABLE);
    if program.is_none_or(|program| program != std::process::id().to_string()) || !is_python() {
        return;
    }
    let argument = |at| {
        // SAFETY: as promised by the caller.
        unsafe { CStr::from_ptr(*arguments.add(at)) }.to_bytes()
    };
    let option = isolating_option((1..count as usize).map(argument));
    if let Some(option) = option.filter(|_| is_preloaded()) {
        warn(&format!("-{option}"));
    }
}

/// Checks whether PyTorch is there and not attached, when the process first uses the GPU by its own calls.
pub fn check_first_use() {
    if settings::variable(VARIABLE).is_some() && !attached::is_attached() {
        CHECK.schedule();
    }
}

extern "C" fn not_attached() {
    guard((), || {
        if !attached::is_attached() {
            warn("-I, -E or -S or another PYTHONPATH");
        }
    });
}

fn warn(cause: &str) {
    static PRINTED: AtomicBool = AtomicBool::new(false);
    message::print_once(&PRINTED, || {
        format!(
            "PyTorch keeps its own allocator in this process: Python was started with {cause}, and \
             does not find concertina"
        )
    });
}

fn is_python() -> bool {
    // SAFETY: a constant string.
    !unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"Py_BytesMain".as_ptr()) }.is_null()
}

/// The first of Python's options that ignores `PYTHONPATH` or `sitecustomize`. Options end at the program.
fn isolating_option<'a>(arguments: impl Iterator<Item = &'a [u8]>) -> Option<char> {
    let mut arguments = arguments;
    while let Some(argument) = arguments.next() {
        let letters = argument.strip_prefix(b"-").filter(|it| !it.is_empty())?;
        if letters == b"-check-hash-based-pycs" {
            arguments.next();
        }
        if letters.starts_with(b"-") {
            continue;
        }
        for (at, letter) in letters.iter().enumerate() {
            match letter {
                b'I' | b'E' | b'S' => return Some(char::from(*letter)),
                // The program follows.
                b'c' | b'm' => return None,
                // The rest of the argument, or the next one, is the option's value.
                b'W' | b'X' => {
                    if at + 1 == letters.len() {
                        arguments.next();
                    }
                    break;
                }
                _ => {}
            }
        }
    }
    None
}
