//! Exporting a device's memory to other processes, and importing theirs: the driver calls of both.

use crate::core::{Backing, Gpu};
use crate::device::context::{FILE, access_of, current};
use crate::device::ledger::Call;
use crate::device::spans::{Export, HANDLE_SIZE, IpcError, SegmentHandle, Span};
use crate::device::{Device, State};
use crate::driver::sys::*;
use crate::util::secret::Secret;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the one flag that there is.
const LAZY_PEER_ACCESS: u32 = 1;

/// A block in use as other processes find it: a part of a span.
pub struct IpcBlock {
    pub(crate) span: Arc<Span>,
    /// Where the block starts.
    pub start: u64,
    /// Bytes from the span's start to the block's.
    pub offset: u64,
    /// The address of the plain segment that it lies in, if the span is one.
    pub segment: Option<u64>,
}

impl IpcBlock {
    /// The number of its span.
    #[cfg(test)]
    pub(crate) fn span_number(&self) -> u64 {
        self.span.number
    }
}

impl Device {
    /// The block in use around `address`, for other processes. Valid as long as the block is in use.
    pub fn ipc_block(&self, address: u64) -> Result<IpcBlock, IpcError> {
        let mut state = self.lock_flushed();
        let pool = &state.pool;
        let start = pool.block_around(address).ok_or(IpcError::Unknown)?.start;
        let backing = pool.backing(start).ok_or(IpcError::Unknown)?;
        self.ipc_block_of(&mut state, start, backing)
    }

    /// The allocation around `address` ([`Device::allocation`]), which has a tensor in it, for other
    /// processes. In a private pool it is a whole run of its memory, which stays the same while the pool is
    /// in use.
    pub fn ipc_block_of_tensor(&self, address: u64) -> Result<IpcBlock, IpcError> {
        let mut state = self.lock_flushed();
        let pool = &state.pool;
        let found = pool.allocation_around(address).ok_or(IpcError::Unknown)?;
        let start = found.found.start;
        let backing = match found.private {
            true => pool.backing_of_run(start),
            false => pool.backing(start),
        };
        self.ipc_block_of(&mut state, start, backing.ok_or(IpcError::Unknown)?)
    }

    fn ipc_block_of(
        &self,
        state: &mut State,
        start: u64,
        backing: Backing,
    ) -> Result<IpcBlock, IpcError> {
        let State { pool, .. } = state;
        if backing.mapped && !pool.gpu().is_exportable() {
            return Err(IpcError::Forbidden(format!(
                "{} cannot share mapped memory",
                self.properties.name
            )));
        }
        if pool.gpu().spans.needs_sweep() {
            let home = pool.chunk_addresses();
            pool.gpu_mut().spans.sweep(&home);
        }
        let segment = (!backing.mapped).then_some(backing.start);
        Ok(IpcBlock {
            span: pool
                .gpu_mut()
                .spans
                .find_or_add(backing.parts, backing.mapped)?,
            start,
            offset: start - backing.start,
            segment,
        })
    }

    /// CUDA's own handle of a plain segment.
    pub fn segment_handle(&self, segment: u64) -> Result<SegmentHandle, IpcError> {
        self.query_segment_handle(segment)
            .map_err(|status| self.failure("cuIpcGetMemHandle", status))
    }

    fn query_segment_handle(&self, segment: u64) -> Result<SegmentHandle, u32> {
        let mut handle = [0; HANDLE_SIZE];
        let _current = current(&self.functions, self.properties.context);
        // SAFETY: `handle` outlives the call and is as large as CUDA's.
        let status =
            unsafe { (self.functions.cuIpcGetMemHandle)(handle.as_mut_ptr().cast(), segment) };
        match status {
            0 => Ok(handle),
            status => Err(status),
        }
    }

    /// What another process needs of a span: descriptors of at most `most` chunks from the `first` on, or the
    /// segment's handle. `None` where the span is not this device's, or a secret is wanted and this is not
    /// its own.
    pub(crate) fn export(
        &self,
        span: u64,
        secret: Option<&Secret>,
        first: usize,
        most: usize,
    ) -> Option<(Arc<Span>, Export)> {
        // Held to the end: what is exported may not go back to the driver meanwhile.
        let state = self.state.lock();
        let span = state.pool.gpu().spans.get(span)?;
        if secret.is_some_and(|secret| !span.secret.matches(secret)) {
            return None;
        }
        if !span.mapped {
            let export = match self.query_segment_handle(span.parts[0].0) {
                Ok(handle) => Export::Segment(handle),
                Err(status) => Export::Failed(status),
            };
            return Some((span, export));
        }
        let mut files = Vec::new();
        for (chunk, _) in span.parts.iter().skip(first).take(most) {
            let mut file = -1;
            let status = self.call(Call::Export, |f| {
                // SAFETY: a chunk that the pool holds, made to be exported; room for a descriptor.
                unsafe { (f.cuMemExportToShareableHandle)((&raw mut file).cast(), *chunk, FILE, 0) }
            });
            if status != 0 {
                return Some((span, Export::Failed(status)));
            }
            // SAFETY: the driver made the descriptor for the caller.
            files.push(unsafe { OwnedFd::from_raw_fd(file) });
        }
        Some((span, Export::Chunks(files)))
    }

