//! The messages of the socket by which processes share memory, and sending them with file descriptors.
//!
//! One connection is one [`Request`] and one [`Response`], both of fixed size.

use crate::device::spans::{HANDLE_SIZE, SegmentHandle};
use crate::util::secret::Secret;
use std::io::{self, ErrorKind, Read};
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::ptr;

/// Most descriptors in one response. The system allows 253 (`SCM_MAX_FD`), and a process often may have no
/// more than 1024 open.
pub const BATCH: usize = 64;

/// Asks for descriptors of a span's chunks.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Request {
    /// The number of the span, or of an exported allocation.
    pub number: u64,
    /// Its secret.
    pub secret: Secret,
    /// The first chunk whose descriptor is wanted, or [`Request::NO_FILES`].
    pub first: u64,
}

impl Request {
    /// No descriptors are wanted.
    pub const NO_FILES: u64 = u64::MAX;
}

/// Describes a span, and comes with descriptors of up to [`BATCH`] of its chunks.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Response {
    /// [`CHUNKS`], [`SEGMENT`] or [`FAILED`].
    pub kind: u32,
    /// With [`FAILED`] the driver's status; else 0.
    pub status: u32,
    /// How many descriptors come with it.
    pub files: u64,
    /// How many parts the span has.
    pub parts: u64,
    /// Bytes of all parts.
    pub bytes: u64,
    /// The span's number.
    pub span: u64,
    /// The UUID of the device that it is on.
    pub device: [u8; 16],
    /// Bytes of each chunk whose descriptor comes.
    pub sizes: [u64; BATCH],
    /// With [`SEGMENT`] the segment's handle.
    pub segment: SegmentHandle,
}

/// No response has it: a request that is refused sees the connection end.
const NONE: u32 = 0;
/// Descriptors of chunks.
pub const CHUNKS: u32 = 1;
/// The handle of a plain segment.
pub const SEGMENT: u32 = 2;
/// The driver refused.
pub const FAILED: u32 = 3;

impl Response {
    /// All zeros.
    pub const fn empty() -> Response {
        Response {
            kind: NONE,
            status: 0,
            files: 0,
            parts: 0,
            bytes: 0,
            span: 0,
            device: [0; 16],
            sizes: [0; BATCH],
            segment: [0; HANDLE_SIZE],
        }
    }
}

/// The bytes of a structure that is sent as it is.
///
/// # Safety
/// It is made of numbers, without padding.
pub unsafe fn bytes_of<T>(it: &T) -> &[u8] {
    // SAFETY: as promised; as many bytes as it has.
    unsafe { std::slice::from_raw_parts(ptr::from_ref(it).cast(), size_of::<T>()) }
}

/// [`bytes_of`], to be written.
///
/// # Safety
/// It is made of numbers, without padding; any bytes are valid.
unsafe fn bytes_of_mut<T>(it: &mut T) -> &mut [u8] {
    // SAFETY: as promised; as many bytes as it has.
    unsafe { std::slice::from_raw_parts_mut(ptr::from_mut(it).cast(), size_of::<T>()) }
}

/// The abstract socket of the process with this number.
pub fn address_of(process: &[u8; 16]) -> io::Result<SocketAddr> {
    let name: String = process.iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddr::from_abstract_name(format!("concertina-{name}"))
}

