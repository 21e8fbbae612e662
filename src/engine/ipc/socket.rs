//! How file descriptors of chunks come from one process to another: a thread of the process that shares
//! answers on a Unix socket. Its name is in no directory (it is an abstract one) and goes with the
//! process, but every process can read it (`/proc/net/unix`): it is no secret. Either end asks the system
//! that the other belongs to the same user, and who asks has to have the secret of what it asks for; others
//! see the connection end.
//!
//! One connection is one question and one answer, of a size known beforehand. All that are open are
//! listened to at once, and none for longer than [`QUESTION`], so that nobody who connects and says
//! nothing holds up the others.

use crate::ipc::secret::random;
use crate::ipc::{Export, Secret, SegmentHandle, Unshared, exported};
use crate::process::allocator::{allocator, allocator_in_use};
use crate::process::lifecycle;
use crate::util::thread;
use parking_lot::Mutex;
use std::io::{self, ErrorKind, Read};
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};
use std::thread::sleep;
use std::time::{Duration, Instant};
use std::{panic, ptr};

/// Descriptors in one answer, at most. The system allows 253 (`SCM_MAX_FD`), and a process often has no
/// more than 1024 open.
pub const BATCH: usize = 64;

/// How long an answer may take: the other process may be waiting for its GPU.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long a question may take to arrive once somebody has connected.
const QUESTION: Duration = Duration::from_secs(1);

/// How many who have connected are waited for at a time. Beyond that whoever came first has to go.
const PEERS: usize = 64;

/// What is asked: `first` says from which part on descriptors are wanted.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Question {
    pub number: u64,
    pub secret: Secret,
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
    /// The span's number, and the device that it is on.
    pub span: u64,
    pub home: [u8; 16],
    /// Bytes of each chunk that comes.
    pub sizes: [u64; BATCH],
    /// The segment's handle, where it is one.
    segment: SegmentHandle,
}

/// What no answer says: who is to have none sees the connection end.
const NOTHING: u32 = 0;
const CHUNKS: u32 = 1;
const SEGMENT: u32 = 2;
const FAILED: u32 = 3;

impl Answer {
    const fn nothing() -> Answer {
        Answer {
            kind: NOTHING,
            status: 0,
            files: 0,
            parts: 0,
            bytes: 0,
            span: 0,
            home: [0; 16],
            sizes: [0; BATCH],
            segment: [0; crate::ipc::HANDLE_SIZE],
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
    let number = random()?;
    let listener = UnixListener::bind_addr(&address_of(&number)?)?;
    listener.set_nonblocking(true)?;
    INODE.store(inode_of(listener.as_raw_fd()), Relaxed);
    LISTENER.store(listener.as_raw_fd(), Relaxed);
    // SAFETY: the function stays, as the library is never unloaded.
    unsafe { libc::atexit(end) };
    if !thread::start(move || answer_all(&listener)) {
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
    exported::explain_unwanted();
}

/// Somebody who has connected.
struct Peer {
    stream: UnixStream,
    /// What has arrived of the question.
    bytes: [u8; size_of::<Question>()],
    got: usize,
    until: Instant,
}

fn answer_all(listener: &UnixListener) {
    if let Some(allocator) = allocator() {
        allocator.allow_calls_in_captures();
    }
    let mut peers = Vec::new();
    loop {
        wait_for(listener, &peers);
        if let Err(error) = admit(listener, &mut peers)
            && error.kind() != ErrorKind::Interrupted
        {
            // No descriptor is left, say: not for ever.
            sleep(Duration::from_millis(10));
        }
        let now = Instant::now();
        peers.retain_mut(|peer| peer.attend().is_ok_and(|more| more) && now < peer.until);
        let many = peers.len().saturating_sub(PEERS);
        peers.drain(..many);
    }
}

/// Waits until somebody connects, says something, or has said nothing for too long.
fn wait_for(listener: &UnixListener, peers: &[Peer]) {
    let wanted = |fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    let streams = peers.iter().map(|peer| peer.stream.as_raw_fd());
    let files = std::iter::once(listener.as_raw_fd()).chain(streams);
    let mut files: Vec<libc::pollfd> = files.map(wanted).collect();
    let now = Instant::now();
    let until = peers.iter().map(|peer| peer.until).min();
    // Rounded up, so that it is over by then.
    let left = until.map(|it| it.saturating_duration_since(now).as_millis() as i32 + 1);
    // SAFETY: as many as there are; an error only means to look at once.
    unsafe {
        libc::poll(
            files.as_mut_ptr(),
            files.len() as libc::nfds_t,
            left.unwrap_or(-1),
        )
    };
}

/// Lets in who has connected, as many as there may be.
fn admit(listener: &UnixListener, peers: &mut Vec<Peer>) -> io::Result<()> {
    for _ in 0..PEERS {
        match listener.accept() {
            Ok((stream, _)) => {
                if is_same_user(&stream) && stream.set_nonblocking(true).is_ok() {
                    peers.push(Peer {
                        stream,
                        bytes: [0; size_of::<Question>()],
                        got: 0,
                        until: Instant::now() + QUESTION,
                    });
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Peer {
    /// Reads what there is, and answers the question once it is whole. Whether there is more to come. Whoever
    /// is dropped sees the connection end.
    fn attend(&mut self) -> io::Result<bool> {
        while self.got < self.bytes.len() {
            match (&self.stream).read(&mut self.bytes[self.got..]) {
                Ok(0) => return Ok(false),
                Ok(got) => self.got += got,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
        }
        // SAFETY: as many bytes, of which any make a question: it is numbers throughout.
        let question: Question = unsafe { mem::transmute(self.bytes) };
        let answer = || {
            let ending = ENDING.lock();
            if *ending { None } else { find(&question) }
        };
        if let Ok(Some((answer, files))) = panic::catch_unwind(answer) {
            // SAFETY: numbers throughout, each where its size puts it.
            send(&self.stream, unsafe { bytes_of(&answer) }, &files)?;
        }
        Ok(false)
    }
}

/// The answer, and the descriptors that go with it. `None` where there is no such thing (any more), and
/// where the secret is not its own alike.
fn find(question: &Question) -> Option<(Answer, Vec<OwnedFd>)> {
    let Question {
        number,
        secret,
        first,
    } = question;
    let (span, secret) = match exported::is_given(*number) {
        true => (exported::span_of(*number, secret)?, None),
        false => (*number, Some(secret)),
    };
    let mut devices = allocator_in_use()?.devices_in_use();
    let first = *first as usize;
    let (home, span, export) = devices.find_map(|it| {
        let (span, export) = it.export(span, secret, first, BATCH)?;
        Some((it.uuid(), span, export))
    })?;
    exported::note_wanted();
    let mut answer = Answer {
        parts: span.parts.len() as u64,
        bytes: span.bytes(),
        span: span.number,
        home,
        ..Answer::nothing()
    };
    match export {
        Export::Chunks(files) => {
            answer.kind = CHUNKS;
            answer.files = files.len() as u64;
            let sizes = span.parts.iter().skip(first).map(|(_, size)| *size);
            let places = answer.sizes.iter_mut().take(files.len());
            places.zip(sizes).for_each(|(place, size)| *place = size);
            return Some((answer, files));
        }
        Export::Segment(handle) => (answer.kind, answer.segment) = (SEGMENT, handle),
        Export::Failed(status) => (answer.kind, answer.status) = (FAILED, status),
    }
    Some((answer, Vec::new()))
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
    // SAFETY: numbers throughout.
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
