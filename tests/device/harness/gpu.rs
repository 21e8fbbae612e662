//! A GPU to test on, its streams and its work: the simulated one, or with
//! `CONCERTINA_TEST_DRIVER=cuda` the cards of this machine. The same calls serve both.

use concertina_engine::device::Device;
use concertina_engine::driver::{self, Functions, sys::*};
use concertina_engine::process::allocator::Allocator;
use concertina_engine::settings::Settings;
use concertina_sim::{Bound, Config, Machine, Pace};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::{self, sleep};
use std::time::Duration;

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// The most that a test allocates on a card, which others may use as well.
const SHARE_OF_A_CARD: usize = 6 << 30;

/// A simulated GPU with this many bytes of memory.
pub fn config_with_memory(memory: u64) -> Config {
    Config {
        memory,
        ..Config::default()
    }
}

/// Whether the tests run on a card rather than the simulated GPU.
pub fn on_card() -> bool {
    std::env::var_os("CONCERTINA_TEST_DRIVER").is_some_and(|driver| driver == "cuda")
}

/// The driver and the devices' contexts. Clones are the same; any thread may use it once it has
/// [entered](Gpu::enter).
#[derive(Clone)]
pub struct Gpu {
    pub functions: Functions,
    machine: Option<Machine>,
    contexts: Vec<usize>,
    /// The allocator under test, which is told of streams that come and go.
    allocator: Weak<Allocator>,
}

/// Keeps device 0 the current one of a thread, as the CUDA runtime does.
pub struct Here {
    gpu: Gpu,
    _bound: Option<Bound>,
}

/// An allocator on a GPU, with device 0 current on this thread.
pub struct Bench {
    pub gpu: Gpu,
    pub allocator: Arc<Allocator>,
    /// The blocks of [`Bench::allocate`]: size and stream.
    blocks: RefCell<HashMap<u64, (u64, u64)>>,
    _here: Here,
}

/// Streams whose work stands still until this is dropped.
pub struct Held {
    gpu: Gpu,
    /// On a card, what each stream stands at.
    gates: Vec<(u64, &'static AtomicBool)>,
}

/// What can be made to fail or measured only in the simulation.
impl Bench {
    /// The simulated GPU, for a test that needs what no card can do; prints SKIP on a card.
    pub fn simulated(name: &str, config: Config, settings: Settings) -> Option<Bench> {
        if on_card() {
            println!("SKIP {name}: it needs the simulated GPU");
            return None;
        }
        Some(Bench::on_machine(Machine::new(config), settings))
    }

    fn on_machine(machine: Machine, settings: Settings) -> Bench {
        let bound = machine.bind();
        Bench::over(
            concertina_sim::functions(),
            Some((machine, bound)),
            settings,
        )
    }

    /// The simulated machine; only for tests that are not run on a card.
    pub fn machine(&self) -> &Machine {
        self.gpu.machine.as_ref().expect("a simulated GPU")
    }
}

impl Bench {
    /// The simulated GPU, of the usual make, or a card.
    pub fn new(settings: Settings) -> Bench {
        if !on_card() {
            return Bench::on_machine(Machine::new(Config::default()), settings);
        }
        let limit = settings
            .limit
            .unwrap_or(SHARE_OF_A_CARD)
            .min(SHARE_OF_A_CARD);
        let settings = Settings {
            limit: Some(limit),
            ..settings
        };
        Bench::over(driver::cuda().expect("a CUDA driver"), None, settings)
    }

    /// A GPU machine with `devices` devices; prints SKIP on a machine with fewer cards.
    pub fn with_devices(name: &str, devices: usize, settings: Settings) -> Option<Bench> {
        if !on_card() {
            let config = Config {
                devices,
                peers: true,
                ..Config::default()
            };
            return Some(Bench::on_machine(Machine::new(config), settings));
        }
        let bench = Bench::new(settings);
        let found = bench.gpu.contexts.len();
        if found < devices {
            println!("SKIP {name}: it needs {devices} devices, and there are {found}");
            return None;
        }
        Some(bench)
    }

    fn over(
        functions: Functions,
        simulated: Option<(Machine, Bound)>,
        settings: Settings,
    ) -> Bench {
        let allocator = Allocator::new(functions, settings).expect("a driver with a device");
        let allocator = Arc::new(allocator);
        let mut devices = 0;
        // SAFETY: the driver is initialised; outputs are locals, here and below.
        ok(unsafe { (functions.cuDeviceGetCount)(&mut devices) });
        let contexts = (0..devices)
            .map(|ordinal| {
                let (mut device, mut context) = (0, null_mut());
                // SAFETY: as above.
                unsafe {
                    ok((functions.cuDeviceGet)(&mut device, ordinal));
                    ok((functions.cuDevicePrimaryCtxRetain)(&mut context, device));
                }
                context as usize
            })
            .collect();
        let machine = simulated.as_ref().map(|(machine, _)| machine.clone());
        let gpu = Gpu {
            functions,
            machine,
            contexts,
            allocator: Arc::downgrade(&allocator),
        };
        let here = gpu.enter();
        Bench {
            gpu,
            allocator,
            blocks: RefCell::default(),
            _here: here,
        }
    }