/// Sends a message, with descriptors. A connection that has ended is an error, and raises no signal.
pub fn send(connection: &UnixStream, bytes: &[u8], files: &[OwnedFd]) -> io::Result<()> {
    let numbers: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let mut control = Control::new();
    let mut part = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let size = size_of_val(&numbers[..]) as u32;
    let mut message = control.message(&mut part);
    // SAFETY: `message` points at `part` and at room for a header and a batch of descriptors, which are the
    // most that there are; all of it outlives the call, which only reads it.
    let sent = unsafe {
        if files.is_empty() {
            message.msg_controllen = 0;
        } else {
            message.msg_controllen = libc::CMSG_SPACE(size) as usize;
            let head = libc::CMSG_FIRSTHDR(&message);
            (*head).cmsg_level = libc::SOL_SOCKET;
            (*head).cmsg_type = libc::SCM_RIGHTS;
            (*head).cmsg_len = libc::CMSG_LEN(size) as usize;
            let to = libc::CMSG_DATA(head);
            ptr::copy_nonoverlapping(numbers.as_ptr().cast(), to, size as usize);
        }
        retry_interrupted(|| libc::sendmsg(connection.as_raw_fd(), &message, libc::MSG_NOSIGNAL))
    };
    match sent? {
        sent if sent as usize == bytes.len() => Ok(()),
        _ => Err(ErrorKind::WriteZero.into()),
    }
}

/// Repeats a system call that returns a number of bytes while signals interrupt it.
fn retry_interrupted(mut call: impl FnMut() -> isize) -> io::Result<isize> {
    loop {
        match call() {
            ..0 => {
                let error = io::Error::last_os_error();
                if error.kind() != ErrorKind::Interrupted {
                    return Err(error);
                }
            }
            moved => return Ok(moved),
        }
    }
}

/// The control buffer of a message: room for descriptors, aligned as its header is.
#[repr(C)]
struct Control {
    head: [libc::cmsghdr; 0],
    room: [u8; CONTROL],
}

/// Bytes of the buffer: the header, and [`BATCH`] descriptors.
const CONTROL: usize = 512;
const _: () = assert!(size_of::<libc::cmsghdr>() + BATCH * size_of::<RawFd>() <= CONTROL);

impl Control {
    fn new() -> Control {
        Control {
            head: [],
            room: [0; CONTROL],
        }
    }

    /// A message of one part, with this buffer.
    fn message(&mut self, part: &mut libc::iovec) -> libc::msghdr {
        // SAFETY: numbers and pointers, for which zeros are valid.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = part;
        message.msg_iovlen = 1;
        message.msg_control = self.room.as_mut_ptr().cast();
        message.msg_controllen = CONTROL;
        message
    }
}

/// Whether the process at the other end runs as the same user.
pub fn is_same_user(connection: &UnixStream) -> bool {
    let mut other = MaybeUninit::<libc::ucred>::uninit();
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: room for what the option is, and its size; it is read only where the call wrote it.
    unsafe {
        let asked = libc::getsockopt(
            connection.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            other.as_mut_ptr().cast(),
            &mut size,
        );
        asked == 0 && other.assume_init().uid == libc::geteuid()
    }
}

/// Receives a response and its descriptors.
pub fn receive(mut connection: &UnixStream) -> io::Result<(Response, Vec<OwnedFd>)> {
    let mut response = Response::empty();
    // SAFETY: numbers throughout.
    let bytes = unsafe { bytes_of_mut(&mut response) };
    let mut control = Control::new();
    let mut part = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let mut message = control.message(&mut part);
    let mut files = Vec::new();
    // SAFETY: `message` points at `part` and at room for a head and a batch of descriptors, which
    // outlive the call; what the system has put there is read within the bounds that it says, and each
    // descriptor is this process's own from now on.
    let got = unsafe {
        let got = retry_interrupted(|| {
            message.msg_controllen = CONTROL;
            libc::recvmsg(connection.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC)
        })?;
        let head = libc::CMSG_FIRSTHDR(&message);
        if !head.is_null() && (*head).cmsg_type == libc::SCM_RIGHTS {
            let size = (*head).cmsg_len - libc::CMSG_LEN(0) as usize;
            let first = libc::CMSG_DATA(head).cast::<RawFd>();
            for at in 0..size / size_of::<RawFd>() {
                files.push(OwnedFd::from_raw_fd(first.add(at).read_unaligned()));
            }
        }
        got as usize
    };
    if got == 0 {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    connection.read_exact(&mut bytes[got..])?;
    Ok((response, files))
}
