//! Initialisation, devices, contexts, and which machine a thread means.

use super::*;
use std::ffi::{CStr, c_char, c_int};

#[test]
fn context_calls_fail_before_init() {
    let machine = Machine::new(Config::default());
    let _bound = machine.bind();
    let mut number = 0;
    let mut address = 0;
    // SAFETY: outputs are locals.
    unsafe {
        status(
            cuDeviceGetCount(&mut number),
            CUresult::CUDA_ERROR_NOT_INITIALIZED,
        );
        status(
            cuMemAlloc_v2(&mut address, 1),
            CUresult::CUDA_ERROR_NOT_INITIALIZED,
        );
        status(cuCtxSynchronize(), CUresult::CUDA_ERROR_NOT_INITIALIZED);
        ok(cuDriverGetVersion(&mut number));
        assert_eq!(number, 13000);
        invalid(cuInit(1));
        ok(cuInit(0));
        ok(cuDeviceGetCount(&mut number));
        assert_eq!(number, 1);
        status(
            cuMemAlloc_v2(&mut address, 1),
            CUresult::CUDA_ERROR_INVALID_CONTEXT,
        );
        status(cuCtxSynchronize(), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        let mut stream = null_mut();
        status(
            cuStreamCreate(&mut stream, 0),
            CUresult::CUDA_ERROR_INVALID_CONTEXT,
        );
    }
}

#[test]
fn device_attributes() {
    let rig = Rig::new(Config {
        devices: 2,
        peers: true,
        memory: 1 << 30,
        ..Config::default()
    });
    let (mut device, mut number, mut bytes) = (9, 0, 0);
    let mut name: [c_char; 10] = [1; 10];
    // SAFETY: outputs are locals.
    unsafe {
        ok(cuDeviceGet(&mut device, 1));
        assert_eq!(device, 1);
        status(
            cuDeviceGet(&mut device, 2),
            CUresult::CUDA_ERROR_INVALID_DEVICE,
        );
        status(
            cuDeviceGet(&mut device, -1),
            CUresult::CUDA_ERROR_INVALID_DEVICE,
        );
        ok(cuDeviceGetName(name.as_mut_ptr(), 10, 0));
        assert_eq!(CStr::from_ptr(name.as_ptr()), c"Simulated");
        ok(cuDeviceTotalMem_v2(&mut bytes, 1));
        assert_eq!(bytes, 1 << 30);
        ok(cuDeviceCanAccessPeer(&mut number, 0, 1));
        assert_eq!(number, 1);
        ok(cuDeviceCanAccessPeer(&mut number, 1, 1));
        assert_eq!(number, 0);
    }
    assert_eq!(virtual_memory(), 1);
    let mut granularity = 0;
    let option = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    // SAFETY: outputs are locals.
    ok(unsafe { cuMemGetAllocationGranularity(&mut granularity, &properties(1), option) });
    assert_eq!(granularity, 2 << 20);
    drop(rig);
    let _rig = Rig::new(Config {
        virtual_memory: false,
        ..Config::default()
    });
    assert_eq!(virtual_memory(), 0);
    status(try_create(0, CHUNK), CUresult::CUDA_ERROR_NOT_SUPPORTED);
    alloc(1);
}

fn virtual_memory() -> c_int {
    let wish = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    let mut number = 9;
    // SAFETY: outputs are locals.
    ok(unsafe { cuDeviceGetAttribute(&mut number, wish, 0) });
    number
}

#[test]
fn status_names() {
    let mut name = std::ptr::null();
    // SAFETY: outputs are locals; names are C strings.
    unsafe {
        ok(cuGetErrorName(2, &mut name));
        assert_eq!(CStr::from_ptr(name), c"CUDA_ERROR_OUT_OF_MEMORY");
        invalid(cuGetErrorName(123_456, &mut name));
        assert!(name.is_null());
    }
}

fn current() -> CUcontext {
    let mut context = null_mut();
    // SAFETY: outputs are locals.
    ok(unsafe { cuCtxGetCurrent(&mut context) });
    context
}

#[test]
fn context_stack_per_thread() {
    let rig = Rig::new(Config {
        devices: 2,
        ..Config::default()
    });
    let first = current();
    let (mut second, mut popped) = (null_mut(), null_mut());
    // SAFETY: outputs are locals.
    unsafe {
        ok(cuDevicePrimaryCtxRetain(&mut second, 1));
        assert_ne!(first, second);
        ok(cuCtxPushCurrent_v2(second));
        assert_eq!(current(), second);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _bound = rig.machine.bind();
                assert!(current().is_null());
            });
        });
        ok(cuCtxPopCurrent_v2(&mut popped));
        assert_eq!((popped, current()), (second, first));
        ok(cuCtxSetCurrent(second));
        assert_eq!(current(), second);
        ok(cuCtxSetCurrent(null_mut()));
        assert!(current().is_null());
        status(
            cuCtxPopCurrent_v2(&mut popped),
            CUresult::CUDA_ERROR_INVALID_CONTEXT,
        );
        status(
            cuCtxPushCurrent_v2(null_mut()),
            CUresult::CUDA_ERROR_INVALID_CONTEXT,
        );
        let nonsense = without_provenance_mut(0x1234);
        status(
            cuCtxSetCurrent(nonsense),
            CUresult::CUDA_ERROR_INVALID_CONTEXT,
        );
    }
}