    /// The pool of device 0.
    pub fn device(&self) -> &Device {
        self.allocator.device(0).expect("device 0")
    }

    /// Allocates, panics if that fails, and claims the memory.
    pub fn allocate(&self, bytes: u64, stream: u64) -> u64 {
        let address = match self.device().allocate(bytes as usize, stream) {
            Ok(address) => address,
            Err(shortage) => panic!("{shortage}"),
        };
        self.adopt(address, bytes, stream)
    }

    /// Claims a block that the pool allocated.
    pub fn adopt(&self, address: u64, bytes: u64, stream: u64) -> u64 {
        assert_eq!(address % 512, 0, "{address:#x} is not aligned");
        self.gpu.claim(address, rounded(bytes), address);
        self.blocks
            .borrow_mut()
            .insert(address, (rounded(bytes), stream));
        address
    }

    /// Drops a block of [`Bench::allocate`], which the test frees by another function. Returns its stream.
    pub fn forget(&self, address: u64) -> u64 {
        let block = self.blocks.borrow_mut().remove(&address);
        let (size, stream) = block.expect("a live block");
        self.gpu.disown(address, size);
        stream
    }

    /// Frees a block of [`Bench::allocate`].
    pub fn free(&self, address: u64) {
        let stream = self.forget(address);
        assert_eq!(self.device().free(address, stream), Ok(()));
    }

    /// Allocates all free blocks.
    pub fn fill_free_blocks(&self, stream: u64) -> Vec<u64> {
        let mut blocks = Vec::new();
        loop {
            match self.device().figures().largest_free {
                0 => return blocks,
                size => blocks.push(self.allocate(size, stream)),
            }
        }
    }

    /// Reserved bytes.
    pub fn reserved(&self) -> u64 {
        self.device().figures().reserved_bytes()
    }

    /// How often a driver call was made by the pool, by the driver's name.
    pub fn calls(&self, name: &str) -> u64 {
        let figures = self.device().figures();
        let (_, call) = figures
            .calls
            .iter()
            .find(|(call, _)| call.name() == name)
            .expect("a call");
        call.count
    }

    /// Every driver call of the pool.
    pub fn all_calls(&self) -> u64 {
        self.device()
            .figures()
            .calls
            .iter()
            .map(|(_, figures)| figures.count)
            .sum()
    }

    /// Ends a test that has freed everything: checks invariants, and that all memory returns to the driver.
    pub fn finish(&self) {
        self.gpu.settle();
        for device in self.allocator.devices_in_use() {
            assert_eq!(device.check(), Ok(()));
            device.empty_cache();
            assert_eq!(device.check(), Ok(()));
            let figures = device.figures();
            assert_eq!(
                figures.counters.all.allocation.current, 0,
                "blocks are still in use"
            );
            assert_eq!(
                figures.reserved_bytes(),
                0,
                "memory that nobody uses is still held"
            );
        }
        if let Some(machine) = &self.gpu.machine {
            assert_eq!(machine.violations(), Vec::<String>::new());
            let devices = 0..self.gpu.contexts.len();
            assert_eq!(
                devices.map(|device| machine.used(device)).sum::<u64>(),
                0,
                "bytes used"
            );
            assert_eq!(machine.handles(), 0, "chunks not released");
            assert_eq!(machine.mappings(), 0, "mappings left");
        }
    }
}

impl Bench {
    /// Ends a test and the allocator: checks that it leaves nothing, addresses included.
    pub fn end(self) {
        self.finish();
        let Bench {
            gpu,
            allocator,
            _here,
            ..
        } = self;
        drop(allocator);
        if let Some(machine) = &gpu.machine {
            assert_eq!(machine.reserved_addresses(), 0, "addresses left");
            assert_eq!(machine.handles(), 0, "chunks not released");
            assert_eq!(machine.used(0), 0, "bytes used");
        }
    }
}

impl Gpu {
    /// Prepares this thread for driver calls.
    pub fn enter(&self) -> Here {
        let bound = self.bind();
        self.push(0);
        Here {
            gpu: self.clone(),
            _bound: bound,
        }
    }

    /// The same with no context current, as in a thread that has nothing to do with CUDA.
    pub fn bind(&self) -> Option<Bound> {
        self.machine.as_ref().map(Machine::bind)
    }

