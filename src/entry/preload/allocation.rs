//! The allocation around an address, as CUDA would tell the program about it.

use super::{imported_memory, malloc_async_blocks};
use concertina_engine::core::BlockInfo;
use concertina_engine::device::Device;
use concertina_engine::process::allocator::allocator_in_use;

/// Who made the memory around an address, as far as CUDA treats it differently.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AllocatedBy {
    /// `cudaMalloc`.
    Malloc,
    /// `cudaMallocAsync`.
    MallocAsync,
    /// PyTorch, or who else calls the library's own functions: to CUDA that would be part of what such an
    /// allocator takes by `cudaMalloc`.
    Allocator,
    /// Another process, which shares it.
    OtherProcess,
}

/// What is around an address: the allocation that the program is told about.
#[derive(Clone, Copy)]
pub struct Allocation {
    pub device: &'static Device,
    pub found: BlockInfo,
    pub maker: AllocatedBy,
}

/// What is around an address, also of another process that is open here. `None` where the driver is to
/// tell: it knows nothing else but what PyTorch would have had of it, too.
pub fn find(address: u64) -> Option<Allocation> {
    let mut devices = allocator_in_use()?.devices_in_use();
    let own = devices.find_map(|device| Some((device, device.allocation(address)?)));
    let Some((device, allocation)) = own else {
        let (device, found) = imported_memory::around(address)?;
        return Some(Allocation {
            device,
            found,
            maker: AllocatedBy::OtherProcess,
        });
    };
    let found = allocation.found;
    let maker = match allocation.private {
        true => AllocatedBy::Allocator,
        false if !Device::is_stream_ordered(&found) => AllocatedBy::Malloc,
        false if malloc_async_blocks::is_malloc_async(device, found.start) => {
            AllocatedBy::MallocAsync
        }
        false => AllocatedBy::Allocator,
    };
    // A tensor is part of a segment that CUDA allocated.
    let is_drivers = allocation.plain && maker == AllocatedBy::Allocator;
    (!is_drivers).then_some(Allocation {
        device,
        found,
        maker,
    })
}
