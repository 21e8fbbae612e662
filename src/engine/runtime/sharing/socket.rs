//! How file descriptors of chunks come from one process to another: a thread of the process that shares
//! answers on a Unix socket. Its name is in no directory (it is an abstract one) and goes with the
//! process; a number that nobody can guess is part of it, and either end asks the system that the other
//! belongs to the same user.
//!
//! One connection is one question and one answer, of a size known beforehand, so that nobody holds up
//! the others for long.

use super::super::registry::{allocator, allocator_in_use};
use super::super::{helper, lifecycle};
use super::{Export, SegmentHandle, Unshared, given};
use parking_lot::Mutex;
use std::io::{self, ErrorKind, Read};
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};
use std::thread::sleep;
use std::time::Duration;
use std::{panic, ptr};

/// Descriptors in one answer, at most. The system allows 253 (`SCM_MAX_FD`), and a process often has no
/// more than 1024 open.
pub const BATCH: usize = 64;

/// How long an answer may take: the other process may be waiting for its GPU.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a question may take to arrive once somebody has connected.
const QUESTION: Duration = Duration::from_secs(1);

/// What is asked: `first` says from which part on descriptors are wanted.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Question {
    pub span: u64,
    pub given: u64,
    pub first: u64,
}

impl Question {
    /// Wants no descriptors.
    pub const NO_FILES: u64 = u64::MAX;
}

/// What is answered, with descriptors of up to [`BATCH`] chunks.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Answer {
    kind: u32,
    /// A `CUresult` where the driver failed; else 0.
    status: u32,
    /// How many descriptors come with it.
    files: u64,
    /// How many parts the span has, and bytes of all of them.
    pub parts: u64,
    pub bytes: u64,
    /// Bytes of the allocation, where it was given away by a number.
    pub size: u64,
    /// Bytes of each chunk that comes.
    pub sizes: [u64; BATCH],
    /// The segment's handle, where it is one.
    segment: SegmentHandle,
}

const GONE: u32 = 0;
const CHUNKS: u32 = 1;
const SEGMENT: u32 = 2;
const FAILED: u32 = 3;

impl Answer {
    const fn nothing() -> Answer {
        Answer {
            kind: GONE,
            status: 0,
            files: 0,
            parts: 0,
            bytes: 0,
            size: 0,
            sizes: [0; BATCH],
            segment: [0; super::HANDLE_SIZE],
        }
    }

    /// The handle of a plain segment, if that is what the span is.
    pub fn segment(&self) -> Option<SegmentHandle> {
        (self.kind == SEGMENT).then_some(self.segment)
    }
}

/// The bytes of a structure that is sent as it is.
///
/// # Safety
/// It is made of numbers, without gaps.
unsafe fn bytes_of<T>(it: &T) -> &[u8] {
    // SAFETY: as promised; as many bytes as it has.
    unsafe { std::slice::from_raw_parts(ptr::from_ref(it).cast(), size_of::<T>()) }
}

/// The same, to be written.
///
/// # Safety
/// As above, and any bytes make one.
unsafe fn bytes_of_mut<T>(it: &mut T) -> &mut [u8] {
    // SAFETY: as promised; as many bytes as it has.
    unsafe { std::slice::from_raw_parts_mut(ptr::from_mut(it).cast(), size_of::<T>()) }
}

// ---- the process that shares ----------------------------------------------------------------------

static SERVED: OnceLock<Result<[u8; 16], String>> = OnceLock::new();

/// Starts to answer, unless it does already, and says the process's number.
pub fn serve() -> Result<[u8; 16], Unshared> {
    let served = SERVED.get_or_init(|| {
        start().map_err(|error| {
            format!("other processes cannot be answered on a Unix socket: {error}")
        })
    });
    served.clone().map_err(Unshared::Forbidden)
}

/// The process's number, if it shares memory.
pub fn own_number() -> Option<[u8; 16]> {
    SERVED.get()?.as_ref().ok().copied()
}

fn address_of(process: &[u8; 16]) -> io::Result<SocketAddr> {
    let name: String = process.iter().map(|byte| format!("{byte:02x}")).collect();
    SocketAddr::from_abstract_name(format!("concertina-{name}"))
}

