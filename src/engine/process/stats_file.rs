//! Writing a statistics file, whole or not at all: under another name first, then renamed.

use crate::process::stats_path::{Failure, host_name};
use parking_lot::Mutex;
use serde_json::Value;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::IntoRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// One writer at a time, so that older statistics never replace newer ones.
static WRITING: Mutex<()> = Mutex::new(());

/// Writes the result of `text`, if it is not `None`, to `path`, replacing the file that is there.
///
/// Fails if `path` is anything but a regular file of the effective user's. `text` is called once no other
/// thread writes; if one does for longer than `timeout`, nothing is written. Until the whole text is in
/// place, the old file stays.
pub fn write(
    path: &Path,
    timeout: Duration,
    text: impl FnOnce() -> Option<String>,
) -> Result<(), Failure> {
    let _one = WRITING.try_lock_for(timeout).ok_or_else(|| {
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
        line: format!("statistics cannot be written to {path:?}: {why}"),
    }
}

/// Checks that `path` is free, or a regular file of the effective user's. (A link that is put there
/// afterwards is replaced, not followed: so `rename` does it.)
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

/// Whether a file could be written to `path` now: what is there may be replaced, and the directory is
/// writable.
pub fn check_writable(path: &Path) -> Result<(), Failure> {
    check(path)?;
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let reason = |error: io::Error| {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        failure(
            path,
            errno,
            &io::Error::from_raw_os_error(errno).to_string(),
        )
    };
    if !fs::metadata(directory).map_err(reason)?.is_dir() {
        return Err(reason(io::Error::from_raw_os_error(libc::ENOTDIR)));
    }
    let name = CString::new(directory.as_os_str().as_bytes())
        .map_err(|_| reason(io::Error::from_raw_os_error(libc::EINVAL)))?;
    // SAFETY: a string that ends in a NUL and outlives the call.
    let status = unsafe {
        let wanted = libc::W_OK | libc::X_OK;
        libc::faccessat(libc::AT_FDCWD, name.as_ptr(), wanted, libc::AT_EACCESS)
    };
    match status {
        0 => Ok(()),
        _ => Err(reason(io::Error::last_os_error())),
    }
}

/// The time by the clock that the kernel stamps files with. It is some milliseconds behind the precise clock,
/// which would make a file seem older than it is.
pub fn file_time() -> SystemTime {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME_COARSE, &mut now) };
    SystemTime::UNIX_EPOCH + Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Whether a process without statistics of its own may write to `path`: it is free, or the file there is
/// older than `started` and its writer does not run any more.
pub fn is_left_over(path: &Path, started: SystemTime) -> bool {
    let Ok(there) = fs::symlink_metadata(path) else {
        return true;
    };
    let older = there.modified().is_ok_and(|written| written < started);
    if !older || !there.is_file() {
        return false;
    }
    let text = fs::read_to_string(path).unwrap_or_default();
    let Ok(statistics) = serde_json::from_str::<Value>(&text) else {
        return true;
    };
    let writer = statistics["pid"]
        .as_i64()
        .and_then(|pid| pid.try_into().ok());
    let here = statistics["host"]
        .as_str()
        .is_none_or(|host| host == host_name());
    // SAFETY: signal 0 only checks that the process exists.
    let runs =
        writer.is_some_and(|writer: i32| writer > 0 && unsafe { libc::kill(writer, 0) } == 0);
    here && !runs
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
    // Some file systems report a failed write only at close, which dropping a file ignores.
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
    // No entropy this early: the name can be guessed then, but O_EXCL still keeps the file safe.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as u64) ^ u64::from(std::process::id()) << 32
}
