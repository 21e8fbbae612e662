//! Physical and virtual memory: chunks, reservations, mappings, and the driver's own allocations.
//!
//! Nothing here depends on streams or order; statuses are those of the driver. Creating, mapping and opening
//! a chunk take constant time and no system call (with host pointers off), however much is mapped: a
//! reservation has a dense table of its granules.

mod chunk;
mod host;
mod mapping;
mod plain;
mod pool;
mod reach;
mod share;

pub(crate) use host::Locked;
pub(crate) use pool::Pool;
pub(crate) use reach::{Piece, Span};

use crate::config::Config;
use crate::page::{self, PAGE};
use crate::slab::Slab;
use chunk::Chunk;
use cudarc::driver::sys::CUresult;
use mapping::Mapping;
use share::{Opened, Origin};
use std::collections::BTreeMap;

/// A range of addresses that the machine gave out.
#[derive(Debug)]
struct Region {
    size: u64,
    kind: Kind,
}

/// Where a region is from.
#[derive(Debug)]
enum Kind {
    /// From `cuMemAddressReserve`: for each granule the mapping there plus one, or zero.
    Reserved { granules: Vec<u32>, mapped: usize },
    /// One of the driver's own allocations: one mapping, which covers it but for the last page's
    /// rest.
    Plain {
        mapping: u32,
        make: AllocationKind,
        /// Freed in the order of a stream that has not got there yet.
        freeing: bool,
    },
}

/// What kind of allocation the driver made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AllocationKind {
    /// Of `cuMemAlloc_v2`.
    Device,
    /// Of `cuMemAllocManaged`: host code reaches it too.
    Managed,
    /// Of a pool.
    Pooled(u32),
    /// Of another process, opened here.
    Opened,
}

/// The physical memory of one device.
#[derive(Debug)]
struct DeviceMemory {
    used: u64,
    /// The most that ever was in use.
    most: u64,
    file: Option<page::File>,
}

/// All memory of a machine.
#[derive(Debug)]
pub(crate) struct Memory {
    capacity: u64,
    /// What reservations may take together.
    addresses: u64,
    granularity: u64,
    host_pointers: bool,
    /// A device gets access to mapped memory of another.
    peers: bool,
    banks: Vec<DeviceMemory>,
    regions: BTreeMap<u64, Region>,
    chunks: Slab<Chunk>,
    mappings: Slab<Mapping>,
    mapped: usize,
    handles: usize,
    reserved: u64,
    locked: BTreeMap<u64, Locked>,
    /// The devices' default pools first.
    pools: Slab<Pool>,
    opened: BTreeMap<Origin, Opened>,
}

type DriverResult<T> = Result<T, CUresult>;
const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

impl Memory {
    pub fn new(config: &Config) -> Memory {
        Memory {
            capacity: config.memory,
            addresses: config.addresses,
            granularity: config.granularity,
            host_pointers: config.host_pointers,
            peers: config.peers && !config.peers_refuse,
            banks: (0..config.devices)
                .map(|_| DeviceMemory {
                    used: 0,
                    most: 0,
                    file: None,
                })
                .collect(),
            regions: BTreeMap::new(),
            chunks: Slab::default(),
            mappings: Slab::default(),
            mapped: 0,
            handles: 0,
            reserved: 0,
            locked: BTreeMap::new(),
            pools: default_pools(config.devices),
            opened: BTreeMap::new(),
        }
    }

    pub fn used(&self, device: usize) -> u64 {
        self.banks.get(device).map_or(0, |bank| bank.used)
    }

    pub fn most_used(&self, device: usize) -> u64 {
        self.banks.get(device).map_or(0, |bank| bank.most)
    }

    /// From now on the most in use is counted anew.
    pub fn reset_most_used(&mut self) {
        for bank in &mut self.banks {
            bank.most = bank.used;
        }
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

    pub fn chunk_mut(&mut self, index: u32) -> Option<&mut Chunk> {
        self.chunks.get_mut(index)
    }

    pub fn mapping(&self, index: u32) -> Option<&Mapping> {
        self.mappings.get(index)
    }

    pub fn mapping_mut(&mut self, index: u32) -> Option<&mut Mapping> {
        self.mappings.get_mut(index)
    }
}

fn default_pools(devices: usize) -> Slab<Pool> {
    let mut pools = Slab::default();
    for device in 0..devices {
        pools.insert(Pool::new(device, false));
    }
    pools
}

impl DeviceMemory {
    /// Counts memory that is taken.
    fn take(&mut self, bytes: u64) {
        self.used += bytes;
        self.most = self.most.max(self.used);
    }
}

impl Drop for Memory {
    /// Gives every address and all backing back to the process.
    fn drop(&mut self) {
        for (&address, region) in &self.regions {
            // SAFETY: our own ranges, and with the machine gone nothing can translate into them.
            unsafe { page::unmap(address, region.size) };
        }
        for (&address, locked) in &self.locked {
            if !locked.registered {
                // SAFETY: as above.
                unsafe { page::unmap(address, locked.size.next_multiple_of(PAGE)) };
            }
        }
        if !self.host_pointers {
            for (_, chunk) in self.chunks.iter() {
                if chunk.backing != 0 && !chunk.in_place {
                    // SAFETY: as above.
                    unsafe { page::unmap(chunk.backing, chunk.size.next_multiple_of(PAGE)) };
                }
            }
        }
    }
}
