//! Out of memory: every step above the pool's own ladder, in the order tried, and retries around what is not
//! the pool's.

use crate::core::{Allocated, Gpu, Origin, Refusal, SHARED_ARENA, Shortage};
use crate::device::oom_report::OutOfMemory;
use crate::device::stream_cache::StreamCache;
use crate::device::{Device, Request, State, external_cache};

impl Device {
    /// The slow path of every allocation from the pool: no free block that is known fits `bytes`.
    ///
    /// `held` is the requesting stream's cache, which is empty, if it has one. What was tried is counted by
    /// `alloc_retries`, `syncs` and `ooms`, for the allocator's own requests and for CUDA's separately.
    #[cold]
    #[inline(never)]
    pub(super) fn allocate_slow(
        &self,
        state: &mut State,
        held: Option<&StreamCache>,
        request: &Request,
        bytes: u64,
    ) -> Result<Allocated, Box<OutOfMemory>> {
        let &Request {
            size,
            key,
            origin,
            arena,
        } = request;
        let requested = size as u64;
        let tried = state.pool.counters().counts();

        // 1. Blocks in the other streams' caches go back to the pool.
        self.stream_caches.clear_all(held, &mut state.pool);

        // 2. The pool's ladder: reuse across streams, remapping, growth, waiting (counted as
        //    `alloc_retries`).
        let attempt = |state: &mut State| state.pool.allocate(bytes, requested, key, arena, origin);
        let mut result = attempt(state);

        // 3. Wholly free chunks of other arenas go back to the driver, after a wait (counted as `syncs`). Not
        //    where the arena's own supplier has to be asked first.
        let is_short = |result: &Result<_, Shortage>| {
            let refusal = result.as_ref().err().map(|it: &Shortage| it.refusal);
            refusal.is_some_and(|it| !matches!(it, Refusal::Unsupplied(_)))
        };
        if is_short(&result) && state.pool.trim_all(Some(key)) > 0 {
            result = attempt(state);
        }

        // 4. The process's external cache goes back to the driver. Of no use against a limit.
        let refused = |it: &Shortage| it.refusal == Refusal::OutOfMemory;
        if result.as_ref().is_err_and(refused) && external_cache::release_all() {
            result = attempt(state);
        }

        // 5. Deferred frees, behind a wait for the device (counted as `syncs`).
        if is_short(&result) && self.reclaim_relaxed_locked(state) {
            state.pool.counters_mut().syncs += 1;
            if arena != SHARED_ARENA {
                state.pool.trim_all(Some(key));
            }
            result = attempt(state);
        }

        // 6. Free memory of private pools that were set to be used on out of memory. It is idle by now.
        if result.is_err() && arena == SHARED_ARENA {
            let State { private, pool, .. } = state;
            let mut fallbacks = private.iter().filter(|it| it.use_on_oom).map(|it| it.arena);
            let block = fallbacks
                .find_map(|arena| pool.allocate_free(bytes, requested, key, arena, origin));
            result = block.map_or(result, Ok);
        }

        // 7. The report (counted as `ooms`).
        let result =
            result.map_err(|shortage| self.out_of_memory(state, requested, shortage, arena));
        if origin == Origin::Cuda {
            state.pool.counters_mut().attribute_to_cuda(tried);
        }
        result
    }

    /// Waits for the device and frees every deferred block to the pool. False if there is none, or waiting is
    /// not possible.
    pub fn reclaim_relaxed(&self) -> bool {
        self.reclaim_relaxed_locked(&mut self.lock_flushed())
    }

    fn reclaim_relaxed_locked(&self, state: &mut State) -> bool {
        let State { depot, pool, .. } = state;
        self.magazines.empty(depot, pool);
        let waited = depot.bytes() > 0 && pool.gpu_mut().synchronize();
        if waited {
            depot.free_all(pool);
        }
        waited
    }

    /// The slow path of a block that comes from the driver itself (`uncached`): steps 3 to 5, each of which returns
    /// memory to the driver.
    #[cold]
    #[inline(never)]
    pub(super) fn allocate_uncached_slow(
        &self,
        state: &mut State,
        bytes: u64,
        refusal: Refusal,
    ) -> Result<u64, Refusal> {
        let mut result = Err(refusal);
        if state.pool.trim_all(None) > 0 {
            result = state.pool.gpu_mut().allocate(bytes);
        }
        if result == Err(Refusal::OutOfMemory) && external_cache::release_all() {
            result = state.pool.gpu_mut().allocate(bytes);
        }
        if result.is_err() && self.reclaim_relaxed_locked(state) {
            state.pool.trim_all(None);
            result = state.pool.gpu_mut().allocate(bytes);
        }
        result
    }

    /// Releases all that can be released to the driver, after waiting for the device: where the driver has no
    /// memory for an allocation that is not the pool's.
    pub fn release_all(&self) {
        self.reclaim_relaxed();
        self.empty_cache();
    }

    /// Allocates again (`allocate`) after a shortage, for as long as the private pool's own allocator
    /// supplies what is missing: another thread may take it first.
    ///
    /// The supplier is called with no lock held, and may throw a C++ exception through here.
    pub fn retry_supplied<T>(
        &self,
        mut shortage: Box<OutOfMemory>,
        allocate: impl Fn() -> Result<T, Option<Box<OutOfMemory>>>,
    ) -> Result<T, Option<Box<OutOfMemory>>> {
        loop {
            self.supply(shortage)?;
            match allocate() {
                Err(Some(again)) => shortage = again,
                result => return result,
            }
        }
    }
}
