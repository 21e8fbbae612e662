//! Memory shared with other processes: a chunk's bytes move into a file of their own, which the other process
//! opens and maps.

use super::chunk::Chunk;
use super::mapping::Mapping;
use super::{AllocationKind, DriverResult, INVALID, Kind, Memory, Region};
use crate::page::{self, PAGE};
use cudarc::driver::sys::CUresult;
use std::os::fd::RawFd;

/// What tells an allocation of another process from any other: its process, and its id there.
pub(crate) type Origin = (u32, u64);

/// An allocation of another process that is open here.
#[derive(Debug)]
pub(crate) struct Opened {
    pub address: u64,
    /// How often it was opened and not closed.
    pub count: u32,
}

impl Memory {
    /// The file that holds a chunk's bytes, from now on if they were elsewhere.
    pub fn share(&mut self, index: u32) -> DriverResult<RawFd> {
        if self.host_pointers {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let chunk = self.chunks.get_mut(index).ok_or(INVALID)?;
        if let Some(file) = &chunk.file {
            return Ok(file.number());
        }
        let system = CUresult::CUDA_ERROR_OPERATING_SYSTEM;
        let pages = chunk.size.next_multiple_of(PAGE);
        let mut file = page::File::new().ok_or(system)?;
        file.extend(pages).ok_or(system)?;
        let backing = file.memory(pages).ok_or(system)?;
        if chunk.backing != 0 {
            // SAFETY: two mappings of that size, the one the chunk's own and the other fresh; the
            // machine's lock is held, so no work runs.
            unsafe {
                let (from, to) = (chunk.backing as *const u8, backing as *mut u8);
                std::ptr::copy_nonoverlapping(from, to, pages as usize);
                page::unmap(chunk.backing, pages);
            }
        }
        chunk.backing = backing;
        let number = file.number();
        chunk.file = Some(file);
        Ok(number)
    }

    /// A chunk made of another process's bytes; that process's memory counts them.
    fn foreign(&mut self, device: usize, file: page::File) -> DriverResult<Chunk> {
        let size = file.size();
        let backing = file.memory(size);
        let mut chunk = Chunk::new(device, size, None);
        chunk.backing = backing.ok_or(CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
        (chunk.file, chunk.foreign) = (Some(file), true);
        Ok(chunk)
    }

    /// Takes in a chunk of another process; answers with its handle here.
    pub fn import(&mut self, device: usize, file: page::File) -> DriverResult<u64> {
        let chunk = self.foreign(device, file)?;
        if !chunk.size.is_multiple_of(self.granularity) {
            return Err(INVALID);
        }
        self.handles += 1;
        let chunk = self.chunks.insert(chunk);
        Ok(self.chunks.handle(chunk))
    }

    /// Opens an allocation of another process; once more if it is open.
    pub fn open_foreign(
        &mut self,
        origin: Origin,
        (device, size): (usize, u64),
        file: impl FnOnce() -> Option<page::File>,
    ) -> DriverResult<u64> {
        if let Some(opened) = self.opened.get_mut(&origin) {
            opened.count += 1;
            return Ok(opened.address);
        }
        let mut chunk = self.foreign(device, file().ok_or(INVALID)?)?;
        let pages = chunk.size;
        if size == 0 || size.next_multiple_of(PAGE) != pages {
            return Err(INVALID);
        }
        let address = page::reserve(pages, PAGE, 0).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        (chunk.released, chunk.mappings, chunk.size) = (true, 1, size);
        let chunk = self.chunks.insert(chunk);
        let mut mapping = Mapping::new(address, size, chunk);
        (mapping.readable, mapping.writable) = (u64::MAX, u64::MAX);
        let kind = Kind::Plain {
            mapping: self.mappings.insert(mapping),
            make: AllocationKind::Opened,
            freeing: false,
        };
        self.regions.insert(address, Region { size: pages, kind });
        self.opened.insert(origin, Opened { address, count: 1 });
        Ok(address)
    }

    /// Closes an allocation of another process, by its address here.
    pub fn close_foreign(&mut self, address: u64) -> DriverResult<()> {
        let found = self.opened.iter_mut().find(|(_, it)| it.address == address);
        let (&origin, opened) = found.ok_or(INVALID)?;
        opened.count -= 1;
        if opened.count == 0 {
            self.opened.remove(&origin);
            self.free(address)?;
        }
        Ok(())
    }

    /// Another hold on a chunk: its handle has to be released once more.
    pub fn retain(&mut self, index: u32) -> DriverResult<u64> {
        let chunk = self.chunks.get_mut(index).ok_or(INVALID)?;
        if std::mem::take(&mut chunk.released) {
            self.handles += 1;
        } else {
            chunk.holds += 1;
        }
        Ok(self.chunks.handle(index))
    }
}
