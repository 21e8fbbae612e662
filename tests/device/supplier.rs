//! Private pools whose memory a supplier allocates (`torch.cuda.memory.CUDAPluggableAllocator` in a
//! `MemPool`).

use crate::harness::gpu::{Bench, Gpu, MIB, ok};
use concertina_engine::device::{OutOfMemory, PoolRoute, Supplier};
use concertina_engine::settings::Settings;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

const POOL: (u64, u64) = (0, 7);

/// Supplies memory of the driver, up to `most` bytes at a time.
struct Source {
    gpu: Gpu,
    most: u64,
    /// What is out: sizes by address.
    out: Mutex<BTreeMap<u64, u64>>,
}

impl Source {
    fn ranges(&self) -> Vec<Range<u64>> {
        let out = self.out.lock().expect("no panic");
        out.iter()
            .map(|(start, size)| *start..start + size)
            .collect()
    }

    fn sizes(&self) -> Vec<u64> {
        let mut sizes: Vec<u64> = self.ranges().iter().map(|it| it.end - it.start).collect();
        sizes.sort_unstable();
        sizes
    }

    fn has(&self, address: u64, size: u64) -> bool {
        let is_in = |it: &Range<u64>| it.start <= address && address + size <= it.end;
        self.ranges().iter().any(is_in)
    }
}

impl Supplier for Source {
    fn allocate(&self, bytes: u64) -> Option<u64> {
        let mut out = self.out.lock().expect("no panic");
        if out.values().sum::<u64>() + bytes > self.most {
            return None;
        }
        let mut address = 0;
        // SAFETY: `address` outlives the call.
        ok(unsafe { (self.gpu.functions.cuMemAlloc_v2)(&mut address, bytes as usize) });
        out.insert(address, bytes);
        Some(address)
    }

    fn free(&self, address: u64) {
        let known = self.out.lock().expect("no panic").remove(&address);
        assert!(known.is_some(), "{address:#x} is not out");
        // SAFETY: allocated above, and not freed.
        ok(unsafe { (self.gpu.functions.cuMemFree_v2)(address) });
    }
}

/// A bench with a pool of what a source supplies, and the pool's one user.
fn bench(settings: Settings, most: u64) -> (Bench, Arc<Source>) {
    let bench = Bench::new(settings);
    let source = Arc::new(Source {
        gpu: bench.gpu.clone(),
        most,
        out: Mutex::default(),
    });
    bench.device().retain_pool(POOL, Some(source.clone()));
    (bench, source)
}

/// Allocates from the pool, which is supplied with what it misses.
fn allocate(bench: &Bench, bytes: u64, stream: u64) -> Result<u64, Box<OutOfMemory>> {
    let device = bench.device();
    device.begin_pool(PoolRoute {
        pool: POOL,
        filter: Box::new(|_| true),
    });
    let address = loop {
        match device.allocate(bytes as usize, stream) {
            Ok(address) => break Ok(bench.adopt(address, bytes, stream)),
            Err(shortage) => {
                if let Err(shortage) = device.supply(shortage) {
                    break Err(shortage);
                }
            }
        }
    };
    device.end_pool(POOL);
    device.release_pool(POOL);
    assert_eq!(device.check(), Ok(()));
    address
}

fn in_every_mode(body: impl Fn(Settings)) {
    for expandable_segments in [true, false] {
        body(Settings {
            expandable_segments,
            ..Settings::default()
        });
    }
}

