//! Machines as tests use them, and the machine that a thread's driver calls act on.

use crate::config::Config;
use crate::pace::Pace;
use crate::run::Session;
use crate::state::State;
use cudarc::driver::sys::{CUdeviceptr, CUresult, CUstream};
use parking_lot::{Condvar, Mutex, RwLock};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// What all clones of a machine share.
pub(crate) struct Inner {
    pub state: Mutex<State>,
    /// Signalled when a host function has returned.
    pub progress: Condvar,
    /// Guards alive, over all threads.
    bound: AtomicUsize,
}

/// One simulated computer with its GPUs. Clones are the same machine.
#[derive(Clone)]
pub struct Machine(Arc<Inner>);

thread_local! {
    /// The machines bound on this thread, the current one last. Without a destructor, so that
    /// driver calls from destructors of other thread-locals still find it.
    static BOUND: ManuallyDrop<RefCell<Vec<Machine>>> =
        const { ManuallyDrop::new(RefCell::new(Vec::new())) };
}

/// The machine of threads that have bound none.
static DEFAULT: RwLock<Option<Machine>> = RwLock::new(None);

impl Machine {
    /// A new machine, on which nothing has happened: not even `cuInit`.
    ///
    /// # Panics
    /// If the configuration makes no sense: more than 64 devices, or a granularity that is not a
    /// power of two of at least 4096.
    pub fn new(config: Config) -> Machine {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        assert!(config.devices <= 64, "at most 64 devices");
        assert!(
            config.granularity.is_power_of_two() && config.granularity >= 4096,
            "the granularity is a power of two of at least a page"
        );
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Machine(Arc::new(Inner {
            state: Mutex::new(State::new(number, config)),
            progress: Condvar::new(),
            bound: AtomicUsize::new(0),
        }))
    }

    /// Makes this the machine of the current thread until the guard is dropped. Guards nest, and
    /// several threads may bind one machine.
    pub fn bind(&self) -> Bound {
        self.0.bound.fetch_add(1, Ordering::Relaxed);
        BOUND.with(|bound| bound.borrow_mut().push(self.clone()));
        Bound {
            machine: self.clone(),
            here: PhantomData,
        }
    }

    /// Makes this the machine of all threads that have bound none.
    pub fn make_default(machine: Machine) {
        *DEFAULT.write() = Some(machine);
    }

    /// The machine of the current thread: the one bound last, else the process's default, which is
    /// made from [`Config::default`] at first use.
    pub fn current() -> Machine {
        if let Some(machine) = BOUND.with(|bound| bound.borrow().last().cloned()) {
            return machine;
        }
        if let Some(machine) = &*DEFAULT.read() {
            return machine.clone();
        }
        let mut default = DEFAULT.write();
        default
            .get_or_insert_with(|| Machine::new(Config::default()))
            .clone()
    }

