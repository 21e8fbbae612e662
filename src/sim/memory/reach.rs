//! Address translation: from device addresses to chunks, and to the host bytes that back them.

use super::{AllocationKind, Kind, Memory};
use crate::page::{self, PAGE};

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

/// What an address belongs to, as pointer attributes tell it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    pub start: u64,
    pub size: u64,
    pub device: usize,
    /// `None` for chunks mapped with `cuMemMap`.
    pub make: Option<AllocationKind>,
    /// A chunk that was created to have a file descriptor.
    pub exportable: bool,
    /// Network cards reach it.
    pub rdma: bool,
    /// Tells this allocation from any other, also from a later one at the same address.
    pub id: u64,
}

/// A stretch of an access as host code reaches it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub host: usize,
    pub length: usize,
}

impl Span {
    /// A stretch of the program's own memory.
    pub fn host(address: usize, bytes: u64) -> Span {
        Span {
            host: address,
            length: bytes as usize,
        }
    }
}

impl Memory {
    /// Whether the machine gave out this address: allocated, or reserved.
    pub fn is_device(&self, address: u64) -> bool {
        let last = self.regions.range(..=address).next_back();
        last.is_some_and(|(base, region)| address - base < region.size)
    }

    /// The allocation or the mapped chunk at an address.
    pub fn extent(&self, address: u64) -> Option<Extent> {
        let piece = self.piece(address, 1)?;
        let mapping = self.mappings.get(piece.mapping)?;
        let (_, region) = self.regions.range(..=address).next_back()?;
        let chunk = self.chunks.get(piece.chunk)?;
        Some(Extent {
            start: mapping.address,
            size: mapping.size,
            device: chunk.device,
            exportable: chunk.exportable,
            rdma: chunk.rdma || !matches!(region.kind, Kind::Reserved { .. }),
            make: match region.kind {
                Kind::Reserved { .. } => None,
                Kind::Plain { make, .. } => Some(make),
            },
            id: self.mappings.handle(piece.mapping),
        })
    }

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
            Kind::Plain { mapping, .. } => *mapping,
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
}