#[test]
fn supplier_memory_is_held_until_the_pool_is_released() {
    in_every_mode(|settings| {
        let (bench, source) = bench(settings, u64::MAX);
        let stream = bench.gpu.stream();
        let of_shared_arena = bench.allocate(3 * MIB, stream);
        let small = allocate(&bench, 600, stream).expect("memory");
        let large = allocate(&bench, 3 * MIB, stream).expect("memory");
        assert_eq!(source.sizes(), [2 * MIB, 20 * MIB]);
        assert!(source.has(small, 1024) && source.has(large, 3 * MIB));
        assert!(!source.has(of_shared_arena, 1));
        let held = bench.reserved();
        bench.free(large);
        let again = allocate(&bench, 3 * MIB, stream).expect("memory");
        assert_eq!((again, bench.reserved()), (large, held));
        bench.free(again);
        bench.device().empty_cache();
        bench.device().return_supplied();
        assert_eq!(source.sizes().len(), 2, "a pool in use keeps its memory");
        // The pool goes before the last of its blocks.
        bench.device().release_pool(POOL);
        bench.device().return_supplied();
        assert_eq!(source.sizes(), [2 * MIB]);
        bench.free(small);
        bench.free(of_shared_arena);
        bench.device().empty_cache();
        assert_eq!(
            source.sizes(),
            [2 * MIB],
            "nothing is called under the lock"
        );
        bench.device().return_supplied();
        assert!(source.sizes().is_empty());
        bench.finish();
    });
}

#[test]
fn supplier_that_refuses_is_out_of_memory_and_changes_nothing() {
    in_every_mode(|settings| {
        let (bench, source) = bench(settings, 40 * MIB);
        let stream = bench.gpu.stream();
        let block = allocate(&bench, 30 * MIB, stream).expect("memory");
        let refused = allocate(&bench, 30 * MIB, stream).expect_err("too much");
        assert_eq!(refused.pool, POOL);
        assert!(refused.to_string().starts_with("CUDA out of memory."));
        assert_eq!(bench.device().figures().counters.ooms, 1);
        let second = allocate(&bench, 9 * MIB, stream).expect_err("20 MiB are too much, too");
        assert_eq!(second.shortage.asked, 9 * MIB);
        // What the pool has it hands out.
        bench.free(block);
        let block = allocate(&bench, 30 * MIB, stream).expect("memory");
        assert!(source.has(block, 30 * MIB));
        bench.free(block);
        bench.device().release_pool(POOL);
        bench.device().return_supplied();
        assert!(source.sizes().is_empty());
        bench.finish();
    });
}

/// The supplier has no more, and what is free is another stream's, which is not done with it.
#[test]
fn supplier_pool_waits_for_another_stream_before_out_of_memory() {
    in_every_mode(|settings| {
        let (bench, source) = bench(settings, 12 * MIB);
        let [stream, other] = [(); 2].map(|()| bench.gpu.stream());
        let block = allocate(&bench, 12 * MIB, stream).expect("memory");
        bench.gpu.late();
        bench.gpu.fill(block, 12 * MIB, 1, stream);
        bench.free(block);
        let again = allocate(&bench, 12 * MIB, other).expect("memory that was freed");
        assert_eq!((again, source.sizes()), (block, vec![12 * MIB]));
        assert_eq!(bench.device().figures().counters.ooms, 0);
        bench.free(again);
        bench.device().release_pool(POOL);
        bench.device().return_supplied();
        assert!(source.sizes().is_empty());
        bench.finish();
    });
}

#[test]
fn supplier_memory_counts_to_the_limit() {
    let settings = Settings {
        limit: Some(64 << 20),
        ..Settings::default()
    };
    let (bench, source) = bench(settings, u64::MAX);
    let stream = bench.gpu.stream();
    let block = allocate(&bench, 40 * MIB, stream).expect("memory");
    allocate(&bench, 40 * MIB, stream).expect_err("over the limit");
    let of_shared_arena = bench.device().allocate(40 << 20, stream);
    assert!(of_shared_arena.is_err(), "the limit counts both");
    bench.free(block);
    bench.device().release_pool(POOL);
    bench.device().return_supplied();
    assert!(source.sizes().is_empty());
    let of_shared_arena = bench.allocate(40 * MIB, stream);
    bench.free(of_shared_arena);
    bench.finish();
}
