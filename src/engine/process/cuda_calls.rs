//! Counts of the program's calls to CUDA's memory functions where the library is preloaded: number, bytes,
//! time.
//!
//! Each thread has counters of its own, in cache lines that no other thread writes: about two nanoseconds a
//! call. Calls are timed only if `CONCERTINA_STATS` asks for statistics, by the processor's time stamp
//! counter, which is read twice a call.

use crate::util::fork;
use serde_json::{Map, Value, json};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

macro_rules! functions {
    ($($variant:ident = $name:literal, $kind:ident;)*) => {
        /// The functions that are counted, by the driver's names for them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub enum Function { $($variant,)* }

        /// Their names, and whether they allocate.
        const FUNCTIONS: &[(&str, bool)] = &[$(($name, functions!(@ $kind)),)*];
    };
    (@ allocates) => { true };
    (@ frees) => { false };
}

functions! {
    Alloc = "cuMemAlloc", allocates;
    AllocPitch = "cuMemAllocPitch", allocates;
    Free = "cuMemFree", frees;
    AllocAsync = "cuMemAllocAsync", allocates;
    AllocFromPoolAsync = "cuMemAllocFromPoolAsync", allocates;
    FreeAsync = "cuMemFreeAsync", frees;
}

/// Counters of one function in one thread.
#[derive(Default)]
struct Counters {
    count: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
    ticks: AtomicU64,
}

/// Totals of one function, or what one call adds to them.
#[derive(Clone, Copy, Default)]
struct Totals {
    count: u64,
    failed: u64,
    bytes: u64,
    ticks: u64,
}

impl Totals {
    fn add(&mut self, more: &Totals) {
        self.count += more.count;
        self.failed += more.failed;
        self.bytes += more.bytes;
        self.ticks += more.ticks;
    }
}

impl Counters {
    /// With `shared`, another thread may write to them at the same time.
    #[inline]
    fn add(&self, more: &Totals, shared: bool) {
        for (to, value) in [
            (&self.count, more.count),
            (&self.failed, more.failed),
            (&self.bytes, more.bytes),
            (&self.ticks, more.ticks),
        ] {
            match shared {
                true => _ = to.fetch_add(value, Relaxed),
                false => to.store(to.load(Relaxed) + value, Relaxed),
            }
        }
    }

    fn totals(&self) -> Totals {
        Totals {
            count: self.count.load(Relaxed),
            failed: self.failed.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            ticks: self.ticks.load(Relaxed),
        }
    }
}

/// The counters of one thread, which it took over from a thread that has ended, if there was one.
#[derive(Default)]
#[repr(align(128))]
struct ThreadCounters {
    functions: [Counters; FUNCTIONS.len()],
    /// They are [`Registry::of_ending_threads`].
    shared: bool,
}

/// The counters of all threads. They are never freed, so that no count is lost: there are as many as there
/// were threads at one time.
#[derive(Default)]
struct Registry {
    all: Vec<&'static ThreadCounters>,
    /// Those whose thread has ended, for new threads to take over.
    free: Vec<&'static ThreadCounters>,
    /// Shared by threads whose thread-locals are being destroyed.
    of_ending_threads: Option<&'static ThreadCounters>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry {
    all: Vec::new(),
    free: Vec::new(),
    of_ending_threads: None,
});

thread_local! {
    // No destructor: a thread that is ending may free memory.
    static COUNTERS: Cell<Option<&'static ThreadCounters>> = const { Cell::new(None) };
    static AT_THREAD_EXIT: AtThreadExit = const { AtThreadExit };
}

/// Releases the thread's counters when the thread ends.
struct AtThreadExit;

impl Drop for AtThreadExit {
    fn drop(&mut self) {
        if fork::in_forked_child() {
            return;
        }
        let mut registry = REGISTRY.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = registry.of_ending_threads();
        registry.free.extend(COUNTERS.replace(Some(shared)));
    }
}

impl Registry {
    fn add(&mut self, shared: bool) -> &'static ThreadCounters {
        let counters = Box::leak(Box::new(ThreadCounters {
            shared,
            ..ThreadCounters::default()
        }));
        self.all.push(counters);
        counters
    }

    fn of_ending_threads(&mut self) -> &'static ThreadCounters {
        let counters = self.of_ending_threads.unwrap_or_else(|| self.add(true));
        self.of_ending_threads.insert(counters)
    }
}