fn start() -> io::Result<[u8; 16]> {
    let mut number = [0; 16];
    // SAFETY: 16 bytes to be written.
    let got = unsafe { libc::getrandom(number.as_mut_ptr().cast(), number.len(), 0) };
    if got != number.len() as isize {
        return Err(io::Error::last_os_error());
    }
    let listener = UnixListener::bind_addr(&address_of(&number)?)?;
    INODE.store(inode_of(listener.as_raw_fd()), Relaxed);
    LISTENER.store(listener.as_raw_fd(), Relaxed);
    // SAFETY: the function stays, as the library is never unloaded.
    unsafe { libc::atexit(end) };
    if !helper::start(move || answer_all(&listener)) {
        return Err(io::Error::other("no thread could be started"));
    }
    Ok(number)
}

/// The socket that is listened on, and the system's number for it; 0 where there is none.
static LISTENER: AtomicI32 = AtomicI32::new(-1);
static INODE: AtomicU64 = AtomicU64::new(0);

/// Closes the socket in a child just forked, which answers nobody: whoever asked after the parent's end
/// would wait for it. Async-signal-safe.
pub fn stop_listening() {
    let (listener, inode) = (LISTENER.load(Relaxed), INODE.swap(0, Relaxed));
    // The program may have closed it, and have another file under its number.
    if inode != 0 && inode_of(listener) == inode {
        // SAFETY: the thread that it belongs to does not exist in this process.
        unsafe { libc::close(listener) };
    }
}

/// What tells a socket from others; 0 where nothing is open. Async-signal-safe.
fn inode_of(file: RawFd) -> u64 {
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `fstat` fills it in where it answers 0.
    unsafe {
        match libc::fstat(file, status.as_mut_ptr()) {
            0 => status.assume_init().st_ino,
            _ => 0,
        }
    }
}

/// Held while an answer is made. True once the process is ending: the driver may be gone then.
static ENDING: Mutex<bool> = Mutex::new(false);

extern "C" fn end() {
    // A child may have been forked while the lock was held.
    if lifecycle::in_forked_child() {
        return;
    }
    if let Some(mut ending) = ENDING.try_lock_for(Duration::from_secs(1)) {
        *ending = true;
    }
    given::explain_unwanted();
}

fn answer_all(listener: &UnixListener) {
    if let Some(allocator) = allocator() {
        allocator.allow_calls_in_captures();
    }
    loop {
        let Ok((peer, _)) = listener.accept() else {
            // No descriptor is left, say: not for ever.
            sleep(Duration::from_millis(10));
            continue;
        };
        // Whoever asked sees the connection end.
        let _ = panic::catch_unwind(|| answer_one(&peer));
    }
}

fn answer_one(mut peer: &UnixStream) -> io::Result<()> {
    let mut question = Question {
        span: 0,
        given: 0,
        first: 0,
    };
    peer.set_read_timeout(Some(QUESTION))?;
    peer.set_write_timeout(Some(QUESTION))?;
    if !is_same_user(peer) {
        return Ok(());
    }
    // SAFETY: three numbers.
    peer.read_exact(unsafe { bytes_of_mut(&mut question) })?;
    let ending = ENDING.lock();
    let (answer, files) = match *ending {
        true => (Answer::nothing(), Vec::new()),
        false => find(question),
    };
    drop(ending);
    // SAFETY: numbers throughout, each where its size puts it.
    send(peer, unsafe { bytes_of(&answer) }, &files)
}

fn find(question: Question) -> (Answer, Vec<OwnedFd>) {
    let mut answer = Answer::nothing();
    if question.given != 0 {
        match given::size_of(question.given) {
            Some(size) => answer.size = size,
            None => return (answer, Vec::new()),
        }
    }
    let mut devices = allocator_in_use()
        .into_iter()
        .flat_map(|it| it.open_devices());
    let first = question.first as usize;
    let Some((span, export)) = devices.find_map(|it| it.export(question.span, first, BATCH)) else {
        return (answer, Vec::new());
    };
    answer.parts = span.parts.len() as u64;
    answer.bytes = span.parts.iter().map(|(_, size)| size).sum();
    match export {
        Export::Chunks(files) => {
            answer.kind = CHUNKS;
            answer.files = files.len() as u64;
            let sizes = span.parts.iter().skip(first).map(|(_, size)| *size);
            let places = answer.sizes.iter_mut().take(files.len());
            places.zip(sizes).for_each(|(place, size)| *place = size);
            return (answer, files);
        }
        Export::Segment(handle) => (answer.kind, answer.segment) = (SEGMENT, handle),
        Export::Failed(status) => (answer.kind, answer.status) = (FAILED, status),
    }
    (answer, Vec::new())
}

