//! Checkpoints of a private pool's state, which `torch.compile(mode="reduce-overhead")` restores between the
//! graphs that it captures into one pool.
//!
//! PyTorch has to know every live block, so `attach.py` frees and allocates them by PyTorch's own functions;
//! this file makes the pool hand out the same addresses again.

use super::devices::in_use;
use super::json::{JsonCallback, send};
use crate::entry::panic_guard::guard;
use concertina_engine::core::BlockInfo;
use concertina_engine::core::StreamKey;
use concertina_engine::device::NotRestored;
use concertina_engine::device::PoolId;
use concertina_engine::device::PoolRoute;
use serde_json::{Value, json};
use std::ffi::{c_int, c_ulonglong};
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering::Relaxed};
use std::thread;

/// A block as `attach.py` knows it: address, size, bytes asked for, and its stream's handle and id.
type BlockNumbers = [u64; 5];

/// The live blocks of a private pool, as lists of [`BlockNumbers`]; null where there is none of that name.
pub extern "C" fn pool_blocks(
    device: c_int,
    graph: c_ulonglong,
    user: c_ulonglong,
    callback: JsonCallback,
) {
    guard((), || {
        let blocks = in_use(device).and_then(|device| device.pool_blocks((graph, user)));
        let blocks = blocks.map_or(Value::Null, |blocks| {
            let numbers = |it: BlockInfo| {
                let BlockInfo {
                    start,
                    size,
                    requested,
                    stream,
                } = it;
                json!([start, size, requested, stream.handle, stream.id])
            };
            blocks.into_iter().map(numbers).collect()
        });
        send(&blocks, callback);
    });
}

/// Restores `count` blocks of a private pool. This thread's next allocations on the device are these blocks,
/// in this order, until `concertina_end_allocate_to_pool`. Answers 0, or else 1 where there is no such pool,
/// or the address of a block whose memory is in use.
///
/// # Safety `blocks` points to `count` blocks.
pub unsafe extern "C" fn restore(
    device: c_int,
    graph: c_ulonglong,
    user: c_ulonglong,
    blocks: *const BlockNumbers,
    count: usize,
) -> u64 {
    const NO_POOL: u64 = 1;
    guard(NO_POOL, || {
        let pool: PoolId = (graph, user);
        let Some(device) = in_use(device) else {
            return NO_POOL;
        };
        let blocks = match count {
            0 => &[],
            // SAFETY: as promised by the caller.
            _ => unsafe { std::slice::from_raw_parts(blocks, count) },
        };
        let blocks: Vec<BlockInfo> = blocks
            .iter()
            .map(|[start, size, requested, handle, id]| BlockInfo {
                start: *start,
                size: *size,
                requested: *requested,
                stream: StreamKey {
                    handle: *handle,
                    id: *id,
                },
            })
            .collect();
        let thread = thread::current().id();
        let route = PoolRoute {
            pool,
            filter: Box::new(move |_| thread::current().id() == thread),
        };
        match device.restore_pool(route, &blocks) {
            Ok(()) => 0,
            Err(NotRestored::NoPool) => NO_POOL,
            Err(NotRestored::Taken(address)) => address,
        }
    })
}

/// `c10::DataPtr`. Its words are atomic because C++ reads and writes them too.
#[repr(C)]
struct DataPtr {
    address: AtomicUsize,
    free: AtomicUsize,
    /// What `free` is called with; null where the memory is another storage's.
    owned: AtomicUsize,
    device: AtomicU16,
}

/// Words of a `c10::StorageImpl` before its `c10::DataPtr`: the table of its class, and its count of
/// references in one or two words.
const BEFORE: [usize; 2] = [2, 3];

/// Swaps which of two storages with the memory at `address` owns it: from `owner` to `viewer`. False, and
/// nothing is changed, where they are not built as expected.
///
/// # Safety Both are live `c10::StorageImpl`s, which no other thread uses meanwhile.
pub unsafe extern "C" fn swap_owner(
    owner: *const usize,
    viewer: *const usize,
    address: usize,
) -> bool {
    guard(false, || {
        BEFORE.into_iter().any(|before| {
            // SAFETY: as promised by the caller; an object of this class has more than seven words.
            let (owner, viewer) = unsafe {
                (
                    &*owner.add(before).cast::<DataPtr>(),
                    &*viewer.add(before).cast::<DataPtr>(),
                )
            };
            // Up to 2.8 an owner's is not the address, but an object that has it.
            let same = owner.address.load(Relaxed) == address
                && viewer.address.load(Relaxed) == address
                && owner.owned.load(Relaxed) != 0
                && viewer.owned.load(Relaxed) == 0
                && owner.device.load(Relaxed) == viewer.device.load(Relaxed);
            if same {
                let free = owner.free.swap(viewer.free.load(Relaxed), Relaxed);
                viewer.free.store(free, Relaxed);
                viewer.owned.store(owner.owned.swap(0, Relaxed), Relaxed);
            }
            same
        })
    })
}
