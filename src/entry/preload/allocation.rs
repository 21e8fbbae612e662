//! The allocation around an address, as CUDA would tell the program about it.

use super::{imported_memory, malloc_async_blocks};
use concertina_engine::core::BlockInfo;
use concertina_engine::device::Device;
use concertina_engine::process::allocator::allocator_in_use;

/// Which interface allocated a block, as far as CUDA answers differently.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AllocatedBy {
    /// `cudaMalloc`.
    Malloc,
    /// `cudaMallocAsync`.
    MallocAsync,
    /// The library's own functions, such as PyTorch's: under another allocator this would be a part of a larger
    /// `cudaMalloc`.
    Allocator,
    /// Another process, which exported it.
    OtherProcess,
}

/// The allocation that the program is told about.
#[derive(Clone, Copy)]
pub struct Allocation {
    pub device: &'static Device,
    pub found: BlockInfo,
    pub allocated_by: AllocatedBy,
}

/// The allocation around an address, also of another process. `None` if the driver shall answer.
pub fn find(address: u64) -> Option<Allocation> {
    let mut devices = allocator_in_use()?.devices_in_use();
    let own = devices.find_map(|device| Some((device, device.allocation(address)?)));
    let Some((device, allocation)) = own else {
        let (device, found) = imported_memory::around(address)?;
        return Some(Allocation {
            device,
            found,
            allocated_by: AllocatedBy::OtherProcess,
        });
    };
    let found = allocation.found;
    let allocated_by = match allocation.private {
        true => AllocatedBy::Allocator,
        false if !Device::is_stream_ordered(&found) => AllocatedBy::Malloc,
        false if malloc_async_blocks::is_malloc_async(device, found.start) => {
            AllocatedBy::MallocAsync
        }
        false => AllocatedBy::Allocator,
    };
    // A tensor is part of a segment that CUDA allocated.
    let is_drivers = allocation.plain && allocated_by == AllocatedBy::Allocator;
    (!is_drivers).then_some(Allocation {
        device,
        found,
        allocated_by,
    })
}
