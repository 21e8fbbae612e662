//! Paths of statistics: what the placeholders of a pattern such as `stats-%h-%p.json` stand for.

use crate::process::launcher;
use crate::settings;
use std::env;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Why a file was not written, or cannot be.
#[derive(Debug)]
pub struct Failure {
    /// The `errno` value for it.
    pub errno: i32,
    /// One line that names the path and the reason.
    pub line: String,
}

/// The path that `pattern` stands for: `%p` is the process's id, `%h` the host's name, `%r` the
/// rank that a launcher gave the process (0 without one), `%%` a per cent sign.
///
/// An error is one line that names the pattern and the mistake.
pub fn expand(pattern: &[u8]) -> Result<PathBuf, Failure> {
    expand_with(pattern, settings::variable_text)
}

/// [`expand`] with `lookup` in place of the environment.
pub fn expand_with(
    pattern: &[u8],
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<PathBuf, Failure> {
    let mistake = |why: &str| Failure {
        errno: libc::EINVAL,
        line: format!(
            "statistics path {:?}: {why}; %p (process), %h (host), %r (rank) and %% are allowed",
            String::from_utf8_lossy(pattern)
        ),
    };
    let mut path = Vec::with_capacity(pattern.len() + 16);
    let mut bytes = pattern.iter().copied();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            path.push(byte);
            continue;
        }
        match bytes.next() {
            Some(b'%') => path.push(b'%'),
            Some(b'p') => path.extend(std::process::id().to_string().bytes()),
            Some(b'h') => path.extend(host()),
            Some(b'r') => path.extend(launcher::rank(&lookup).as_deref().unwrap_or("0").bytes()),
            Some(other) => {
                let other = char::from(other).escape_default();
                return Err(mistake(&format!("%{other} means nothing")));
            }
            None => return Err(mistake("it ends in a single %")),
        }
    }
    if path.is_empty() || path.contains(&0) {
        return Err(mistake("it names no file"));
    }
    Ok(PathBuf::from(OsString::from_vec(path)))
}

/// Makes `pattern` absolute by the current directory, which the program may change later.
pub fn absolute(pattern: Vec<u8>) -> Vec<u8> {
    match env::current_dir() {
        Ok(directory) if !pattern.is_empty() && pattern[0] != b'/' => {
            let mut path = Vec::new();
            for byte in directory.into_os_string().into_vec() {
                path.push(byte);
                // A single per cent sign would begin a placeholder.
                if byte == b'%' {
                    path.push(byte);
                }
            }
            path.push(b'/');
            path.extend(pattern);
            path
        }
        _ => pattern,
    }
}

/// Whether `pattern` has `%p` in it, so that each process has a path of its own.
pub fn names_process(pattern: &[u8]) -> bool {
    let mut bytes = pattern.iter();
    while let Some(byte) = bytes.next() {
        if *byte == b'%' && bytes.next() == Some(&b'p') {
            return true;
        }
    }
    false
}

fn host() -> Vec<u8> {
    let mut name = [0_u8; 256];
    // SAFETY: gethostname writes at most the bytes it is given; the last one is kept for the end.
    let result = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let name = name.split(|byte| *byte == 0).next().filter(|_| result == 0);
    match name {
        // It becomes part of a file's name, and must not lead to another directory.
        Some(name) if !name.is_empty() && !name.contains(&b'/') => name.to_vec(),
        _ => b"localhost".to_vec(),
    }
}

/// The host's name.
pub fn host_name() -> String {
    String::from_utf8_lossy(&host()).into_owned()
}
