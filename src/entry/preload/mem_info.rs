//! What a program can ask about memory, answered so that what it sees is one world: its own blocks,
//! not the chunks that they are cut from.

use super::breaks::is_broken;
use super::{Answer, driver_table, pointer_attributes, primary_context, vmm_cache};
use crate::entry::torch;

/// The driver takes memory from a device in steps of this many bytes.
const STEP: u64 = 2 << 20;

/// `cuMemGetInfo`: what the pool holds beyond the program's blocks counts as free, since it would be
/// given to whoever asks; a limit is all the memory that there is.
///
/// Where the pool is PyTorch's allocator, all it holds is taken: so it is with PyTorch's own, and
/// programs add to what is free here what `torch.cuda.memory_reserved` tells them.
pub fn memory_info(free: *mut usize, total: *mut usize) -> Answer {
    let kept = vmm_cache::bytes_kept();
    let status = driver_table::call!(cuMemGetInfo_v2(free, total));
    if status != 0 || free.is_null() || total.is_null() || is_broken("info") {
        return Some(status);
    }
    // SAFETY: the driver has written to both.
    let (free, total) = unsafe { (&mut *free, &mut *total) };
    *free += kept as usize;
    let device = match primary_context::is_limited() {
        true => primary_context::device(),
        false => primary_context::known_device(),
    };
    let Some(device) = device else {
        return Some(status);
    };
    let usage = device.usage();
    let taken = match torch::is_attached() {
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
    if is_broken("range") {
        return None;
    }
    vmm_cache::ask(address);
    let found = pointer_attributes::known(address)?.found;
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
