//! Memory pools: memory allocated and freed in stream order.

use super::*;
use cudarc::driver::sys::{
    CUmemLocation, CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUpointer_attribute,
};

fn alloc_async(bytes: u64, stream: CUstream) -> u64 {
    let mut address = 0;
    // SAFETY: writes a local.
    ok(unsafe { cuMemAllocAsync(&mut address, bytes as usize, stream) });
    address
}

fn free_async(address: u64, stream: CUstream) -> u32 {
    // SAFETY: no test keeps references into device memory.
    unsafe { cuMemFreeAsync(address, stream) }
}

fn default_pool() -> CUmemoryPool {
    let mut pool = null_mut();
    // SAFETY: writes a local.
    ok(unsafe { cuDeviceGetDefaultMemPool(&mut pool, 0) });
    pool
}

fn used(pool: CUmemoryPool) -> u64 {
    let mut value = 0_u64;
    let which = CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
    // SAFETY: writes a local of the attribute's size.
    ok(unsafe { cuMemPoolGetAttribute(pool, which, (&raw mut value).cast()) });
    value
}

fn pool_of(address: u64) -> CUmemoryPool {
    let mut pool: CUmemoryPool = null_mut();
    let which = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE;
    // SAFETY: writes a local of the attribute's size.
    ok(unsafe { cuPointerGetAttribute((&raw mut pool).cast(), which, address) });
    pool
}

#[test]
fn memory_pool_free_runs_in_stream_order() {
    let rig = Rig::held();
    let (a, before) = (stream(), rig.machine.used(0));
    let address = alloc_async(4096, a);
    ok(fill(address, 7, 4096, a));
    ok(free_async(address, a));
    assert_eq!(rig.machine.used(0), before + 4096);
    // It is nobody's to free again, though it is still there.
    invalid(free_async(address, a));
    invalid(free(address));
    ok(synchronise_stream(a));
    assert_eq!(rig.machine.used(0), before);
    assert_eq!(used(default_pool()), 0);
}

#[test]
fn memory_pool_free_that_overtakes_another_stream_is_found() {
    let rig = Rig::held();
    let (a, b) = (stream(), stream());
    let address = alloc_async(4096, a);
    ok(synchronise_stream(a));
    ok(fill(address, 7, 4096, b));
    ok(free_async(address, a));
    rig.one_violation("unordered reuse");
    ok(synchronise_stream(b));
}

#[test]
fn memory_pool_waits_for_pending_frees_before_out_of_memory() {
    let _rig = Rig::new(Config {
        memory: 8 << 20,
        ..Config::default()
    });
    let (a, b) = (stream(), stream());
    for _ in 0..4 {
        let address = alloc_async(5 << 20, a);
        ok(free_async(address, a));
    }
    alloc_async(5 << 20, b);
    let mut address = 0;
    // SAFETY: writes a local.
    status(
        unsafe { cuMemAllocAsync(&mut address, 5 << 20, b) },
        CUresult::CUDA_ERROR_OUT_OF_MEMORY,
    );
}

#[test]
fn memory_pools_are_selected_and_end_with_their_last_allocation() {
    let _rig = Rig::new(Config::default());
    let a = stream();
    assert_eq!(pool_of(alloc_async(512, a)), default_pool());
    assert!(pool_of(alloc(512)).is_null());
    let mut pool = null_mut();
    // SAFETY: all numbers, of which zero is one, and null pointers.
    let mut wanted: CUmemPoolProps = unsafe { std::mem::zeroed() };
    wanted.location = CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: 0,
    };
    // SAFETY: reads and writes locals.
    unsafe {
        ok(cuMemPoolCreate(&mut pool, &wanted));
        ok(cuDeviceSetMemPool(0, pool));
    }
    let address = alloc_async(1024, a);
    assert_eq!((pool_of(address), used(pool)), (pool, 1024));
    // SAFETY: handles.
    unsafe {
        invalid(cuMemPoolDestroy(default_pool()));
        ok(cuMemPoolDestroy(pool));
        invalid(cuMemPoolTrimTo(pool, 0));
    }
    assert_eq!(pool_of(alloc_async(512, a)), default_pool());
    ok(free_async(address, a));
    ok(synchronise());
}

#[test]
fn memory_pool_allocations_in_a_capture_belong_to_the_graph() {
    let rig = Rig::new(Config::default());
    let (a, before) = (stream(), rig.machine.used(0));
    let (mut graph, mut executable) = (null_mut(), null_mut());
    let mode = cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: handles, and outputs that are locals.
    unsafe {
        ok(cuStreamBeginCapture_v2(a, mode));
        let address = alloc_async(4096, a);
        ok(fill(address, 1, 4096, a));
        ok(free_async(address, a));
        ok(cuStreamEndCapture(a, &mut graph));
        ok(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        ok(cuGraphDestroy(graph));
        ok(cuGraphLaunch(executable, a));
        ok(cuGraphLaunch(executable, a));
        assert_eq!(rig.machine.used(0), before + 4096);
        ok(cuGraphExecDestroy(executable));
    }
    assert_eq!(rig.machine.used(0), before);
}
