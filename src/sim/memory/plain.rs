//! The driver's own allocations: a chunk, a range of addresses and a mapping in one.

use super::chunk::Chunk;
use super::mapping::Mapping;
use super::{AllocationKind, DriverResult, INVALID, Kind, Memory, Pool, Region};
use crate::page::{self, PAGE};
use crate::shadow::GRANULE;
use crate::slab::Slab;
use cudarc::driver::sys::CUresult;

impl Memory {
    /// Allocates as `cuMemAlloc_v2` does: memory of a device, open to it, at a 512-byte aligned
    /// address.
    pub fn allocate(
        &mut self,
        device: usize,
        bytes: u64,
        make: AllocationKind,
    ) -> DriverResult<u64> {
        let size = bytes
            .checked_next_multiple_of(GRANULE)
            .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        if size == 0 {
            return Err(INVALID);
        }
        let bank = self
            .banks
            .get_mut(device)
            .ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)?;
        if size > self.capacity - bank.used {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let pages = size.next_multiple_of(PAGE);
        let in_place = self.host_pointers || make == AllocationKind::Managed;
        let address = if in_place {
            page::memory(pages)
        } else {
            page::reserve(pages, PAGE, 0)
        };
        let address = address.ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        bank.take(size);
        if let AllocationKind::Pooled(pool) = make
            && let Some(pool) = self.pools.get_mut(pool)
        {
            pool.take(size);
        }
        let mut chunk = Chunk::new(device, size, None);
        chunk.released = true;
        chunk.mappings = 1;
        if in_place {
            (chunk.backing, chunk.in_place) = (address, true);
        }
        let chunk = self.chunks.insert(chunk);
        let mut mapping = Mapping::new(address, size, chunk);
        // Every device: the driver stages what a device can't reach by itself.
        (mapping.readable, mapping.writable) = (u64::MAX, u64::MAX);
        let mapping = self.mappings.insert(mapping);
        self.regions.insert(
            address,
            Region {
                size: pages,
                kind: Kind::Plain {
                    mapping,
                    make,
                    freeing: false,
                },
            },
        );
        Ok(address)
    }

    /// The mapping and the device of an allocation that starts here.
    pub fn allocation(&self, address: u64) -> Option<(u32, usize)> {
        match self.regions.get(&address)?.kind {
            Kind::Plain { freeing: true, .. } | Kind::Reserved { .. } => None,
            Kind::Plain { mapping, .. } => {
                let chunk = self.mappings.get(mapping)?.chunk;
                Some((mapping, self.chunks.get(chunk)?.device))
            }
        }
    }

    /// Says that an allocation of a pool, which starts here, will be freed: it is not in use any more,
    /// and can't be freed again. Answers with its size.
    pub fn begin_free(&mut self, address: u64) -> DriverResult<u64> {
        let region = self.regions.get_mut(&address).ok_or(INVALID)?;
        match &mut region.kind {
            Kind::Plain {
                mapping,
                make: AllocationKind::Pooled(pool),
                freeing,
            } if !*freeing => {
                *freeing = true;
                let bytes = self.mappings.get(*mapping).ok_or(INVALID)?.size;
                if let Some(pool) = self.pools.get_mut(*pool) {
                    pool.give_back(bytes);
                }
                Ok(bytes)
            }
            _ => Err(INVALID),
        }
    }

    /// Frees an allocation that starts here.
    pub fn free(&mut self, address: u64) -> DriverResult<()> {
        let region = self.regions.get(&address).ok_or(INVALID)?;
        let Kind::Plain {
            mapping,
            make,
            freeing,
        } = region.kind
        else {
            return Err(INVALID);
        };
        let region = self.regions.remove(&address).ok_or(INVALID)?;
        if let Some(mapping) = self.mappings.remove(mapping) {
            self.drop_mapping(mapping.chunk);
            if let AllocationKind::Pooled(index) = make
                && let Some(pool) = self.pools.get_mut(index)
            {
                if !freeing {
                    pool.give_back(mapping.size);
                }
                if pool.closed && pool.used == 0 {
                    self.pools.remove(index);
                }
            }
        }
        // SAFETY: the range came from `allocate`; the program gave it up.
        unsafe { page::unmap(address, region.size) };
        Ok(())
    }

    pub fn pools(&self) -> &Slab<Pool> {
        &self.pools
    }

    pub fn pools_mut(&mut self) -> &mut Slab<Pool> {
        &mut self.pools
    }

    /// Every allocation on a device; for the end of a context.
    pub fn allocations(&self, device: usize) -> Vec<u64> {
        let here = |(address, region): (&u64, &Region)| {
            let Kind::Plain { mapping, .. } = region.kind else {
                return None;
            };
            let chunk = self.mappings.get(mapping)?.chunk;
            (self.chunks.get(chunk)?.device == device).then_some(*address)
        };
        self.regions.iter().filter_map(here).collect()
    }
}
