//! Physical and virtual memory: chunks, reservations, mappings, and the driver's own allocations.
//!
//! Nothing here knows streams or order; the answers are the driver's. Creating, mapping and opening
//! a chunk cost constant time and no system call (with host pointers off), however much is mapped:
//! a reservation keeps a dense table of its granules.

use crate::config::Config;
use crate::interval::Intervals;
use crate::page::{self, PAGE};
use crate::shadow::{GRANULE, Shadow, Touch};
use crate::slab::Slab;
use cudarc::driver::sys::CUresult;
use std::collections::BTreeMap;

/// Physical memory: lives until its handle is released and every mapping of it is gone.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub device: usize,
    size: u64,
    /// Where host code finds the bytes: 0 before the first touch, unused for stretches of a file.
    backing: u64,
    /// Where the bytes are in the device's file, with host pointers on.
    stretch: Option<u64>,
    released: bool,
    mappings: u32,
    pub shadow: Shadow,
    /// Who owns which bytes, as the test harness claimed them.
    pub owners: Intervals<u64>,
}

/// A chunk at an address.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub address: u64,
    pub size: u64,
    pub chunk: u32,
    /// Devices that may read and write it, a bit each.
    readable: u64,
    writable: u64,
    /// The last access through this mapping of each stream slot.
    pub uses: Vec<Touch>,
    /// Claims made through this mapping that are not disowned yet.
    pub claims: u32,
}

#[derive(Debug)]
struct Region {
    size: u64,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// From `cuMemAddressReserve`: for each granule the mapping there plus one, or zero.
    Reserved { granules: Vec<u32>, mapped: usize },
    /// From `cuMemAlloc_v2`, on the current context's device.
    Plain { mapping: u32 },
}

#[derive(Debug)]
struct Bank {
    used: u64,
    file: Option<page::File>,
}

/// A stretch of an access that lies within one mapping.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub mapping: u32,
    pub chunk: u32,
    /// Where the piece starts within the chunk.
    pub offset: u64,
    pub address: u64,
    pub length: u64,
}

/// A stretch of an access as host code reaches it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub host: usize,
    pub length: usize,
}

/// All memory of a machine.
#[derive(Debug)]
pub(crate) struct Memory {
    capacity: u64,
    granularity: u64,
    host_pointers: bool,
    peers: bool,
    banks: Vec<Bank>,
    regions: BTreeMap<u64, Region>,
    chunks: Slab<Chunk>,
    mappings: Slab<Mapping>,
    mapped: usize,
    handles: usize,
    reserved: u64,
}

type Answer<T> = Result<T, CUresult>;
const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

impl Memory {
    pub fn new(config: &Config) -> Memory {
        Memory {
            capacity: config.memory,
            granularity: config.granularity,
            host_pointers: config.host_pointers,
            peers: config.peers,
            banks: (0..config.devices)
                .map(|_| Bank {
                    used: 0,
                    file: None,
                })
                .collect(),
            regions: BTreeMap::new(),
            chunks: Slab::default(),
            mappings: Slab::default(),
            mapped: 0,
            handles: 0,
            reserved: 0,
        }
    }

    // Physical memory.

