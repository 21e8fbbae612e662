//! Room for what the driver allocates itself. Bare, what a program has freed is the driver's again, for an
//! array, a module or the local memory of a kernel as well; here the pool keeps it. So where the driver says
//! that it has none, what is kept for later goes back to it, and it is asked once more.

use super::breaks::is_broken;
use super::memory::OUT_OF_MEMORY;
use super::{capture, enter, guard, mapped, real};
use concertina_engine::runtime::{Device, Usage, allocator_in_use};

/// Calls a function of the driver, and once more where there was no memory and now is. Costs one comparison
/// where there was.
#[inline(always)]
pub fn with(call: impl Fn() -> u32) -> u32 {
    match call() {
        OUT_OF_MEMORY if make() => call(),
        status => status,
    }
}

/// Gives back what is kept for later: memory that the program maps itself, and what the pool of the current
/// device has free; of every device, where none is current. Waits for what was freed. False where there was
/// nothing, while a stream is captured, in which nothing may wait, or where this is none of our business.
#[cold]
#[inline(never)]
pub fn make() -> bool {
    let Some(_inside) = enter().filter(|_| !is_broken("room")) else {
        return false;
    };
    guard(false, || {
        let kept = mapped::give_back();
        let mut device = -1;
        let here = real::ask!(cuCtxGetDevice(&mut device)) == 0;
        let Some(allocator) = allocator_in_use() else {
            return kept;
        };
        let is_meant = |it: &&Device| !here || it.ordinal() == device;
        let pools = allocator.open_devices().filter(is_meant);
        pools.fold(kept, |made, pool| empty(pool) || made)
    })
}

/// Gives back what a pool has free, and what is set aside for later.
pub fn empty(device: &Device) -> bool {
    if capture::is_on() {
        return false;
    }
    let Usage { live, reserved } = device.usage();
    if live == reserved {
        return false;
    }
    device.take_back_aside();
    device.empty_cache();
    device.usage().reserved < reserved
}
