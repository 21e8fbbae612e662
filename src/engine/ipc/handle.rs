//! Handles of shared memory, as other processes get them.

use crate::device::IpcBlock;
use crate::device::exported;
use crate::device::spans::{HANDLE_SIZE, IpcError};
use crate::ipc::server;
use crate::util::secret::Secret;

/// The first bytes of a handle of ours; the last of them is the protocol's version.
const MARK: [u8; 8] = *b"concert\x02";

/// Names memory of a process, and proves that its bearer may open it: plain bytes, which may be sent in any
/// way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Handle {
    mark: [u8; 8],
    /// A random number that no other process has.
    pub(super) process: [u8; 16],
    /// The number of the span, or of an exported allocation ([`exported`]).
    pub(super) number: u64,
    /// Bytes from the span's start to the memory.
    pub(super) offset: u64,
    /// Bytes of the memory.
    pub(super) size: u64,
    /// The secret of the span or allocation.
    pub(super) secret: Secret,
}

const _: () = assert!(size_of::<Handle>() == HANDLE_SIZE);

impl Handle {
    /// A handle of this process's memory: `size` bytes, `offset` bytes from the start of the span. Starts the
    /// thread that answers other processes.
    fn new((number, secret): (u64, Secret), offset: u64, size: u64) -> Result<Handle, IpcError> {
        Ok(Handle {
            mark: MARK,
            process: server::serve()?,
            number,
            offset,
            size,
            secret,
        })
    }

    /// The handle in these bytes; `None` if they are not one of ours, of this version.
    pub fn of(bytes: &[u8]) -> Option<Handle> {
        let bytes: [u8; HANDLE_SIZE] = bytes.try_into().ok()?;
        // SAFETY: 64 bytes for 64 bytes; a handle is numbers throughout, for which any bytes are valid.
        let handle: Handle = unsafe { std::mem::transmute(bytes) };
        (handle.mark == MARK).then_some(handle)
    }

    /// The handle as bytes.
    pub fn bytes(self) -> [u8; HANDLE_SIZE] {
        // SAFETY: numbers throughout, without padding.
        unsafe { std::mem::transmute(self) }
    }

    /// Whether it names memory of this process.
    pub fn is_own(&self) -> bool {
        server::process_number() == Some(self.process)
    }

    /// Bytes from the span's start to the memory.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes of the memory.
    pub fn size(&self) -> u64 {
        self.size
    }
}

impl IpcBlock {
    /// The handle of the whole span that the block lies in, valid as long as the span is.
    pub fn handle_of_span(&self) -> Result<Handle, IpcError> {
        self.handle(0, self.span.bytes())
    }

    /// The handle of `size` bytes from the block's start on, valid as long as the span is.
    pub fn handle_of_tensor(&self, size: u64) -> Result<Handle, IpcError> {
        exported::mark_tensor();
        self.handle(self.offset, size)
    }

    fn handle(&self, offset: u64, size: u64) -> Result<Handle, IpcError> {
        Handle::new((self.span.number, self.span.secret), offset, size)
    }

    /// The handle of the block, of `size` bytes: valid until it is freed.
    pub fn handle_of_block(&self, size: u64) -> Result<Handle, IpcError> {
        let allocation = exported::export(self.start, self.span.number)?;
        Handle::new((allocation.number, allocation.secret), self.offset, size)
    }
}
