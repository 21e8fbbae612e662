//! The thread that answers other processes' requests for memory that this one shares.
//!
//! It listens on an abstract Unix socket, which disappears with the process. Every process can read its name
//! (`/proc/net/unix`), so both ends check that the other runs as the same user, and a request has to hold the
//! secret of what it asks for. All connections are polled at once, and none for longer than
//! [`REQUEST_TIMEOUT`], so that one that sends nothing does not hold up the others.

use crate::device::Device;
use crate::device::exported;
use crate::device::spans::{Export, IpcError};
use crate::driver::Functions;
use crate::ipc::protocol::{
    BATCH, CHUNKS, FAILED, Request, Response, SEGMENT, address_of, bytes_of, is_same_user, send,
};
use crate::util::fork;
use crate::util::secret::random;
use crate::util::thread;
use parking_lot::Mutex;
use std::io::{self, ErrorKind, Read};
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a request may take to arrive after the connection.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

/// Most connections at a time. Beyond that the oldest are dropped.
const CONNECTIONS: usize = 64;

/// The devices of this process, and its driver.
struct Devices {
    functions: Functions,
    list: fn() -> Vec<&'static Device>,
}

static DEVICES: OnceLock<Devices> = OnceLock::new();

/// To be called before any device is opened: `list` returns those that are open whenever it is called.
pub fn set_devices(functions: Functions, list: fn() -> Vec<&'static Device>) {
    // No other code sets them.
    let _ = DEVICES.set(Devices { functions, list });
}

/// This process's number, or why it cannot serve.
static SERVED: OnceLock<Result<[u8; 16], String>> = OnceLock::new();

/// Starts the thread unless it runs. Returns the process's number, which names its socket.
pub fn serve() -> Result<[u8; 16], IpcError> {
    let served = SERVED.get_or_init(|| {
        start().map_err(|error| {
            format!("other processes cannot be answered on a Unix socket: {error}")
        })
    });
    served.clone().map_err(IpcError::Forbidden)
}

/// The process's number, if it shares memory.
pub fn process_number() -> Option<[u8; 16]> {
    SERVED.get()?.as_ref().ok().copied()
}

fn start() -> io::Result<[u8; 16]> {
    let number = random()?;
    let listener = UnixListener::bind_addr(&address_of(&number)?)?;
    listener.set_nonblocking(true)?;
    INODE.store(inode_of(listener.as_raw_fd()), Relaxed);
    LISTENER.store(listener.as_raw_fd(), Relaxed);
    // SAFETY: the function stays, as the library is never unloaded.
    unsafe { libc::atexit(end) };
    if !thread::start(move || serve_connections(&listener)) {
        return Err(io::Error::other("no thread could be started"));
    }
    Ok(number)
}

/// The listening socket, and its inode; 0 if there is none.
static LISTENER: AtomicI32 = AtomicI32::new(-1);
static INODE: AtomicU64 = AtomicU64::new(0);

/// Closes the listening socket in a forked child, where no thread serves it: after the parent's end, requests
/// would hang. Async-signal-safe.
pub fn stop_listening() {
    let (listener, inode) = (LISTENER.load(Relaxed), INODE.swap(0, Relaxed));
    // The program may have closed it, and the descriptor be another file's.
    if inode != 0 && inode_of(listener) == inode {
        // SAFETY: the thread that it belongs to does not exist in this process.
        unsafe { libc::close(listener) };
    }
}

/// The inode of an open file; 0 if it is not open. Async-signal-safe.
fn inode_of(file: RawFd) -> u64 {
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `fstat` fills it in where it returns 0.
    unsafe {
        match libc::fstat(file, status.as_mut_ptr()) {
            0 => status.assume_init().st_ino,
            _ => 0,
        }
    }
}

/// Held while a response is made. True once the process is ending, when the driver may be gone.
static ENDING: Mutex<bool> = Mutex::new(false);

/// Runs at exit.
extern "C" fn end() {
    // A child may have been forked while the lock was held.
    if fork::in_forked_child() {
        return;
    }
    if let Some(mut ending) = ENDING.try_lock_for(Duration::from_secs(1)) {
        *ending = true;
    }
    exported::explain_if_unimported();
}

/// A connection whose request has not arrived yet.
struct Connection {
    stream: UnixStream,
    /// The request, as far as it has arrived.
    bytes: [u8; size_of::<Request>()],
    got: usize,
    deadline: Instant,
}