    /// Locks the machine for a driver call or a test's request.
    pub(crate) fn session(&self) -> Session<'_> {
        Session::new(&self.0)
    }

    // When work runs.

    /// Changes when queued work executes. To [`Pace::Immediate`], all of it executes now; to
    /// [`Pace::Late`], it falls due as if enqueued now.
    pub fn set_pace(&self, pace: Pace) {
        self.session().set_pace(pace);
    }

    /// Executes the next work of a stream, if there is any and nothing it waits for is left; says
    /// whether it did. Events of the whole context pass by themselves.
    pub fn step(&self, stream: CUstream) -> bool {
        let mut session = self.session();
        let Some(slot) = session.test_stream(stream as u64) else {
            return false;
        };
        let stepped = session.step(slot);
        let device = session.state.streams.get(slot).device;
        let joining_stream = session.state.streams.joining_stream(device);
        while session.step(joining_stream) {}
        stepped
    }

    /// How much of a stream's work has not been executed.
    pub fn queued(&self, stream: CUstream) -> usize {
        let mut session = self.session();
        let slot = session.test_stream(stream as u64);
        slot.map_or(0, |slot| session.state.streams.queued(slot))
    }

    /// Whether all of a stream's work has been executed.
    pub fn is_done(&self, stream: CUstream) -> bool {
        self.queued(stream) == 0
    }

    /// Executes everything that is queued.
    pub fn run_all(&self) {
        self.session().finish_all(None);
    }

    /// Advances the clock of [`Pace::Late`] by one and executes what falls due. Constant time when
    /// nothing does.
    pub fn tick(&self) {
        let mut session = self.session();
        session.state.pacer.now += 1;
        session.run_due();
    }

    /// How many streams, destroyed ones included, have work that is not done.
    pub fn busy_streams(&self) -> usize {
        self.session().state.streams.active().len()
    }

    /// Begins or ends a capture on a stream. Work enqueued to it meanwhile is treated as any other.
    ///
    /// # Panics
    /// If the handle names no stream.
    pub fn set_capturing(&self, stream: CUstream, capturing: bool) {
        let mut session = self.session();
        let slot = session
            .test_stream(stream as u64)
            .expect("a stream that lives");
        let state = &mut *session.state;
        let was = std::mem::replace(&mut state.streams.get_mut(slot).capturing, capturing);
        state.capturing = state.capturing + usize::from(capturing) - usize::from(was);
    }

    // Checks.

    /// Declares that bytes of mapped memory belong to `owner`, as a harness does once a block is
    /// allocated. Bytes that have a live owner already, by whatever address, are a violation; so
    /// are, from the first claim on, accesses to bytes that have none.
    pub fn claim(&self, address: CUdeviceptr, bytes: u64, owner: u64) {
        self.session().state.claim(address, bytes, owner);
    }

    /// Ends a claim, named by the range it was made with. To be called before the block is freed:
    /// its memory may be unmapped after.
    pub fn disown(&self, address: CUdeviceptr, bytes: u64) {
        self.session().state.disown(address, bytes);
    }

    /// Allows accesses to bytes that nobody owns.
    pub fn unclaimed_ok(&self, ok: bool) {
        self.session().state.unclaimed_ok = ok;
    }

    /// Takes the violations recorded so far, a line each, the oldest first.
    pub fn violations(&self) -> Vec<String> {
        self.session().state.take_violations()
    }

    // Failures on demand.

    /// Makes the `nth` use of a function from now (1 is the next) do nothing and answer `status`.
    ///
    /// # Panics
    /// If there is no such function, or `nth` is 0.
    pub fn fail(&self, name: &str, nth: u64, status: CUresult) {
        self.session().state.failures.plan(name, Some(nth), status);
    }

    /// Makes every use of a function do nothing and answer `status`.
    ///
    /// # Panics
    /// If there is no such function.
    pub fn fail_every(&self, name: &str, status: CUresult) {
        self.session().state.failures.plan(name, None, status);
    }

    /// Forgets all failures that were asked for.
    pub fn clear_failures(&self) {
        self.session().state.failures.clear();
    }

    // Figures.

    /// How often a function was called, failures included.
    ///
    /// # Panics
    /// If there is no such function.
    pub fn calls(&self, name: &str) -> u64 {
        self.session().state.failures.calls(name)
    }

    /// Physical bytes in use on a device.
    pub fn used(&self, device: usize) -> u64 {
        self.session().state.memory.used(device)
    }

    /// The most physical bytes that were ever in use at once on a device, whoever took them: chunks, plain
    /// allocations and those of the driver's pools.
    pub fn most_used(&self, device: usize) -> u64 {
        self.session().state.memory.most_used(device)
    }

    /// Has [`Machine::most_used`] begin anew with what is in use now.
    pub fn reset_most_used(&self) {
        self.session().state.memory.reset_most_used();
    }

    /// How many mappings of `cuMemMap` there are.
    pub fn mappings(&self) -> usize {
        self.session().state.memory.mapped()
    }

    /// How many handles of `cuMemCreate` are not released.
    pub fn handles(&self) -> usize {
        self.session().state.memory.handles()
    }

    /// Bytes of address space in reservations of `cuMemAddressReserve`.
    pub fn reserved_addresses(&self) -> u64 {
        self.session().state.memory.reserved()
    }
}

impl std::fmt::Debug for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.state.try_lock() {
            Some(state) => write!(f, "Machine({:?})", state.config),
            None => f.write_str("Machine(busy)"),
        }
    }
}

/// Keeps a machine the current thread's. When the last guard of a machine goes, violations that no
/// test has taken panic: none can be forgotten.
#[must_use = "the machine is bound until this is dropped"]
pub struct Bound {
    machine: Machine,
    /// The guard stays on its thread.
    here: PhantomData<*const ()>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        BOUND.with(|bound| {
            let mut bound = bound.borrow_mut();
            let mine = |machine: &Machine| Arc::ptr_eq(&machine.0, &self.machine.0);
            if let Some(last) = bound.iter().rposition(mine) {
                bound.remove(last);
            }
        });
        let last = self.machine.0.bound.fetch_sub(1, Ordering::AcqRel) == 1;
        if last && !std::thread::panicking() {
            let violations = self.machine.violations();
            assert!(
                violations.is_empty(),
                "violations:\n{}",
                violations.join("\n")
            );
        }
    }
}
