//! Chunks: physical memory, held by a handle and by mappings.

use super::{DriverResult, INVALID, Memory};
use crate::interval::Intervals;
use crate::page::{self, PAGE};
use crate::shadow::Shadow;
use cudarc::driver::sys::CUresult;

/// Physical memory: lives until its handle is released and every mapping of it is gone.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub device: usize,
    pub(super) size: u64,
    /// Where host code finds the bytes: 0 before the first touch, unused for stretches of a file.
    pub(super) backing: u64,
    /// The backing is the allocation's own address range, and goes with it.
    pub(super) in_place: bool,
    /// Where the bytes are, once another process may see them.
    pub(super) file: Option<page::File>,
    /// The bytes are another process's, which counts them.
    pub(super) foreign: bool,
    /// Created so that another process may see it.
    pub exportable: bool,
    /// Created so that network cards may reach it.
    pub rdma: bool,
    /// Holds on the handle beyond the first.
    pub(super) holds: u32,
    /// Where the bytes are in the device's file, with host pointers on.
    pub(super) stretch: Option<u64>,
    pub(super) released: bool,
    pub(super) mappings: u32,
    pub shadow: Shadow,
    /// Who owns which bytes, as the test harness claimed them.
    pub owners: Intervals<u64>,
}

impl Chunk {
    pub(super) fn new(device: usize, size: u64, stretch: Option<u64>) -> Chunk {
        Chunk {
            device,
            size,
            backing: 0,
            in_place: false,
            file: None,
            foreign: false,
            exportable: false,
            rdma: false,
            holds: 0,
            stretch,
            released: false,
            mappings: 0,
            shadow: Shadow::default(),
            owners: Intervals::default(),
        }
    }
}

impl Memory {
    /// Creates a chunk and answers with its handle.
    pub fn create(&mut self, device: usize, size: u64) -> DriverResult<u64> {
        if size == 0 || !size.is_multiple_of(self.granularity) {
            return Err(INVALID);
        }
        let bank = self
            .banks
            .get_mut(device)
            .ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)?;
        if size > self.capacity - bank.used {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let mut stretch = None;
        if self.host_pointers {
            if bank.file.is_none() {
                bank.file = page::File::new();
            }
            let file = bank
                .file
                .as_mut()
                .ok_or(CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
            stretch = Some(
                file.extend(size)
                    .ok_or(CUresult::CUDA_ERROR_OPERATING_SYSTEM)?,
            );
        }
        bank.take(size);
        self.handles += 1;
        let chunk = self.chunks.insert(Chunk::new(device, size, stretch));
        Ok(self.chunks.handle(chunk))
    }

    /// The chunk of a handle that is not released.
    pub fn chunk_of(&self, handle: u64) -> Option<u32> {
        let chunk = self.chunks.index(handle)?;
        (!self.chunks.get(chunk)?.released).then_some(chunk)
    }

    /// Ends a chunk's handle.
    pub fn release(&mut self, chunk: u32) {
        if let Some(released) = self.chunks.get_mut(chunk) {
            if released.holds > 0 {
                released.holds -= 1;
                return;
            }
            released.released = true;
            self.handles -= 1;
            self.drop_chunk_if_unused(chunk);
        }
    }

    fn drop_chunk_if_unused(&mut self, index: u32) {
        let unused = |chunk: &Chunk| chunk.released && chunk.mappings == 0;
        if !self.chunks.get(index).is_some_and(unused) {
            return;
        }
        if let Some(chunk) = self.chunks.remove(index) {
            let bank = &mut self.banks[chunk.device];
            if !chunk.foreign {
                bank.used -= chunk.size;
            }
            if let (Some(file), Some(offset)) = (&bank.file, chunk.stretch) {
                file.discard(offset, chunk.size);
            }
            if chunk.backing != 0 && !chunk.in_place {
                // SAFETY: the chunk's own backing; nothing maps it and executing work never keeps
                // its address.
                unsafe { page::unmap(chunk.backing, chunk.size.next_multiple_of(PAGE)) };
            }
        }
    }

    /// One mapping less of a chunk.
    pub(super) fn drop_mapping(&mut self, chunk: u32) {
        if let Some(held) = self.chunks.get_mut(chunk) {
            held.mappings -= 1;
            self.drop_chunk_if_unused(chunk);
        }
    }
}