/// The first count of a thread.
#[cold]
fn register_thread() -> &'static ThreadCounters {
    let mut registry = REGISTRY.lock().unwrap_or_else(PoisonError::into_inner);
    let counters = match AT_THREAD_EXIT.try_with(|_| ()) {
        Ok(()) => match registry.free.pop() {
            Some(counters) => counters,
            None => registry.add(false),
        },
        Err(_) => registry.of_ending_threads(),
    };
    COUNTERS.set(Some(counters));
    counters
}

/// Calls are also counted by calling library.
static BY_CALLER: AtomicBool = AtomicBool::new(false);
static CALLERS: Mutex<BTreeMap<&str, [Totals; FUNCTIONS.len()]>> = Mutex::new(BTreeMap::new());

/// Counts calls by calling library, too, from now on.
pub fn count_by_caller() {
    BY_CALLER.store(true, Relaxed);
}

/// A call under way: the tick at which it began, or 0 if calls are not timed.
pub struct Call(u64);

/// A call begins.
#[inline]
pub fn start() -> Call {
    match is_timed() {
        true => Call(ticks()),
        false => Call(0),
    }
}

impl Call {
    /// Counts the call, which has returned `status`; `bytes` is called if it succeeded and returns what it
    /// allocated, `caller` if calls are counted by calling library and names it. Not to be called in a forked
    /// child.
    #[inline]
    pub fn count(
        self,
        function: Function,
        status: u32,
        bytes: impl FnOnce() -> usize,
        caller: impl FnOnce() -> &'static str,
    ) {
        let this = Totals {
            count: 1,
            failed: u64::from(status != 0),
            bytes: if status == 0 { bytes() as u64 } else { 0 },
            // The counter of another processor may be a little behind.
            ticks: match self.0 {
                0 => 0,
                start => ticks().saturating_sub(start),
            },
        };
        let counters = COUNTERS.get().unwrap_or_else(register_thread);
        counters.functions[function as usize].add(&this, counters.shared);
        if BY_CALLER.load(Relaxed) {
            let caller = caller();
            let mut callers = CALLERS.lock().unwrap_or_else(PoisonError::into_inner);
            callers.entry(caller).or_default()[function as usize].add(&this);
        }
    }
}

/// The processor's time stamp counter, whose rate does not change with the processor's clock.
#[inline]
fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this kind has the instruction.
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: Linux lets every program read this register.
    unsafe {
        let ticks: u64;
        std::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack));
        ticks
    }
}

/// Both clocks when [`start_clock`] was called.
static EPOCH: OnceLock<(Instant, u64)> = OnceLock::new();

/// Has calls timed from now on. To be called once, early: the length of a tick is measured from here on.
pub fn start_clock() {
    EPOCH.get_or_init(|| (Instant::now(), ticks()));
}

#[inline]
fn is_timed() -> bool {
    EPOCH.get().is_some()
}

/// `None` if calls are not timed.
fn nanoseconds_of_tick() -> Option<f64> {
    let (instant, tick) = EPOCH.get()?;
    let elapsed = ticks().saturating_sub(*tick).max(1);
    Some(instant.elapsed().as_nanos() as f64 / elapsed as f64)
}

/// The counts so far, by function.
pub fn json() -> Value {
    let registry = REGISTRY.lock().unwrap_or_else(PoisonError::into_inner);
    let mut totals = [Totals::default(); FUNCTIONS.len()];
    for thread in &registry.all {
        for (total, counters) in totals.iter_mut().zip(&thread.functions) {
            total.add(&counters.totals());
        }
    }
    functions_json(&totals)
}

/// The counts by calling library, then by function; null if calls are not counted so.
pub fn callers_json() -> Value {
    if !BY_CALLER.load(Relaxed) {
        return Value::Null;
    }
    let callers = CALLERS.lock().unwrap_or_else(PoisonError::into_inner);
    let callers = callers.iter();
    Value::Object(
        callers
            .map(|(name, totals)| (name.to_string(), functions_json(totals)))
            .collect(),
    )
}

fn functions_json(totals: &[Totals; FUNCTIONS.len()]) -> Value {
    let of_tick = nanoseconds_of_tick();
    let called = FUNCTIONS.iter().zip(totals).filter(|(_, it)| it.count > 0);
    let functions = called.map(|((name, allocates), total)| {
        let mut object = Map::new();
        object.insert("count".into(), total.count.into());
        object.insert("failed".into(), total.failed.into());
        if *allocates {
            object.insert("bytes".into(), total.bytes.into());
        }
        let nanoseconds = of_tick.map(|of_tick| (total.ticks as f64 * of_tick) as u64);
        object.insert("nanoseconds".into(), json!(nanoseconds));
        (name.to_string(), Value::Object(object))
    });
    Value::Object(functions.collect())
}
