//! Programs that `concertina run` started: a Python there that PyTorch keeps its own allocator in says
//! so, once.
//!
//! `run` reaches PyTorch by way of `PYTHONPATH`. Some options have Python ignore that, and a program
//! may start another one with a path of its own. `python -I train.py` says it at the start; processes
//! further down, which are often no business of PyTorch's, only if they use PyTorch and the GPU.

use super::python::{Script, source};
use super::{panic_guard::guard, preload, torch};
use concertina_engine::settings;
use concertina_engine::util::message;
use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::AtomicBool;

/// The number of the process that `concertina run` became: its program's.
const VARIABLE: &str = "CONCERTINA_RUN";

static SAID: AtomicBool = AtomicBool::new(false);

static BARE: Script = Script {
    name: c"<concertina: bare.py>",
    text: source!("bare.py"),
    functions: || vec![(c"say_bare", say_bare as extern "C" fn() as usize)],
    failure: "it cannot be told whether PyTorch keeps its own allocator in this process",
    asked: AtomicBool::new(false),
    ran: AtomicBool::new(false),
};

/// The process was started with these arguments.
///
/// # Safety
/// `arguments` points to `count` strings that end in a NUL.
pub unsafe fn at_start(count: c_int, arguments: *const *const c_char) {
    let program = settings::variable_text(VARIABLE);
    if program.is_none_or(|program| program != std::process::id().to_string()) || !is_python() {
        return;
    }
    let argument = |at| {
        // SAFETY: as promised by the caller.
        unsafe { CStr::from_ptr(*arguments.add(at)) }.to_bytes()
    };
    let option = bare_option((1..count as usize).map(argument));
    if let Some(option) = option.filter(|_| preload::is_on()) {
        say(&format!("-{option}"));
    }
}

/// The process uses the GPU for the first time, by its own calls.
pub fn at_first_use() {
    if settings::variable(VARIABLE).is_some() && !torch::is_attached() {
        BARE.schedule();
    }
}

extern "C" fn say_bare() {
    guard((), || {
        if !torch::is_attached() {
            say("-I, -E or -S or another PYTHONPATH");
        }
    });
}

fn say(how: &str) {
    message::print_once(&SAID, || {
        format!(
            "PyTorch keeps its own allocator in this process: Python was started with {how}, and \
             does not find concertina"
        )
    });
}

fn is_python() -> bool {
    // SAFETY: a constant string.
    !unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"Py_BytesMain".as_ptr()) }.is_null()
}

/// The first of Python's options that keeps `PYTHONPATH` or `sitecustomize` out. They end where the
/// program begins.
fn bare_option<'a>(arguments: impl Iterator<Item = &'a [u8]>) -> Option<char> {
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
                // The program.
                b'c' | b'm' => return None,
                // These take the rest of the argument, or the next.
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
