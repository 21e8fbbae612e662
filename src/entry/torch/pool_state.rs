//! The state of a private pool, kept and gone back to, as `torch.compile(mode="reduce-overhead")` does
//! between the graphs that it captures into one pool.
//!
//! PyTorch has to know every block that is in use, so `attach.py` frees and allocates them by PyTorch's
//! own functions; here the blocks are put where they were before it asks for them.

use super::memory_stats::{Take, hand_over, used};
use crate::entry::panic_guard::guard;
use concertina_engine::core::Found;
use concertina_engine::core::StreamKey;
use concertina_engine::device::NotRestored;
use concertina_engine::device::PoolId;
use concertina_engine::device::PoolRoute;
use serde_json::{Value, json};
use std::ffi::{c_int, c_ulonglong};
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering::Relaxed};
use std::thread;

/// A block as `attach.py` knows it: address, size, bytes asked for, and its stream's handle and id.
type Numbers = [u64; 5];

/// The blocks in use of a private pool, as lists of [`Numbers`]; null where there is none of that name.
pub extern "C" fn pool_blocks(device: c_int, graph: c_ulonglong, user: c_ulonglong, take: Take) {
    guard((), || {
        let blocks = used(device).and_then(|device| device.pool_blocks((graph, user)));
        let blocks = blocks.map_or(Value::Null, |blocks| {
            let numbers = |it: Found| {
                let Found {
                    start,
                    size,
                    requested,
                    stream,
                } = it;
                json!([start, size, requested, stream.handle, stream.id])
            };
            blocks.into_iter().map(numbers).collect()
        });
        hand_over(&blocks, take);
    });
}

/// Puts `count` blocks of a private pool where they were. This thread's next allocations on the device
/// are these blocks, in this order, until `concertina_end_allocate_to_pool`. Answers 0; where that
/// cannot be, 1 for want of the pool, or the address of a block whose memory is in use.
///
/// # Safety
/// `blocks` points to so many.
pub unsafe extern "C" fn restore(
    device: c_int,
    graph: c_ulonglong,
    user: c_ulonglong,
    blocks: *const Numbers,
    count: usize,
) -> u64 {
    const NO_POOL: u64 = 1;
    guard(NO_POOL, || {
        let pool: PoolId = (graph, user);
        let Some(device) = used(device) else {
            return NO_POOL;
        };
        let blocks = match count {
            0 => &[],
            // SAFETY: as promised by the caller.
            _ => unsafe { std::slice::from_raw_parts(blocks, count) },
        };
        let blocks: Vec<Found> = blocks
            .iter()
            .map(|[start, size, requested, handle, id]| Found {
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
    /// What `free` is called with; null for who only looks at the memory.
    owned: AtomicUsize,
    device: AtomicU16,
}

/// Words of a `c10::StorageImpl` before its `c10::DataPtr`: the table of its class, and its count of
/// references in one or two words.
const BEFORE: [usize; 2] = [2, 3];

/// A storage that only looks at the memory at `address`, which another one owns, becomes the owner; the
/// other only looks at it from then on. False, and nothing is changed, where they are not built as
/// expected.
///
/// # Safety
/// Both are live `c10::StorageImpl`s, which no other thread uses meanwhile.
pub unsafe extern "C" fn swap_owner(
    owner: *const usize,
    looker: *const usize,
    address: usize,
) -> bool {
    guard(false, || {
        BEFORE.into_iter().any(|before| {
            // SAFETY: as promised by the caller; an object of this class has more than seven words.
            let (owner, looker) = unsafe {
                (
                    &*owner.add(before).cast::<DataPtr>(),
                    &*looker.add(before).cast::<DataPtr>(),
                )
            };
            let same = [&owner.address, &owner.owned, &looker.address]
                .iter()
                .all(|it| it.load(Relaxed) == address)
                && looker.owned.load(Relaxed) == 0
                && owner.device.load(Relaxed) == looker.device.load(Relaxed);
            if same {
                let free = owner.free.swap(looker.free.load(Relaxed), Relaxed);
                looker.free.store(free, Relaxed);
                looker.owned.store(owner.owned.swap(0, Relaxed), Relaxed);
            }
            same
        })
    })
}