/// Sends so few bytes in one piece, with descriptors. A peer that is gone raises no signal.
fn send(peer: &UnixStream, bytes: &[u8], files: &[OwnedFd]) -> io::Result<()> {
    let numbers: Vec<RawFd> = files.iter().map(AsRawFd::as_raw_fd).collect();
    let mut control = Control::new();
    let mut part = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let size = size_of_val(&numbers[..]) as u32;
    let mut message = control.message(&mut part);
    // SAFETY: `message` points at `part` and at room for a head and a batch of descriptors, of which no
    // more come; all of it outlives the call, which only reads it.
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
        again(|| libc::sendmsg(peer.as_raw_fd(), &message, libc::MSG_NOSIGNAL))
    };
    match sent? {
        sent if sent as usize == bytes.len() => Ok(()),
        _ => Err(ErrorKind::WriteZero.into()),
    }
}

/// Makes a system call that answers how many bytes it moved, until no signal interrupts it.
fn again(mut call: impl FnMut() -> isize) -> io::Result<isize> {
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

/// Room for the descriptors of a message, aligned as its head is.
#[repr(C)]
struct Control {
    head: [libc::cmsghdr; 0],
    room: [u8; CONTROL],
}

/// Bytes of it: the head, and a batch of descriptors.
const CONTROL: usize = 512;
const _: () = assert!(size_of::<libc::cmsghdr>() + BATCH * size_of::<RawFd>() <= CONTROL);

impl Control {
    fn new() -> Control {
        Control {
            head: [],
            room: [0; CONTROL],
        }
    }

    /// A message of one part, with this room.
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

/// Whether the process at the other end is this user's.
fn is_same_user(peer: &UnixStream) -> bool {
    let mut other = MaybeUninit::<libc::ucred>::uninit();
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: room for what the option is, and its size; it is read only where the call wrote it.
    unsafe {
        let asked = libc::getsockopt(
            peer.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            other.as_mut_ptr().cast(),
            &mut size,
        );
        asked == 0 && other.assume_init().uid == libc::geteuid()
    }
}

// ---- the process that opens -----------------------------------------------------------------------

/// Asks a process.
pub fn ask(process: &[u8; 16], question: Question) -> Result<(Answer, Vec<OwnedFd>), Unshared> {
    let forbidden = |error: io::Error| {
        Unshared::Forbidden(format!("its process cannot be asked for it: {error}"))
    };
    let address = address_of(process).map_err(forbidden)?;
    let peer = loop {
        match UnixStream::connect_addr(&address) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            connected => break connected,
        }
    };
    let peer = match peer {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Err(Unshared::Gone),
        other => other.map_err(forbidden)?,
    };
    if !is_same_user(&peer) {
        return Err(Unshared::Forbidden("its process is another user's".into()));
    }
    peer.set_read_timeout(Some(PATIENCE)).map_err(forbidden)?;
    // SAFETY: three numbers.
    let asked = send(&peer, unsafe { bytes_of(&question) }, &[]);
    let (answer, files) = match asked.and_then(|()| receive(&peer)) {
        Ok(answer) => answer,
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            return Err(Unshared::Forbidden(format!(
                "its process does not answer within {} s",
                PATIENCE.as_secs()
            )));
        }
        // It ended meanwhile.
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Err(Unshared::Gone),
        Err(error) if error.raw_os_error() == Some(libc::EPIPE) => return Err(Unshared::Gone),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => return Err(Unshared::Gone),
        Err(error) => return Err(forbidden(error)),
    };
    match answer.kind {
        CHUNKS | SEGMENT if answer.files as usize == files.len() => Ok((answer, files)),
        CHUNKS => Err(Unshared::Forbidden(
            "no more files can be open in this process (ulimit -n)".into(),
        )),
        FAILED => Err(Unshared::Forbidden(format!(
            "the driver does not share it in its process (CUDA error {})",
            answer.status
        ))),
        _ => Err(Unshared::Gone),
    }
}

fn receive(mut peer: &UnixStream) -> io::Result<(Answer, Vec<OwnedFd>)> {
    let mut answer = Answer::nothing();
    // SAFETY: numbers throughout.
    let bytes = unsafe { bytes_of_mut(&mut answer) };
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
        let got = again(|| {
            message.msg_controllen = CONTROL;
            libc::recvmsg(peer.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC)
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
    peer.read_exact(&mut bytes[got..])?;
    Ok((answer, files))
}
