//! What a program asked of CUDA's memory functions, where the library stands in for them: how often,
//! for how much, and how long that took.
//!
//! Each thread counts for itself, in lines of memory that no other thread writes: about two nanoseconds
//! a call. Time is taken only where `CONCERTINA_STATS` asks for statistics, by the processor's time stamp
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

        /// Their names, and whether they hand out memory.
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

/// What one thread has counted of one function.
#[derive(Default)]
struct Counted {
    count: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
    ticks: AtomicU64,
}

/// The same, added up.
#[derive(Clone, Copy, Default)]
struct Sum {
    count: u64,
    failed: u64,
    bytes: u64,
    ticks: u64,
}

impl Sum {
    fn add(&mut self, more: &Sum) {
        self.count += more.count;
        self.failed += more.failed;
        self.bytes += more.bytes;
        self.ticks += more.ticks;
    }
}

impl Counted {
    #[inline]
    fn add(&self, more: &Sum, shared: bool) {
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

    fn sum(&self) -> Sum {
        Sum {
            count: self.count.load(Relaxed),
            failed: self.failed.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            ticks: self.ticks.load(Relaxed),
        }
    }
}

/// What one thread has counted, and threads before it that have ended.
#[derive(Default)]
#[repr(align(128))]
struct Sheet {
    counted: [Counted; FUNCTIONS.len()],
    /// Several threads write to it: those whose end has begun.
    shared: bool,
}

/// Every sheet there is, and those whose threads have ended. Sheets are never given back, so that
/// nothing is lost: there are as many as threads at one time.
#[derive(Default)]
struct Sheets {
    all: Vec<&'static Sheet>,
    free: Vec<&'static Sheet>,
    late: Option<&'static Sheet>,
}

static SHEETS: Mutex<Sheets> = Mutex::new(Sheets {
    all: Vec::new(),
    free: Vec::new(),
    late: None,
});

thread_local! {
    // No destructor: a thread that is ending frees memory, too.
    static SHEET: Cell<Option<&'static Sheet>> = const { Cell::new(None) };
    static KEEPER: Keeper = const { Keeper };
}

/// Hands the thread's sheet on when the thread ends.
struct Keeper;

impl Drop for Keeper {
    fn drop(&mut self) {
        if fork::in_forked_child() {
            return;
        }
        let mut sheets = SHEETS.lock().unwrap_or_else(PoisonError::into_inner);
        let late = sheets.late();
        sheets.free.extend(SHEET.replace(Some(late)));
    }
}

impl Sheets {
    fn new_sheet(&mut self, shared: bool) -> &'static Sheet {
        let sheet = Box::leak(Box::new(Sheet {
            shared,
            ..Sheet::default()
        }));
        self.all.push(sheet);
        sheet
    }

    /// The sheet of threads whose end has begun.
    fn late(&mut self) -> &'static Sheet {
        let late = self.late.unwrap_or_else(|| self.new_sheet(true));
        self.late.insert(late)
    }
}

#[cold]
fn take_sheet() -> &'static Sheet {
    let mut sheets = SHEETS.lock().unwrap_or_else(PoisonError::into_inner);
    let sheet = match KEEPER.try_with(|_| ()) {
        Ok(()) => match sheets.free.pop() {
            Some(sheet) => sheet,
            None => sheets.new_sheet(false),
        },
        Err(_) => sheets.late(),
    };
    SHEET.set(Some(sheet));
    sheet
}

/// Calls are also counted by who made them.
static BY_CALLER: AtomicBool = AtomicBool::new(false);
static CALLERS: Mutex<BTreeMap<&str, [Sum; FUNCTIONS.len()]>> = Mutex::new(BTreeMap::new());

/// Has calls counted by who makes them, too, from now on.
pub fn count_by_caller() {
    BY_CALLER.store(true, Relaxed);
}

/// A call that is being made.
pub struct Started(u64);

/// A call begins.
#[inline]
pub fn start() -> Started {
    match is_timed() {
        true => Started(ticks()),
        false => Started(0),
    }
}

impl Started {
    /// It is over, with this status, and has handed out `bytes` if it succeeded; `caller` tells who made
    /// it, and is asked where that is counted. Not to be called in a process that was forked from one
    /// that used the library.
    #[inline]
    pub fn done(
        self,
        function: Function,
        status: u32,
        bytes: impl FnOnce() -> usize,
        caller: impl FnOnce() -> &'static str,
    ) {
        let this = Sum {
            count: 1,
            failed: u64::from(status != 0),
            bytes: if status == 0 { bytes() as u64 } else { 0 },
            // Another processor's counter may be a little behind.
            ticks: match self.0 {
                0 => 0,
                start => ticks().saturating_sub(start),
            },
        };
        let sheet = SHEET.get().unwrap_or_else(take_sheet);
        sheet.counted[function as usize].add(&this, sheet.shared);
        if BY_CALLER.load(Relaxed) {
            let caller = caller();
            let mut callers = CALLERS.lock().unwrap_or_else(PoisonError::into_inner);
            callers.entry(caller).or_default()[function as usize].add(&this);
        }
    }
}

/// The processor's time stamp counter: it counts at one pace, whatever the processor's clock does.
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

/// `None` where time was not taken.
fn nanoseconds_of_tick() -> Option<f64> {
    let (instant, tick) = EPOCH.get()?;
    let elapsed = ticks().saturating_sub(*tick).max(1);
    Some(instant.elapsed().as_nanos() as f64 / elapsed as f64)
}

/// What was called so far, by function.
pub fn json() -> Value {
    let sheets = SHEETS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut sums = [Sum::default(); FUNCTIONS.len()];
    for sheet in &sheets.all {
        for (sum, counted) in sums.iter_mut().zip(&sheet.counted) {
            sum.add(&counted.sum());
        }
    }
    functions_json(&sums)
}

/// The same by who called, then by function; null where that is not counted.
pub fn callers_json() -> Value {
    if !BY_CALLER.load(Relaxed) {
        return Value::Null;
    }
    let callers = CALLERS.lock().unwrap_or_else(PoisonError::into_inner);
    let callers = callers.iter();
    Value::Object(
        callers
            .map(|(name, sums)| (name.to_string(), functions_json(sums)))
            .collect(),
    )
}

fn functions_json(sums: &[Sum; FUNCTIONS.len()]) -> Value {
    let each = nanoseconds_of_tick();
    let called = FUNCTIONS.iter().zip(sums).filter(|(_, sum)| sum.count > 0);
    let functions = called.map(|((name, allocates), sum)| {
        let mut object = Map::new();
        object.insert("count".into(), sum.count.into());
        object.insert("failed".into(), sum.failed.into());
        if *allocates {
            object.insert("bytes".into(), sum.bytes.into());
        }
        let nanoseconds = each.map(|each| (sum.ticks as f64 * each) as u64);
        object.insert("nanoseconds".into(), json!(nanoseconds));
        (name.to_string(), Value::Object(object))
    });
    Value::Object(functions.collect())
}
