//! The requests of a process that opens another's memory.

use crate::device::spans::IpcError;
use crate::ipc::protocol::{
    CHUNKS, FAILED, Request, Response, SEGMENT, address_of, bytes_of, is_same_user, receive, send,
};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How long a response may take: the other process may be waiting for its GPU.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Sends a request to a process and returns its response, with descriptors.
pub fn request(process: &[u8; 16], message: Request) -> Result<(Response, Vec<OwnedFd>), IpcError> {
    let forbidden = |error: io::Error| {
        IpcError::Forbidden(format!("its process cannot be asked for it: {error}"))
    };
    let address = address_of(process).map_err(forbidden)?;
    let connection = loop {
        match UnixStream::connect_addr(&address) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            connected => break connected,
        }
    };
    let connection = match connection {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Err(IpcError::Gone),
        other => other.map_err(forbidden)?,
    };
    if !is_same_user(&connection) {
        return Err(IpcError::Forbidden("its process is another user's".into()));
    }
    connection
        .set_read_timeout(Some(TIMEOUT))
        .map_err(forbidden)?;
    // SAFETY: numbers throughout.
    let sent = send(&connection, unsafe { bytes_of(&message) }, &[]);
    let (response, files) = match sent.and_then(|()| receive(&connection)) {
        Ok(response) => response,
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            return Err(IpcError::Forbidden(format!(
                "its process does not answer within {} s",
                TIMEOUT.as_secs()
            )));
        }
        // The process ended meanwhile.
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Err(IpcError::Gone),
        Err(error) if error.raw_os_error() == Some(libc::EPIPE) => return Err(IpcError::Gone),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => return Err(IpcError::Gone),
        Err(error) => return Err(forbidden(error)),
    };
    match response.kind {
        CHUNKS | SEGMENT if response.files as usize == files.len() => Ok((response, files)),
        CHUNKS => Err(IpcError::Forbidden(
            "no more files can be open in this process (ulimit -n)".into(),
        )),
        FAILED => Err(IpcError::Forbidden(format!(
            "the driver does not share it in its process (CUDA error {})",
            response.status
        ))),
        _ => Err(IpcError::Gone),
    }
}
