//! What a program can ask about an address: it is told about its own block, not about the chunks of
//! memory that the block is cut from.

use super::breaks::is_broken;
use super::malloc::INVALID_VALUE;
use super::malloc_async::default_pool;
use super::{Answer, driver_table, ipc_hooks, malloc_async, vmm_cache};
use concertina_engine::core::BlockInfo;
use concertina_engine::device::Device;
use concertina_engine::device::exported;
use concertina_engine::process::allocator::allocator_in_use;
use std::collections::HashMap;
use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// Who made the memory around an address, as far as CUDA treats it differently.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Maker {
    /// `cudaMalloc`.
    Program,
    /// `cudaMallocAsync`.
    InOrder,
    /// PyTorch, or who else calls the library's own functions: to CUDA that would be part of what such an
    /// allocator takes by `cudaMalloc`.
    Allocator,
    /// Another process, which shares it.
    Other,
}

/// What is around an address: the allocation that the program is told about.
#[derive(Clone, Copy)]
pub struct Known {
    pub device: &'static Device,
    pub found: BlockInfo,
    pub maker: Maker,
}

/// What of an attribute is not the driver's to answer.
enum Ours {
    /// All of it: eight bytes.
    Word(fn(&Known) -> u64),
    /// Its lowest byte, whatever its width: that a block can be shared by `cudaIpcGetMemHandle`, and in no
    /// other way. `None` where the driver's is right.
    Byte(fn(&Known) -> Option<u8>),
}
use Ours::{Byte, Word};

/// The attributes that are not simply the driver's to answer, by `CUpointer_attribute` in `cuda.h`. Others are
/// asked for at each launch of a kernel, by Triton for one.
fn ours(attribute: c_uint) -> Option<Ours> {
    Some(match attribute {
        // CONTEXT
        1 => Word(|it| it.device.context() as u64),
        // BUFFER_ID
        7 => Word(|it| buffer_id(it.found.start)),
        // IS_LEGACY_CUDA_IPC_CAPABLE
        10 => Byte(|it| match it.maker {
            Maker::Program | Maker::Allocator => Some(1),
            Maker::InOrder => Some(0),
            Maker::Other => None,
        }),
        // RANGE_START_ADDR, MAPPING_BASE_ADDR
        11 | 19 => Word(|it| it.found.start),
        // RANGE_SIZE, MAPPING_SIZE
        12 | 18 => Word(|it| it.found.requested),
        // ALLOWED_HANDLE_TYPES
        14 => Byte(|_| Some(0)),
        // MEMPOOL_HANDLE
        17 => Word(|it| {
            let pool = (it.maker == Maker::InOrder).then(|| default_pool(it.device.ordinal()));
            pool.flatten().map_or(0, |pool| pool as u64)
        }),
        _ => return None,
    })
}

/// What is around an address, also of another process that is open here. `None` where the driver is to
/// tell: it knows nothing else but what PyTorch would have had of it, too.
pub fn known(address: u64) -> Option<Known> {
    let mut devices = allocator_in_use()?.devices_in_use();
    let own = devices.find_map(|device| Some((device, device.allocation(address)?)));
    let Some((device, allocation)) = own else {
        let (device, found) = ipc_hooks::around(address)?;
        return Some(Known {
            device,
            found,
            maker: Maker::Other,
        });
    };
    let found = allocation.found;
    let maker = match allocation.private {
        true => Maker::Allocator,
        false if !Device::is_stream_ordered(&found) => Maker::Program,
        false if malloc_async::is_in_order(device, found.start) => Maker::InOrder,
        false => Maker::Allocator,
    };
    // A tensor is part of a segment that CUDA allocated.
    let is_drivers = allocation.plain && maker == Maker::Allocator;
    (!is_drivers).then_some(Known {
        device,
        found,
        maker,
    })
}

/// `cuPointerGetAttribute`.
pub fn one(value: *mut c_void, attribute: c_uint, address: u64) -> Answer {
    vmm_cache::ask(address);
    let ours = ours(attribute).filter(|_| !value.is_null() && !is_broken("attributes"))?;
    let known = known(address)?;
    let status = match ours {
        Word(_) => 0,
        Byte(_) => driver_table::call!(cuPointerGetAttribute(value, attribute, address)),
    };
    if status == 0 {
        // SAFETY: the program's place for a value of the attribute's type.
        unsafe { ours.write(&known, value) };
    }
    Some(status)
}

/// `cuPointerGetAttributes`: the driver's answers, with ours in their place.
pub fn several(
    count: c_uint,
    attributes: *const c_uint,
    values: *const *mut c_void,
    address: u64,
) -> Answer {
    vmm_cache::ask(address);
    let status = driver_table::call!(cuPointerGetAttributes(count, attributes, values, address));
    if status != 0 || attributes.is_null() {
        return Some(status);
    }
    // SAFETY: the driver has read so many.
    let asked = unsafe { std::slice::from_raw_parts(attributes, count as usize) };
    let asked = asked.iter().enumerate();
    let mut asked = asked
        .filter_map(|(at, it)| Some((at, ours(*it)?)))
        .peekable();
    if asked.peek().is_some()
        && !is_broken("attributes")
        && let Some(known) = known(address)
    {
        for (at, ours) in asked {
            // SAFETY: the driver has written to as many places, a value of the attribute's type each.
            unsafe {
                let value = *values.add(at);
                if !value.is_null() {
                    ours.write(&known, value);
                }
            }
        }
    }
    Some(status)
}

impl Ours {
    /// Puts what is ours of it in its place.
    ///
    /// # Safety
    /// `value` can be written with a value of the attribute's type, and has the driver's where not all of it
    /// is ours.
    unsafe fn write(self, known: &Known, value: *mut c_void) {
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

/// Numbers of the blocks that were asked for theirs, by address.
static BUFFER_IDS: Mutex<Option<HashMap<u64, u64>>> = Mutex::new(None);
/// The next number: far from the driver's own, which count up from 1.
static NEXT_ID: AtomicU64 = AtomicU64::new(FIRST_ID);
const FIRST_ID: u64 = 1 << 62;

/// A number that no other block ever had, also not at the same address.
fn buffer_id(address: u64) -> u64 {
    let mut ids = BUFFER_IDS.lock().unwrap_or_else(PoisonError::into_inner);
    let ids = ids.get_or_insert_default();
    *ids.entry(address)
        .or_insert_with(|| NEXT_ID.fetch_add(1, Relaxed))
}

/// The block at `address` is being freed: the next one there has another number, and no process opens
/// this one any more. A relaxed load each where nobody asked for such things.
#[inline]
pub fn forget(address: u64) {
    if !is_broken("ipc freed") {
        exported::revoke(address);
    }
    malloc_async::forget(address);
    if NEXT_ID.load(Relaxed) > FIRST_ID {
        let mut ids = BUFFER_IDS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ids) = ids.as_mut() {
            ids.remove(&address);
        }
    }
}

/// `cuMemRetainAllocationHandle`: to the program its block is no memory that it created and mapped.
pub fn refuse_handle(address: u64) -> Answer {
    if is_broken("handles") {
        return None;
    }
    let refused = is_broken("own handles") || known(address).is_some();
    refused.then_some(INVALID_VALUE)
}