#[test]
fn context_ends_with_the_last_release() {
    let rig = Rig::held();
    let (address, chunk) = (alloc(1000), mapped(CHUNK));
    let stream = stream();
    ok(fill(address, 1, 1000, stream));
    let mut again = null_mut();
    // SAFETY: outputs are locals.
    unsafe {
        ok(cuDevicePrimaryCtxRetain(&mut again, 0));
        ok(cuDevicePrimaryCtxRelease_v2(0));
        assert_eq!(rig.machine.used(0), 1024 + CHUNK);
        ok(cuDevicePrimaryCtxRelease_v2(0));
        status(
            cuCtxSynchronize(),
            CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
        );
        status(
            cuDevicePrimaryCtxRelease_v2(0),
            CUresult::CUDA_ERROR_INVALID_CONTEXT,
        );
        assert_eq!(rig.machine.used(0), CHUNK);
        ok(cuDevicePrimaryCtxRetain(&mut again, 0));
        status(
            cuStreamSynchronize(stream),
            CUresult::CUDA_ERROR_INVALID_HANDLE,
        );
    }
    rig.one_violation("destroyed");
    ok(unmap(chunk, CHUNK));
}

#[test]
fn machines_are_separate_and_nest() {
    let outer = Rig::new(Config::default());
    let context = current();
    {
        let inner = Rig::new(Config {
            memory: CHUNK,
            ..Config::default()
        });
        alloc(512);
        assert_eq!((inner.machine.used(0), outer.machine.used(0)), (512, 0));
    }
    assert_eq!(current(), context);
    alloc(512);
    assert_eq!(outer.machine.used(0), 512);
}

#[test]
fn machine_of_an_unbound_thread_is_the_default() {
    std::thread::spawn(|| {
        let before = Machine::current().calls("cuInit");
        // SAFETY: has no pointers.
        ok(unsafe { cuInit(0) });
        assert_eq!(Machine::current().calls("cuInit"), before + 1);
        let own = Machine::new(Config {
            devices: 3,
            ..Config::default()
        });
        Machine::make_default(own.clone());
        let mut count = 0;
        // SAFETY: outputs are locals.
        unsafe {
            ok(cuInit(0));
            ok(cuDeviceGetCount(&mut count));
        }
        assert_eq!((count, own.calls("cuInit")), (3, 1));
    })
    .join()
    .unwrap();
}

#[test]
#[should_panic(expected = "destroyed or never created")]
fn violation_not_looked_at_panics_with_the_last_guard() {
    let rig = Rig::new(Config::default());
    let more = rig.machine.bind();
    query(without_provenance_mut(0x70));
    drop(more);
    drop(rig);
}
