//! Device memory shared with other processes that have this library.
//!
//! The pool's memory lies in chunks, which CUDA's own IPC handles (`cudaIpcGetMemHandle`) cannot share.
//! Another process gets a [`Handle`] of ours instead, of the same 64 bytes: it names the process and a
//! *span*, the chunks that a block lies in. To open it, the other process asks this one over a Unix socket
//! (`server`) for file descriptors of the chunks, and maps them side by side (`imported`). A socket needs no
//! permission to inspect the other process, which many systems and containers refuse, as `pidfd_getfd` would.
//! Each handle holds a secret of its span or allocation, without which there is no answer.
//!
//! A block in use is not remapped, so a span is valid for as long as the block is in use; as with CUDA's own
//! handles, the sharing process has to keep the memory until the others have closed it. Chunks that are
//! remapped later stay mapped in the other processes. A span is dropped when its first chunk is released to
//! the driver.
//!
//! A plain segment is shared by CUDA's own handle, which opens the whole segment.

mod client;
mod handle;
mod imported;
mod protocol;
mod server;

pub use crate::device::spans::{HANDLE_SIZE, IpcError, SegmentHandle};
pub use handle::Handle;
pub use imported::{Imported, import, import_segment};
pub(crate) use server::{set_devices, stop_listening};