    /// The device's UUID, the same in every process.
    pub(crate) fn uuid(&self) -> [u8; 16] {
        self.properties.uuid
    }

    /// Reserves `bytes` of address space for memory of another process.
    pub(crate) fn reserve_imported(&self, bytes: u64) -> Result<u64, IpcError> {
        let mut address = 0;
        let status = self.call(Call::Reserve, |f| {
            // SAFETY: `address` outlives the call.
            unsafe { (f.cuMemAddressReserve)(&mut address, bytes as usize, 0, 0, 0) }
        });
        self.check_status("cuMemAddressReserve", status)
            .map(|()| address)
    }

    /// Maps a chunk of another process, by its file descriptor, at reserved addresses. No device has access
    /// yet.
    pub(crate) fn map_imported(
        &self,
        address: u64,
        size: u64,
        file: &OwnedFd,
    ) -> Result<(), IpcError> {
        let mut chunk = 0;
        let status = self.call(Call::Import, |f| {
            // SAFETY: `chunk` outlives the call; a descriptor goes by its number.
            unsafe {
                let file = file.as_raw_fd() as usize as *mut c_void;
                (f.cuMemImportFromShareableHandle)(&mut chunk, file, FILE)
            }
        });
        self.check_status("cuMemImportFromShareableHandle", status)?;
        let status = self.call(Call::Map, |f| {
            // SAFETY: the caller's addresses, where nothing is mapped, and a chunk of that size.
            unsafe { (f.cuMemMap)(address, size as usize, 0, chunk, 0) }
        });
        // The mapping keeps the memory.
        self.state.lock().pool.gpu_mut().release_imported(chunk);
        self.check_status("cuMemMap", status)
    }

    /// Gives this device access to what was mapped. If the memory is its own (`home` is its UUID), also every
    /// device that can reach it.
    pub(crate) fn grant_imported(
        &self,
        address: u64,
        bytes: u64,
        home: [u8; 16],
    ) -> Result<(), IpcError> {
        let set = |devices: &[CUdevice]| {
            let access = access_of(devices);
            self.call(Call::SetAccess, |f| {
                // SAFETY: mappings that make up this range; `access` outlives the call.
                unsafe {
                    (f.cuMemSetAccess)(address, bytes as usize, access.as_ptr(), access.len())
                }
            })
        };
        let own = [self.properties.device];
        let all = &self.properties.reachable_by;
        let status = match home == self.properties.uuid && all.len() > 1 {
            true => match set(all) {
                0 => 0,
                // Some systems refuse access by other devices.
                _ => set(&own),
            },
            false => set(&own),
        };
        self.check_status("cuMemSetAccess", status)
    }

    /// Unmaps the first `mapped` of `bytes` reserved at `address`, and frees the addresses. Nothing uses them
    /// any more.
    pub(crate) fn unmap_imported(&self, address: u64, mapped: u64, bytes: u64) {
        let mut state = self.state.lock();
        state.pool.gpu_mut().unmap_imported(address, mapped, bytes);
    }

    /// Opens a plain segment of another process; its address here.
    pub(crate) fn open_segment(&self, handle: &SegmentHandle) -> Result<u64, IpcError> {
        // SAFETY: both are 64 bytes, and any bytes make a handle.
        let handle = unsafe { std::mem::transmute::<SegmentHandle, CUipcMemHandle>(*handle) };
        let mut address = 0;
        // Forbidden during a capture unless the thread is in relaxed mode: the call is no part of the
        // capture.
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let status = self.call(Call::OpenShared, |f| {
            // SAFETY: `address` and `mode` outlive the calls; the second exchange undoes the first.
            unsafe {
                (f.cuThreadExchangeStreamCaptureMode)(&mut mode);
                let status = (f.cuIpcOpenMemHandle_v2)(&mut address, handle, LAZY_PEER_ACCESS);
                (f.cuThreadExchangeStreamCaptureMode)(&mut mode);
                status
            }
        });
        self.check_status("cuIpcOpenMemHandle", status)
            .map(|()| address)
    }

    /// Closes a segment that was opened here; to be called once for each [`Device::open_segment`].
    pub(crate) fn close_segment(&self, address: u64) {
        self.state.lock().pool.gpu_mut().close_segment(address);
    }

    /// Whether the device may be waited for: not in a capture.
    pub(crate) fn may_wait(&self) -> bool {
        self.state.lock().pool.gpu().may_wait()
    }

    /// Makes a counted call in the device's context.
    fn call(&self, call: Call, body: impl FnOnce(&crate::driver::Functions) -> u32) -> u32 {
        let _current = current(&self.functions, self.properties.context);
        self.ledger.call(call, || body(&self.functions))
    }

    fn check_status(&self, call: &str, status: u32) -> Result<(), IpcError> {
        match status {
            0 => Ok(()),
            status => Err(self.failure(call, status)),
        }
    }

    fn failure(&self, call: &str, status: u32) -> IpcError {
        let error = self.functions.error_name(status);
        IpcError::Forbidden(format!("{call} failed: {error}"))
    }
}
