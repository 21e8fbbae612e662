//! The statistics as a file: there whole, or not at all.

use super::settings;
use parking_lot::Mutex;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::IntoRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a file was not written.
#[derive(Debug)]
pub struct Failure {
    /// The C library's number for it.
    pub errno: i32,
    /// One line that names the path and the reason.
    pub line: String,
}

/// One writer at a time, so that an older state never replaces a newer one.
static WRITING: Mutex<()> = Mutex::new(());

/// Writes `text()`, if there is one, to `path`, replacing the file that is there.
///
/// Refuses to replace anything but a regular file of the effective user's. `text` is called when
/// this is the only writer; when another writer is busy for longer than `deadline`, nothing is
/// written. Until the whole text is in place, `path` is what it was.
pub fn write(
    path: &Path,
    deadline: Duration,
    text: impl FnOnce() -> Option<String>,
) -> Result<(), Failure> {
    let _one = WRITING.try_lock_for(deadline).ok_or_else(|| {
        failure(
            path,
            libc::EBUSY,
            "another thread has been writing it for too long",
        )
    })?;
    check(path)?;
    let Some(mut text) = text() else {
        return Ok(());
    };
    text.push('\n');
    replace(path, text.as_bytes()).map_err(|error| {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        failure(
            path,
            errno,
            &io::Error::from_raw_os_error(errno).to_string(),
        )
    })
}

fn failure(path: &Path, errno: i32, why: &str) -> Failure {
    Failure {
        errno,
        line: format!("statistics not written to {path:?}: {why}"),
    }
}

/// That `path` is free, or a regular file of ours. (Whoever puts a link there afterwards loses it:
/// a rename replaces the link and does not follow it.)
fn check(path: &Path) -> Result<(), Failure> {
    let refuse = |errno, why| Err(failure(path, errno, why));
    let Ok(there) = fs::symlink_metadata(path) else {
        return Ok(());
    };
    // SAFETY: geteuid has no preconditions.
    let user = unsafe { libc::geteuid() };
    if there.file_type().is_symlink() {
        refuse(libc::ELOOP, "it is a symbolic link")
    } else if there.is_dir() {
        refuse(libc::EISDIR, "it is a directory")
    } else if !there.is_file() {
        refuse(libc::EINVAL, "it is not a regular file")
    } else if there.uid() != user {
        refuse(libc::EPERM, "it belongs to another user")
    } else {
        Ok(())
    }
}

fn replace(path: &Path, text: &[u8]) -> io::Result<()> {
    let (file, temporary) = create_beside(path)?;
    let result = fill(file, text).and_then(|()| fs::rename(&temporary, path));
    if result.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    result
}

fn create_beside(path: &Path) -> io::Result<(File, PathBuf)> {
    let mut attempts = 0;
    loop {
        let temporary = path.with_file_name(format!(".concertina-{:016x}.tmp", random()));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o644)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(&temporary);
        attempts += 1;
        match file {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempts < 8 => {}
            result => return result.map(|file| (file, temporary)),
        }
    }
}

fn fill(mut file: File, text: &[u8]) -> io::Result<()> {
    file.write_all(text)?;
    // Some file systems report a failed write only here, and dropping a file does not tell.
    // SAFETY: the descriptor is this function's own and not used again.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn random() -> u64 {
    let mut bytes = [0_u8; 8];
    // SAFETY: getrandom writes at most the eight bytes it is given.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), 8, libc::GRND_NONBLOCK) };
    if got == 8 {
        return u64::from_ne_bytes(bytes);
    }
    // No entropy this early: O_EXCL still keeps the file safe, if not its name secret.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as u64) ^ u64::from(std::process::id()) << 32
}

/// The path that `pattern` stands for: `%p` is the process's id, `%h` the host's name, `%r` the
/// rank that a launcher gave the process (0 without one), `%%` a per cent sign.
///
/// An error is one line that names the pattern and the mistake.
pub fn expand(pattern: &[u8]) -> Result<PathBuf, Failure> {
    expand_with(pattern, settings::variable_text)
}

/// The same with `lookup` in place of the environment.
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
            Some(b'r') => path.extend(rank(&lookup).bytes()),
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

/// Whether `pattern` gives every process a path of its own.
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
        // A host's name becomes part of a file's name, so it can't be allowed to be a path.
        Some(name) if !name.is_empty() && !name.contains(&b'/') => name.to_vec(),
        _ => b"localhost".to_vec(),
    }
}

fn rank(lookup: impl Fn(&str) -> Option<String>) -> String {
    ["RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"]
        .iter()
        .filter_map(|name| lookup(name))
        .find(|rank| !rank.is_empty() && rank.bytes().all(|byte| byte.is_ascii_digit()))
        .unwrap_or_else(|| "0".into())
}