    /// Runs `work` on four threads at once, with a number each, and `free` on this one with every block that
    /// they send here.
    pub fn on_threads(&self, work: impl Fn(u64, &Sender<u64>) + Sync, free: impl FnMut(u64)) {
        let (to_free, others) = channel();
        thread::scope(|scope| {
            for number in 0..4 {
                let (work, to_free) = (&work, to_free.clone());
                scope.spawn(move || {
                    let _here = self.enter();
                    work(number, &to_free);
                });
            }
            drop(to_free);
            others.into_iter().for_each(free);
        });
    }

    fn push(&self, device: usize) {
        // SAFETY: a context that was retained for good.
        ok(unsafe { (self.functions.cuCtxPushCurrent_v2)(self.contexts[device] as CUcontext) });
    }

    fn pop(&self) {
        let mut context = null_mut();
        // SAFETY: pops what this thread pushed.
        ok(unsafe { (self.functions.cuCtxPopCurrent_v2)(&mut context) });
    }

    /// The simulated machine, if it is one.
    pub fn machine(&self) -> Option<&Machine> {
        self.machine.as_ref()
    }

    // Streams.

    /// A stream of device 0 that waits for no other.
    pub fn stream(&self) -> u64 {
        self.stream_on(0)
    }

    /// The same on another device.
    pub fn stream_on(&self, device: usize) -> u64 {
        self.push(device);
        let mut stream: CUstream = null_mut();
        // SAFETY: `stream` outlives the call. 1 is CU_STREAM_NON_BLOCKING.
        ok(unsafe { (self.functions.cuStreamCreate)(&mut stream, 1) });
        self.pop();
        if let Some(allocator) = self.allocator.upgrade()
            && let Ok(owner) = allocator.device(device as i32)
        {
            owner.add_stream(stream as u64);
        }
        stream as u64
    }

    /// Ends a stream; its work goes on.
    pub fn destroy(&self, stream: u64) {
        let allocator = self.allocator.upgrade();
        for device in allocator.iter().flat_map(|it| it.devices_in_use()) {
            device.remove_stream(stream);
        }
        // SAFETY: a stream of ours, not used by this handle again.
        ok(unsafe { (self.functions.cuStreamDestroy_v2)(stream as CUstream) });
    }

    /// Orders one stream's work from now on after all work of another so far. False if the driver, made to
    /// fail, refused.
    pub fn order(&self, earlier: u64, later: u64) -> bool {
        let f = &self.functions;
        let mut event: CUevent = null_mut();
        // SAFETY: an event of this function's own, in the context of the stream that it is recorded on, and
        // streams that live. An event may be destroyed while others still wait for it.
        unsafe {
            let mut context = null_mut();
            ok((f.cuStreamGetCtx)(earlier as CUstream, &mut context));
            ok((f.cuCtxPushCurrent_v2)(context));
            let created =
                (f.cuEventCreate)(&mut event, CUevent_flags::CU_EVENT_DISABLE_TIMING as u32);
            let mut status = match created {
                0 => (f.cuEventRecord)(event, earlier as CUstream),
                status => status,
            };
            self.pop();
            if created != 0 {
                return false;
            }
            if status == 0 {
                status = (f.cuStreamWaitEvent)(later as CUstream, event, 0);
            }
            ok((f.cuEventDestroy_v2)(event));
            status == 0
        }
    }

    /// Waits for a stream.
    pub fn synchronize(&self, stream: u64) {
        // SAFETY: a stream that lives.
        ok(unsafe { (self.functions.cuStreamSynchronize)(stream as CUstream) });
    }

    /// Has all work done. In the simulation the program does not come to know it thereby.
    pub fn settle(&self) {
        match &self.machine {
            Some(machine) => machine.run_all(),
            None => (0..self.contexts.len()).for_each(|device| {
                self.push(device);
                // SAFETY: no arguments.
                ok(unsafe { (self.functions.cuCtxSynchronize)() });
                self.pop();
            }),
        }
    }

    /// Work enqueued from now on runs late, where the GPU can be told so.
    pub fn late(&self) {
        if let Some(machine) = &self.machine {
            machine.set_pace(Pace::Held);
        }
    }

    /// Holds back the work of these streams, of which there are no others with work, that is
    /// enqueued from now on. Nothing may wait for it meanwhile. They can be let go in this order
    /// only: a card's driver runs all host functions on one thread, one after the other.
    pub fn hold(&self, streams: &[u64]) -> Held {
        let mut held = Held {
            gpu: self.clone(),
            gates: Vec::new(),
        };
        match &self.machine {
            Some(machine) => machine.set_pace(Pace::Held),
            None => {
                for stream in streams {
                    // Leaked: the driver's thread may look at it at any time.
                    let gate: &'static AtomicBool = Box::leak(Box::default());
                    let argument = std::ptr::from_ref(gate).cast_mut().cast();
                    held.gates.push((*stream, gate));
                    let stream = *stream as CUstream;
                    // SAFETY: the function takes such a pointer, which is good for ever.
                    ok(unsafe {
                        (self.functions.cuLaunchHostFunc)(stream, Some(wait_at), argument)
                    });
                }
            }
        }
        held
    }

