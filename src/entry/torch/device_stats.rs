//! Memory statistics for C++ (`getDeviceStats`): `c10::CachingDeviceAllocator::DeviceStats`.

use super::exceptions::{Failure, raise};
use super::layouts::{DeviceStats, Figures, PoolMap};
use super::memory_stats;
use crate::entry::panic_guard::guard;
use concertina_engine::core::{PoolStats, Stat};
use concertina_engine::process::stats::by_name;
use std::array;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

type This = *mut c_void;

/// `getDeviceStats`. Its result may be a class with a destructor, so the caller passes the memory for it
/// first.
pub unsafe extern "C-unwind" fn get_device_stats<const BY_POOL: usize, const REJECTIONS: usize>(
    result: *mut DeviceStats<BY_POOL, REJECTIONS>,
    _: This,
    device: i8,
) -> *mut DeviceStats<BY_POOL, REJECTIONS> {
    let made = guard(None, || {
        device_stats(&memory_stats::counters(device.into()))
    });
    match made {
        Some(mut made) => {
            if TEST_PATTERN.load(Relaxed) {
                made.set_test_pattern();
            }
            // SAFETY: the caller's memory for the result.
            unsafe { result.write(made) }
        }
        // SAFETY: PyTorch, which called, lets exceptions through.
        None => unsafe {
            raise(Failure::Other("libstdc++ is not to be found".into()));
        },
    }
    result
}

/// The statistics as PyTorch's class; `None` where there is no libstdc++ for what is in it.
fn device_stats<const BY_POOL: usize, const REJECTIONS: usize>(
    counters: &PoolStats,
) -> Option<DeviceStats<BY_POOL, REJECTIONS>> {
    let pools = [&counters.all, &counters.small, &counters.large].map(by_name);
    let figure =
        |flow: &Stat| [flow.current, flow.peak, flow.allocated, flow.freed].map(|it| it as i64);
    let figures = |at: usize| -> Figures { array::from_fn(|pool| figure(pools[pool][at].1)) };
    let maps: Option<Vec<PoolMap>> = (0..BY_POOL).map(|_| PoolMap::empty()).collect();
    Some(DeviceStats {
        usage: array::from_fn(figures),
        // Python is told of pools by `attach.py`.
        reserved_bytes_by_private_pools: maps?.try_into().ok()?,
        more_usage: array::from_fn(|at| figures(6 + at)),
        num_alloc_retries: counters.alloc_retries as i64,
        num_ooms: counters.ooms as i64,
        // No block is kept from being split.
        oversize_allocations: [0; 4],
        oversize_segments: [0; 4],
        num_sync_all_streams: counters.syncs as i64,
        num_device_alloc: counters.device_allocs as i64,
        num_device_free: counters.device_frees as i64,
        // Nothing is refused ahead of time.
        num_oom_rejections: [0; REJECTIONS],
        max_split_size: -1,
    })
}

/// Whether [`get_device_stats`] answers the test pattern.
static TEST_PATTERN: AtomicBool = AtomicBool::new(false);

/// Called by `attach.py` at the begin and at the end of a test of the layout: in between each figure for C++
/// is a number of its own, from 1000 on, so that what PyTorch reads shows whether its class is laid out as
/// ours.
pub extern "C" fn set_test_pattern(begins: bool) {
    TEST_PATTERN.store(begins, Relaxed);
}

impl<const BY_POOL: usize, const REJECTIONS: usize> DeviceStats<BY_POOL, REJECTIONS> {
    /// Numbers the figures from 1000 on, in their order.
    fn set_test_pattern(&mut self) {
        let usage = self.usage.iter_mut().chain(&mut self.more_usage);
        let figures = usage.flatten().flatten();
        let figures = figures
            .chain([&mut self.num_alloc_retries, &mut self.num_ooms])
            .chain(&mut self.oversize_allocations)
            .chain(&mut self.oversize_segments)
            .chain([
                &mut self.num_sync_all_streams,
                &mut self.num_device_alloc,
                &mut self.num_device_free,
            ])
            .chain(&mut self.num_oom_rejections)
            .chain([&mut self.max_split_size]);
        for (figure, number) in figures.zip(1000..) {
            *figure = number;
        }
    }
}
