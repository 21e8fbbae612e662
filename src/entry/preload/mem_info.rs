//! `cuMemGetInfo` and `cuMemGetAddressRange`: a program sees its own blocks, not the chunks that they lie in.

use super::abi::Answer;
use super::{allocation, conf, driver_table, mutation, primary_context, vmm_cache};
use crate::entry::attached;

/// The driver takes memory from a device in steps of this many bytes.
const STEP: u64 = 2 << 20;

/// `cuMemGetInfo`: what the pool holds beyond the program's blocks counts as free, since it would be
/// allocated to any request; with a limit, that is the device's total.
///
/// Where the pool is PyTorch's allocator, all it holds counts as used, as with PyTorch's own: programs add what
/// `torch.cuda.memory_reserved` tells them.
pub fn memory_info(free: *mut usize, total: *mut usize) -> Answer {
    let kept = vmm_cache::cached_bytes();
    let status = driver_table::call!(cuMemGetInfo_v2(free, total));
    if status != 0 || free.is_null() || total.is_null() || mutation::is_on("info") {
        return Some(status);
    }
    // SAFETY: the driver has written to both.
    let (free, total) = unsafe { (&mut *free, &mut *total) };
    *free += kept as usize;
    let device = match conf::is_limited() {
        true => primary_context::current_device(),
        false => primary_context::current_device_in_use(),
    };
    let Some(device) = device else {
        return Some(status);
    };
    let usage = device.usage();
    let taken = match attached::is_attached() {
        true => usage.reserved,
        false => usage.live.next_multiple_of(STEP),
    };
    *free = (*free + usage.reserved as usize)
        .saturating_sub(taken as usize)
        .min(*total);
    if let Some(limit) = device.limit() {
        *total = (*total).min(limit as usize);
        let taken = taken + device.unpooled_bytes();
        *free = (*free).min((limit as usize).saturating_sub(taken as usize));
    }
    Some(status)
}

/// `cuMemGetAddressRange`.
pub fn address_range(start: *mut u64, size: *mut usize, address: u64) -> Answer {
    if mutation::is_on("range") {
        return None;
    }
    vmm_cache::check_address(address);
    let found = allocation::find(address)?.found;
    // SAFETY: the program's places for the answers, each where it is not null.
    unsafe {
        if !start.is_null() {
            *start = found.start;
        }
        if !size.is_null() {
            *size = found.requested as usize;
        }
    }
    Some(0)
}