fn serve_connections(listener: &UnixListener) {
    if let Some(devices) = DEVICES.get() {
        devices.functions.relax_capture_mode();
    }
    let mut connections = Vec::new();
    loop {
        poll(listener, &connections);
        if let Err(error) = accept(listener, &mut connections)
            && error.kind() != ErrorKind::Interrupted
        {
            // No descriptor is left, for example: not to spin.
            sleep(Duration::from_millis(10));
        }
        let now = Instant::now();
        connections.retain_mut(|connection| {
            connection.serve().is_ok_and(|waits| waits) && now < connection.deadline
        });
        let excess = connections.len().saturating_sub(CONNECTIONS);
        connections.drain(..excess);
    }
}

/// Waits for a new connection, for bytes on one, or for the first deadline.
fn poll(listener: &UnixListener, connections: &[Connection]) {
    let wanted = |fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let streams = connections
        .iter()
        .map(|connection| connection.stream.as_raw_fd());
    let files = std::iter::once(listener.as_raw_fd()).chain(streams);
    let mut files: Vec<libc::pollfd> = files.map(wanted).collect();
    let now = Instant::now();
    let deadline = connections
        .iter()
        .map(|connection| connection.deadline)
        .min();
    // Rounded up, so that the deadline has passed then.
    let left = deadline.map(|it| it.saturating_duration_since(now).as_millis() as i32 + 1);
    // SAFETY: the array and its length; after an error each connection is looked at once.
    unsafe {
        libc::poll(
            files.as_mut_ptr(),
            files.len() as libc::nfds_t,
            left.unwrap_or(-1),
        )
    };
}

/// Accepts the connections that wait, of the same user.
fn accept(listener: &UnixListener, connections: &mut Vec<Connection>) -> io::Result<()> {
    for _ in 0..CONNECTIONS {
        match listener.accept() {
            Ok((stream, _)) => {
                if is_same_user(&stream) && stream.set_nonblocking(true).is_ok() {
                    connections.push(Connection {
                        stream,
                        bytes: [0; size_of::<Request>()],
                        got: 0,
                        deadline: Instant::now() + REQUEST_TIMEOUT,
                    });
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Connection {
    /// Reads what has arrived, and responds once the request is whole. True while more is to come; otherwise
    /// the connection is to be dropped.
    fn serve(&mut self) -> io::Result<bool> {
        while self.got < self.bytes.len() {
            match (&self.stream).read(&mut self.bytes[self.got..]) {
                Ok(0) => return Ok(false),
                Ok(got) => self.got += got,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
        }
        // SAFETY: as many bytes as a request has, which is numbers throughout: any are valid.
        let request: Request = unsafe { mem::transmute(self.bytes) };
        let response = || {
            let ending = ENDING.lock();
            if *ending { None } else { respond(&request) }
        };
        if let Ok(Some((response, files))) = panic::catch_unwind(response) {
            // SAFETY: numbers throughout, without padding.
            send(&self.stream, unsafe { bytes_of(&response) }, &files)?;
        }
        Ok(false)
    }
}

/// The response and its descriptors. `None` if there is no such span or allocation (any more), and alike if
/// the secret is wrong.
fn respond(request: &Request) -> Option<(Response, Vec<OwnedFd>)> {
    let Request {
        number,
        secret,
        first,
    } = request;
    let (span, secret) = match exported::is_allocation(*number) {
        true => (exported::span_of(*number, secret)?, None),
        false => (*number, Some(secret)),
    };
    let mut devices = (DEVICES.get()?.list)().into_iter();
    let first = *first as usize;
    let (device, span, export) = devices.find_map(|it| {
        let (span, export) = it.export(span, secret, first, BATCH)?;
        Some((it.uuid(), span, export))
    })?;
    exported::mark_imported();
    let mut response = Response {
        parts: span.parts.len() as u64,
        bytes: span.bytes(),
        span: span.number,
        device,
        ..Response::empty()
    };
    match export {
        Export::Chunks(files) => {
            response.kind = CHUNKS;
            response.files = files.len() as u64;
            let sizes = span.parts.iter().skip(first).map(|(_, size)| *size);
            let places = response.sizes.iter_mut().take(files.len());
            places.zip(sizes).for_each(|(place, size)| *place = size);
            return Some((response, files));
        }
        Export::Segment(handle) => (response.kind, response.segment) = (SEGMENT, handle),
        Export::Failed(status) => (response.kind, response.status) = (FAILED, status),
    }
    Some((response, Vec::new()))
}