    /// Creates a chunk and answers with its handle.
    pub fn create(&mut self, device: usize, size: u64) -> Answer<u64> {
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
        bank.used += size;
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
            bank.used -= chunk.size;
            if let (Some(file), Some(offset)) = (&bank.file, chunk.stretch) {
                file.punch(offset, chunk.size);
            }
            if chunk.backing != 0 && !self.host_pointers {
                // SAFETY: the chunk's own backing; nothing maps it and executing work never keeps
                // its address.
                unsafe { page::give_back(chunk.backing, chunk.size.next_multiple_of(PAGE)) };
            }
        }
    }

    // Address space.

    /// Reserves addresses; `alignment` 0 means the granularity.
    pub fn reserve(&mut self, size: u64, alignment: u64, wanted: u64) -> Answer<u64> {
        let alignment = alignment.max(self.granularity).max(PAGE);
        if size == 0 || !size.is_multiple_of(self.granularity) || !alignment.is_power_of_two() {
            return Err(INVALID);
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
    pub fn unreserve(&mut self, address: u64, size: u64) -> Answer<()> {
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
        unsafe { page::give_back(address, size) };
        Ok(())
    }

    /// Maps a whole chunk at a free place within one reservation.
    pub fn map(&mut self, address: u64, size: u64, offset: u64, chunk: u32) -> Answer<()> {
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
                unsafe { file.show(address, size, offset) }
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
    pub fn whole_mappings(&self, address: u64, size: u64) -> Answer<Vec<u32>> {
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
    pub fn open(&mut self, mappings: &[u32], device: usize, read: bool, write: bool) -> Answer<()> {
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
            unsafe { page::hide(mapping.address, mapping.size) };
        }
        self.unhold(mapping.chunk);
    }

    /// One mapping less of a chunk.
    fn unhold(&mut self, chunk: u32) {
        if let Some(held) = self.chunks.get_mut(chunk) {
            held.mappings -= 1;
            self.drop_chunk_if_unused(chunk);
        }
    }

    // The driver's own allocations.

    /// Allocates as `cuMemAlloc_v2` does: memory of a device, open to it, at a 512-byte aligned
    /// address.
    pub fn allocate(&mut self, device: usize, bytes: u64) -> Answer<u64> {
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
        let address = if self.host_pointers {
            page::memory(pages)
        } else {
            page::reserve(pages, PAGE, 0)
        };
        let address = address.ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        bank.used += size;
        let mut chunk = Chunk::new(device, size, None);
        chunk.released = true;
        chunk.mappings = 1;
        if self.host_pointers {
            chunk.backing = address;
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
                kind: Kind::Plain { mapping },
            },
        );
        Ok(address)
    }

    /// The mapping and the device of an allocation that starts here.
    pub fn allocation(&self, address: u64) -> Option<(u32, usize)> {
        match self.regions.get(&address)?.kind {
            Kind::Plain { mapping } => {
                let chunk = self.mappings.get(mapping)?.chunk;
                Some((mapping, self.chunks.get(chunk)?.device))
            }
            Kind::Reserved { .. } => None,
        }
    }

    /// Frees an allocation that starts here.
    pub fn free(&mut self, address: u64) -> Answer<()> {
        let (mapping, _) = self.allocation(address).ok_or(INVALID)?;
        let region = self.regions.remove(&address).ok_or(INVALID)?;
        if let Some(mapping) = self.mappings.remove(mapping) {
            self.unhold(mapping.chunk);
        }
        // SAFETY: the range came from `allocate`; the program gave it up.
        unsafe { page::give_back(address, region.size) };
        Ok(())
    }

    /// Every allocation on a device; for the end of a context.
    pub fn allocations(&self, device: usize) -> Vec<u64> {
        let here = |address: &u64| {
            self.allocation(*address)
                .is_some_and(|(_, on)| on == device)
        };
        self.regions.keys().copied().filter(here).collect()
    }

    // Look-up.

    /// The mapped part, if any, of a range that starts at its first byte.
    pub fn piece(&self, address: u64, length: u64) -> Option<Piece> {
        let (base, region) = self.regions.range(..=address).next_back()?;
        let from = address - base;
        if from >= region.size {
            return None;
        }
        let index = match &region.kind {
            Kind::Reserved { granules, .. } => {
                granules[(from / self.granularity) as usize].checked_sub(1)?
            }
            Kind::Plain { mapping } => *mapping,
        };
        let mapping = self.mappings.get(index)?;
        let offset = address - mapping.address;
        let length = length.min(mapping.size.checked_sub(offset)?);
        (length > 0).then_some(Piece {
            mapping: index,
            chunk: mapping.chunk,
            offset,
            address,
            length,
        })
    }

    /// The pieces of a range in order, up to its first unmapped byte.
    pub fn pieces(&self, address: u64, length: u64) -> impl Iterator<Item = Piece> {
        let (mut address, mut left) = (address, length);
        std::iter::from_fn(move || {
            let piece = self.piece(address, left)?;
            address += piece.length;
            left -= piece.length;
            Some(piece)
        })
    }

    /// Where a device reaches a range, or the first address where it can't. What was never touched
    /// gets its backing now.
    pub fn reach(
        &mut self,
        device: usize,
        address: u64,
        length: u64,
        writes: bool,
    ) -> Result<Vec<Span>, u64> {
        let mut spans = Vec::with_capacity(1);
        let (mut reached, end) = (address, address.saturating_add(length));
        while reached < end {
            let piece = self.piece(reached, end - reached).ok_or(reached)?;
            let mapping = self.mappings.get(piece.mapping).ok_or(reached)?;
            let open = if writes {
                mapping.writable
            } else {
                mapping.readable
            };
            if open & 1 << device == 0 {
                return Err(reached);
            }
            let host = if self.host_pointers {
                reached
            } else {
                let chunk = self.chunks.get_mut(piece.chunk).ok_or(reached)?;
                if chunk.backing == 0 {
                    let pages = chunk.size.next_multiple_of(PAGE);
                    chunk.backing = page::memory(pages).ok_or(reached)?;
                }
                chunk.backing + piece.offset
            };
            spans.push(Span {
                host: host as usize,
                length: piece.length as usize,
            });
            reached += piece.length;
        }
        Ok(spans)
    }

    pub fn chunk_mut(&mut self, index: u32) -> Option<&mut Chunk> {
        self.chunks.get_mut(index)
    }

    pub fn mapping(&self, index: u32) -> Option<&Mapping> {
        self.mappings.get(index)
    }

    pub fn mapping_mut(&mut self, index: u32) -> Option<&mut Mapping> {
        self.mappings.get_mut(index)
    }

    // Figures.

    pub fn used(&self, device: usize) -> u64 {
        self.banks.get(device).map_or(0, |bank| bank.used)
    }

    pub fn mapped(&self) -> usize {
        self.mapped
    }

    pub fn handles(&self) -> usize {
        self.handles
    }

    pub fn reserved(&self) -> u64 {
        self.reserved
    }
}

impl Drop for Memory {
    /// Gives every address and all backing back to the process.
    fn drop(&mut self) {
        for (&address, region) in &self.regions {
            // SAFETY: our own ranges, and with the machine gone nothing can translate into them.
            unsafe { page::give_back(address, region.size) };
        }
        if !self.host_pointers {
            for (_, chunk) in self.chunks.iter() {
                if chunk.backing != 0 {
                    // SAFETY: as above.
                    unsafe { page::give_back(chunk.backing, chunk.size.next_multiple_of(PAGE)) };
                }
            }
        }
    }
}

impl Chunk {
    fn new(device: usize, size: u64, stretch: Option<u64>) -> Chunk {
        Chunk {
            device,
            size,
            backing: 0,
            stretch,
            released: false,
            mappings: 0,
            shadow: Shadow::default(),
            owners: Intervals::default(),
        }
    }
}

impl Mapping {
    fn new(address: u64, size: u64, chunk: u32) -> Mapping {
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
