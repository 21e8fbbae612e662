//! Address space: reservations, and chunks mapped into them.

use super::{DriverResult, INVALID, Kind, Memory, Region};
use crate::page::{self, PAGE};
use crate::shadow::Touch;
use cudarc::driver::sys::CUresult;

/// A chunk at an address.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub address: u64,
    pub size: u64,
    pub chunk: u32,
    /// Devices that may read and write it, a bit each.
    pub(super) readable: u64,
    pub(super) writable: u64,
    /// The last access through this mapping of each stream slot.
    pub uses: Vec<Touch>,
    /// Claims made through this mapping that are not disowned yet.
    pub claims: u32,
}

impl Mapping {
    /// A mapping closed to all devices.
    pub(super) fn new(address: u64, size: u64, chunk: u32) -> Mapping {
        Mapping {
            address,
            size,
            chunk,
            readable: 0,
            writable: 0,
            uses: Vec::new(),
            claims: 0,
        }
    }

    /// Notes an access through this mapping.
    pub fn touch(&mut self, touch: Touch) {
        match self.uses.iter_mut().find(|last| last.slot == touch.slot) {
            Some(last) => last.sequence = touch.sequence,
            None => self.uses.push(touch),
        }
    }
}

impl Memory {
    /// Reserves addresses; `alignment` 0 means the granularity.
    pub fn reserve(&mut self, size: u64, alignment: u64, wanted: u64) -> DriverResult<u64> {
        let alignment = alignment.max(self.granularity).max(PAGE);
        if size == 0 || !size.is_multiple_of(self.granularity) || !alignment.is_power_of_two() {
            return Err(INVALID);
        }
        if size > self.addresses - self.reserved {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let address =
            page::reserve(size, alignment, wanted).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        // Zeroed by the system: the table of a large reservation is not touched until it is used.
        let granules = vec![0; (size / self.granularity) as usize];
        self.regions.insert(
            address,
            Region {
                size,
                kind: Kind::Reserved {
                    granules,
                    mapped: 0,
                },
            },
        );
        self.reserved += size;
        Ok(address)
    }

    /// Ends a whole reservation that has nothing mapped.
    pub fn unreserve(&mut self, address: u64, size: u64) -> DriverResult<()> {
        match self.regions.get(&address) {
            Some(Region {
                size: whole,
                kind: Kind::Reserved { mapped: 0, .. },
            }) if *whole == size => {}
            _ => return Err(INVALID),
        }
        self.regions.remove(&address);
        self.reserved -= size;
        // SAFETY: the range came from `reserve` and nothing is mapped in it.
        unsafe { page::unmap(address, size) };
        Ok(())
    }

    /// Maps a whole chunk at a free place within one reservation.
    pub fn map(&mut self, address: u64, size: u64, offset: u64, chunk: u32) -> DriverResult<()> {
        let granularity = self.granularity;
        let mapped = self.chunks.get_mut(chunk).ok_or(INVALID)?;
        if offset != 0 || size != mapped.size || !address.is_multiple_of(granularity) {
            return Err(INVALID);
        }
        let (base, region) = self
            .regions
            .range_mut(..=address)
            .next_back()
            .ok_or(INVALID)?;
        let from = address - base;
        let Kind::Reserved {
            granules,
            mapped: count,
        } = &mut region.kind
        else {
            return Err(INVALID);
        };
        if from >= region.size || size > region.size - from {
            return Err(INVALID);
        }
        let slots = (from / granularity) as usize..((from + size) / granularity) as usize;
        if granules[slots.clone()].iter().any(|granule| *granule != 0) {
            return Err(INVALID);
        }
        if let Some(offset) = mapped.stretch {
            let shown = self.banks[mapped.device].file.as_ref().is_some_and(|file| {
                // SAFETY: the range lies in our reservation, which has nothing there.
                unsafe { file.map_at(address, size, offset) }
            });
            if !shown {
                return Err(CUresult::CUDA_ERROR_MAP_FAILED);
            }
        }
        mapped.mappings += 1;
        let mapping = self.mappings.insert(Mapping::new(address, size, chunk));
        granules[slots].fill(mapping + 1);
        *count += 1;
        self.mapped += 1;
        Ok(())
    }

    /// The mappings that make up exactly this range of one reservation.
    pub fn whole_mappings(&self, address: u64, size: u64) -> DriverResult<Vec<u32>> {
        let (base, region) = self.regions.range(..=address).next_back().ok_or(INVALID)?;
        let Kind::Reserved { granules, .. } = &region.kind else {
            return Err(INVALID);
        };
        let from = address - base;
        if size == 0 || from >= region.size || size > region.size - from {
            return Err(INVALID);
        }
        let (mut reached, end) = (address, address + size);
        let mut found = Vec::with_capacity(1);
        while reached < end {
            let granule = granules[((reached - base) / self.granularity) as usize];
            let index = granule.checked_sub(1).ok_or(INVALID)?;
            let mapping = self.mappings.get(index).ok_or(INVALID)?;
            if mapping.address != reached {
                return Err(INVALID);
            }
            found.push(index);
            reached += mapping.size;
        }
        if reached == end {
            Ok(found)
        } else {
            Err(INVALID)
        }
    }

    /// Opens or closes mappings to a device.
    pub fn open(
        &mut self,
        mappings: &[u32],
        device: usize,
        read: bool,
        write: bool,
    ) -> DriverResult<()> {
        let bit = 1 << device;
        for &index in mappings {
            let Some(mapping) = self.mappings.get(index) else {
                continue;
            };
            let home = self
                .chunks
                .get(mapping.chunk)
                .map_or(device, |chunk| chunk.device);
            if home != device && !self.peers {
                return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
            }
        }
        for &index in mappings {
            let Some(mapping) = self.mappings.get_mut(index) else {
                continue;
            };
            mapping.readable = if read {
                mapping.readable | bit
            } else {
                mapping.readable & !bit
            };
            mapping.writable = if write {
                mapping.writable | bit
            } else {
                mapping.writable & !bit
            };
            if self.host_pointers {
                let (read, write) = (mapping.readable != 0, mapping.writable != 0);
                // SAFETY: the mapping lies in our reservation.
                let open = unsafe { page::protect(mapping.address, mapping.size, read, write) };
                if !open {
                    return Err(CUresult::CUDA_ERROR_OPERATING_SYSTEM);
                }
            }
        }
        Ok(())
    }

    /// Takes a mapping away.
    pub fn unmap(&mut self, index: u32) {
        let Some(mapping) = self.mappings.remove(index) else {
            return;
        };
        let granularity = self.granularity;
        if let Some((base, region)) = self.regions.range_mut(..=mapping.address).next_back()
            && let Kind::Reserved { granules, mapped } = &mut region.kind
        {
            let from = ((mapping.address - base) / granularity) as usize;
            granules[from..from + (mapping.size / granularity) as usize].fill(0);
            *mapped -= 1;
            self.mapped -= 1;
        }
        if self.host_pointers {
            // SAFETY: the mapping lay in our reservation; the program gave it up.
            unsafe { page::clear(mapping.address, mapping.size) };
        }
        self.drop_mapping(mapping.chunk);
    }
}
