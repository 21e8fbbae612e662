//! `cuPointerGetAttribute`: a program is told about its own block, not about the chunk that the block lies in.

use super::abi::{Answer, INVALID_VALUE};
use super::allocation::{self, AllocatedBy, Allocation};
use super::mem_pools::default_pool;
use super::{driver_table, malloc_async_blocks, mutation, vmm_cache};
use concertina_engine::device::exported;
use std::collections::HashMap;
use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// How an attribute of a block differs from the driver's answer.
enum Override {
    /// Replaces all eight bytes.
    Word(fn(&Allocation) -> u64),
    /// Replaces the lowest byte, whatever the attribute's width: whether a block can be shared by
    /// `cudaIpcGetMemHandle`. `None` where the driver's answer is right.
    Byte(fn(&Allocation) -> Option<u8>),
}
use Override::{Byte, Word};

/// The attributes that are overridden, by `CUpointer_attribute` in `cuda.h`. The others are passed on: Triton, for one,
/// asks for some at each launch of a kernel.
fn overridden(attribute: c_uint) -> Option<Override> {
    Some(match attribute {
        // CONTEXT
        1 => Word(|it| it.device.context() as u64),
        // BUFFER_ID
        7 => Word(|it| buffer_id(it.found.start)),
        // IS_LEGACY_CUDA_IPC_CAPABLE
        10 => Byte(|it| match it.allocated_by {
            AllocatedBy::Malloc | AllocatedBy::Allocator => Some(1),
            AllocatedBy::MallocAsync => Some(0),
            AllocatedBy::OtherProcess => None,
        }),
        // RANGE_START_ADDR, MAPPING_BASE_ADDR
        11 | 19 => Word(|it| it.found.start),
        // RANGE_SIZE, MAPPING_SIZE
        12 | 18 => Word(|it| it.found.requested),
        // ALLOWED_HANDLE_TYPES
        14 => Byte(|_| Some(0)),
        // MEMPOOL_HANDLE
        17 => Word(|it| {
            let pool = (it.allocated_by == AllocatedBy::MallocAsync)
                .then(|| default_pool(it.device.ordinal()));
            pool.flatten().map_or(0, |pool| pool as u64)
        }),
        _ => return None,
    })
}

/// `cuPointerGetAttribute`.
pub fn get_one(value: *mut c_void, attribute: c_uint, address: u64) -> Answer {
    vmm_cache::check_address(address);
    let replaced =
        overridden(attribute).filter(|_| !value.is_null() && !mutation::is_on("attributes"))?;
    let known = allocation::find(address)?;
    let status = match replaced {
        Word(_) => 0,
        Byte(_) => driver_table::call!(cuPointerGetAttribute(value, attribute, address)),
    };
    if status == 0 {
        // SAFETY: the program's place for a value of the attribute's type.
        unsafe { replaced.write(&known, value) };
    }
    Some(status)
}

/// `cuPointerGetAttributes`: the driver's answers, some of them overridden.
pub fn get_several(
    count: c_uint,
    attributes: *const c_uint,
    values: *const *mut c_void,
    address: u64,
) -> Answer {
    vmm_cache::check_address(address);
    let status = driver_table::call!(cuPointerGetAttributes(count, attributes, values, address));
    if status != 0 || attributes.is_null() {
        return Some(status);
    }
    // SAFETY: the driver has read so many.
    let asked = unsafe { std::slice::from_raw_parts(attributes, count as usize) };
    let asked = asked.iter().enumerate();
    let mut asked = asked
        .filter_map(|(at, it)| Some((at, overridden(*it)?)))
        .peekable();
    if asked.peek().is_some()
        && !mutation::is_on("attributes")
        && let Some(known) = allocation::find(address)
    {
        for (at, replaced) in asked {
            // SAFETY: the driver has written to as many places, a value of the attribute's type each.
            unsafe {
                let value = *values.add(at);
                if !value.is_null() {
                    replaced.write(&known, value);
                }
            }
        }
    }
    Some(status)
}

impl Override {
    /// Overrides the driver's answer.
    ///
    /// # Safety
    /// `value` can be written with a value of the attribute's type, and has the driver's answer where not all of it
    /// is replaced.
    unsafe fn write(self, known: &Allocation, value: *mut c_void) {
        match self {
            // SAFETY: as wide as all of these are.
            Word(word) => unsafe { ptr::write(value.cast::<u64>(), word(known)) },
            Byte(byte) => {
                if let Some(byte) = byte(known) {
                    // SAFETY: the lowest byte, which comes first.
                    unsafe { ptr::write(value.cast::<u8>(), byte) };
                }
            }
        }
    }
}

/// Buffer ids of the blocks that were asked for theirs, by address.
static BUFFER_IDS: Mutex<Option<HashMap<u64, u64>>> = Mutex::new(None);
/// The next number: far from the driver's own, which count up from 1.
static NEXT_ID: AtomicU64 = AtomicU64::new(FIRST_ID);
const FIRST_ID: u64 = 1 << 62;

/// A buffer id that no other block ever had, also not at the same address.
fn buffer_id(address: u64) -> u64 {
    let mut ids = BUFFER_IDS.lock().unwrap_or_else(PoisonError::into_inner);
    let ids = ids.get_or_insert_default();
    *ids.entry(address)
        .or_insert_with(|| NEXT_ID.fetch_add(1, Relaxed))
}

/// The block at `address` is being freed: the next one there has another buffer id, and no process opens this one any
/// more. A relaxed load each if nobody used such things.
#[inline]
pub fn forget_block(address: u64) {
    if !mutation::is_on("ipc freed") {
        exported::revoke(address);
    }
    malloc_async_blocks::forget(address);
    if NEXT_ID.load(Relaxed) > FIRST_ID {
        let mut ids = BUFFER_IDS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ids) = ids.as_mut() {
            ids.remove(&address);
        }
    }
}

/// `cuMemRetainAllocationHandle`: refused for the pool's blocks, which the program did not create by `cuMemCreate`.
pub fn refuse_handle(address: u64) -> Answer {
    if mutation::is_on("handles") {
        return None;
    }
    let refused = mutation::is_on("own handles") || allocation::find(address).is_some();
    refused.then_some(INVALID_VALUE)
}