    /// Bytes that device 0 has free, by the driver's account.
    pub fn free_bytes(&self) -> u64 {
        let (mut free, mut total) = (0, 0);
        // SAFETY: outputs are locals.
        ok(unsafe { (self.functions.cuMemGetInfo_v2)(&mut free, &mut total) });
        free as u64
    }

    // Work.

    /// Fills memory with a word.
    pub fn fill(&self, address: u64, bytes: u64, word: u32, stream: u64) {
        let count = (bytes / 4) as usize;
        // SAFETY: device memory only; the tests are about whose it is.
        ok(unsafe { (self.functions.cuMemsetD32Async)(address, word, count, stream as CUstream) });
    }

    /// Copies from one place in the device's memory to another.
    pub fn copy(&self, to: u64, from: u64, bytes: u64, stream: u64) {
        let (bytes, stream) = (bytes as usize, stream as CUstream);
        // SAFETY: as above.
        ok(unsafe { (self.functions.cuMemcpyDtoDAsync_v2)(to, from, bytes, stream) });
    }

    /// Copies memory out when its turn comes.
    ///
    /// # Safety
    /// `to` stays good until the stream's work is done or never runs.
    pub unsafe fn copy_out(&self, to: *mut u32, address: u64, bytes: u64, stream: u64) {
        let bytes = bytes as usize;
        // SAFETY: the caller's promise.
        ok(unsafe {
            (self.functions.cuMemcpyDtoHAsync_v2)(to.cast(), address, bytes, stream as CUstream)
        });
    }

    /// What stands in memory once the stream has come so far.
    pub fn read(&self, address: u64, bytes: u64, stream: u64) -> Vec<u32> {
        let mut words = vec![0; (bytes / 4) as usize];
        // SAFETY: waited for below.
        unsafe { self.copy_out(words.as_mut_ptr(), address, bytes, stream) };
        self.synchronize(stream);
        words
    }

    /// Says where memory does not hold a word throughout.
    pub fn expect(&self, address: u64, bytes: u64, word: u32, stream: u64) {
        let words = self.read(address, bytes, stream);
        if let Some(at) = words.iter().position(|found| *found != word) {
            let at_address = address + 4 * at as u64;
            panic!(
                "{:#x} stands at {at_address:#x} instead of {word:#x}",
                words[at]
            );
        }
    }

    // Ownership, which only the simulation checks.

    pub fn claim(&self, address: u64, bytes: u64, owner: u64) {
        if let Some(machine) = &self.machine {
            machine.claim(address, bytes, owner);
        }
    }

    pub fn disown(&self, address: u64, bytes: u64) {
        if let Some(machine) = &self.machine {
            machine.disown(address, bytes);
        }
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        self.gpu.pop();
    }
}

impl Held {
    /// Lets one stream go on, and has its work done.
    pub fn let_go(&self, stream: u64) {
        if let Some(machine) = &self.gpu.machine {
            while machine.step(stream as CUstream) {}
        }
        for (_, gate) in self.gates.iter().filter(|(held, _)| *held == stream) {
            gate.store(true, Ordering::Release);
            self.gpu.synchronize(stream);
        }
    }

    /// Lets the streams go on, and has all their work done.
    pub fn release(self) {
        drop(self);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gates
            .iter()
            .for_each(|(_, gate)| gate.store(true, Ordering::Release));
        if std::thread::panicking() {
            return;
        }
        self.gpu.settle();
        if let Some(machine) = &self.gpu.machine {
            machine.set_pace(Pace::Immediate);
        }
    }
}

/// Stands in a stream until the gate opens.
unsafe extern "C" fn wait_at(gate: *mut c_void) {
    // SAFETY: `hold` passes a leaked gate.
    let gate = unsafe { &*gate.cast::<AtomicBool>() };
    while !gate.load(Ordering::Acquire) {
        sleep(Duration::from_micros(100));
    }
}

/// The bytes of a block for a request, as the pool promises.
pub fn rounded(bytes: u64) -> u64 {
    bytes.max(1).next_multiple_of(512)
}

/// The first, third, fifth of these blocks and so on, and the others; an even number of them.
pub fn every_other(blocks: &[u64]) -> (Vec<u64>, Vec<u64>) {
    blocks.chunks(2).map(|pair| (pair[0], pair[1])).unzip()
}

/// A driver call that must not fail.
#[track_caller]
pub fn ok(status: u32) {
    assert_eq!(status, 0, "a driver call failed");
}
