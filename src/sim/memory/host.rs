//! Page-locked host memory: allocated by the driver, or registered by programs.

use super::{DriverResult, INVALID, Memory};
use crate::page::{self, PAGE};
use cudarc::driver::sys::CUresult;

/// A range of host memory that devices may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Locked {
    pub size: u64,
    /// The device whose context it was made in.
    pub device: usize,
    /// As `cuMemHostAlloc` or `cuMemHostRegister` took them.
    pub flags: u32,
    /// Registered: the program's own memory.
    pub registered: bool,
}

impl Memory {
    /// Page-locked host memory, zeroed.
    pub fn allocate_locked(&mut self, bytes: u64, device: usize, flags: u32) -> DriverResult<u64> {
        if bytes == 0 {
            return Err(INVALID);
        }
        let pages = bytes
            .checked_next_multiple_of(PAGE)
            .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let address = page::memory(pages).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let locked = Locked {
            size: bytes,
            device,
            flags,
            registered: false,
        };
        self.locked.insert(address, locked);
        Ok(address)
    }

    /// Registers memory of the program's own.
    pub fn lock(
        &mut self,
        address: u64,
        bytes: u64,
        device: usize,
        flags: u32,
    ) -> DriverResult<()> {
        let end = address.checked_add(bytes).ok_or(INVALID)?;
        if address == 0 || bytes == 0 || self.is_device(address) {
            return Err(INVALID);
        }
        let last = self.locked.range(..end).next_back();
        if last.is_some_and(|(start, locked)| start + locked.size > address) {
            return Err(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        let locked = Locked {
            size: bytes,
            device,
            flags,
            registered: true,
        };
        self.locked.insert(address, locked);
        Ok(())
    }

    /// Ends page-locked memory (`registered` false) or a registration, by its first address.
    pub fn unlock(&mut self, address: u64, registered: bool) -> DriverResult<()> {
        match self.locked.get(&address) {
            Some(locked) if locked.registered == registered => {}
            _ if registered => return Err(CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
            _ => return Err(INVALID),
        }
        if let Some(locked) = self.locked.remove(&address)
            && !locked.registered
        {
            // SAFETY: the range came from `allocate_locked`; the program gave it up.
            unsafe { page::unmap(address, locked.size.next_multiple_of(PAGE)) };
        }
        Ok(())
    }

    /// The driver's own page-locked memory that was made on a device; for the end of a context.
    pub fn locked_allocations(&self, device: usize) -> Vec<u64> {
        let mine = |locked: &Locked| locked.device == device && !locked.registered;
        let all = self.locked.iter();
        all.filter_map(|(address, locked)| mine(locked).then_some(*address))
            .collect()
    }

    /// The locked range that an address lies in, and where it starts.
    pub fn locked_at(&self, address: u64) -> Option<(u64, Locked)> {
        let (start, locked) = self.locked.range(..=address).next_back()?;
        (address - start < locked.size).then_some((*start, *locked))
    }
}
