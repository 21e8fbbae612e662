//! Runs scripts on a pool on the simulated GPU.

use crate::random::Random;
use crate::script::{Event, Script};
use concertina_engine::device::Device;
use concertina_engine::driver::Functions;
use concertina_engine::process::allocator::Allocator;
use concertina_engine::settings::Settings;
use concertina_sim::{Bound, Config, Machine, Pace};
use std::ptr::null_mut;

/// A pool on a GPU of its own.
pub struct Replay {
    pub machine: Machine,
    functions: Functions,
    allocator: Allocator,
    /// By number, the default one first.
    streams: Vec<u64>,
    late: bool,
    _bound: Bound,
}

impl Replay {
    /// An empty pool for the script, on a GPU whose work ends `late` events late.
    pub fn new(script: &Script, late: u64) -> Replay {
        let memory = 4 * script.peak_live.max(1 << 30);
        let mut replay = Replay::with_settings(Settings::default(), memory, late);
        replay.make_streams(script.streams);
        replay
    }

    /// A pool on a GPU with `memory` bytes, with the default stream only.
    pub fn with_settings(settings: Settings, memory: u64, late: u64) -> Replay {
        // Nothing touches the memory, so there is nothing to check.
        let machine = Machine::new(Config {
            memory,
            checks: false,
            ..Config::default()
        });
        let bound = machine.bind();
        let functions = concertina_sim::functions();
        let allocator = Allocator::new(functions, settings).expect("a device");
        let (mut device, mut context) = (0, null_mut());
        // SAFETY: the driver is initialised, outputs are locals, the context is retained for good.
        unsafe {
            assert_eq!((functions.cuDeviceGet)(&mut device, 0), 0);
            assert_eq!(
                (functions.cuDevicePrimaryCtxRetain)(&mut context, device),
                0
            );
            assert_eq!((functions.cuCtxPushCurrent_v2)(context), 0);
        }
        if late > 0 {
            machine.set_pace(Pace::Late(late));
        }
        Replay {
            machine,
            functions,
            allocator,
            streams: vec![0],
            late: late > 0,
            _bound: bound,
        }
    }

    pub fn device(&self) -> &Device {
        self.allocator.device(0).expect("device 0")
    }

    /// Runs a script to its end, and returns the peak of reserved bytes.
    pub fn pass(&mut self, script: &Script) -> u64 {
        self.watched_pass(script, |_, _| ())
    }

    /// Like `pass`; calls `watch` after each event, with the number of events so far.
    pub fn watched_pass(&mut self, script: &Script, mut watch: impl FnMut(&Replay, usize)) -> u64 {
        let device = self.device();
        device.reset_peaks();
        // By block: address and stream.
        let mut blocks = vec![(0, 0); script.blocks()];
        for (count, event) in script.events.iter().enumerate() {
            match *event {
                Event::Take(block, bytes, stream) => {
                    let stream = self.streams[usize::from(stream)];
                    match device.allocate(bytes as usize, stream) {
                        Ok(address) => blocks[block as usize] = (address, stream),
                        Err(shortage) => panic!("{shortage}"),
                    }
                }
                Event::Use(block, stream) => {
                    let stream = self.streams[usize::from(stream)];
                    let (address, _) = blocks[block as usize];
                    assert_eq!(device.record_use(address, stream), Ok(()));
                }
                Event::Give(block) => {
                    let (address, stream) = blocks[block as usize];
                    assert_eq!(device.free(address, stream), Ok(()));
                }
            }
            if self.late {
                self.machine.tick();
            }
            watch(self, count + 1);
        }
        assert_eq!(device.check(), Ok(()));
        device.figures().peak_reserved_bytes()
    }

    /// One of the streams.
    pub fn any_stream(&self, random: &mut Random) -> u64 {
        self.streams[random.below(self.streams.len() as u64) as usize]
    }

    /// Destroys all streams but the default one; their work goes on.
    pub fn end_streams(&mut self) {
        for stream in self.streams.drain(1..) {
            let device = self.allocator.device(0).expect("device 0");
            device.remove_stream(stream);
            // SAFETY: `make_streams` made it, and it is not used again.
            let status = unsafe { (self.functions.cuStreamDestroy_v2)(stream as _) };
            assert_eq!(status, 0);
        }
    }

    /// Creates streams until there are `count`, the default one included.
    pub fn make_streams(&mut self, count: u16) {
        while self.streams.len() < usize::from(count) {
            let mut stream = null_mut();
            // SAFETY: `stream` outlives the call. 1 is CU_STREAM_NON_BLOCKING.
            let status = unsafe { (self.functions.cuStreamCreate)(&mut stream, 1) };
            assert_eq!(status, 0);
            self.device().add_stream(stream as u64);
            self.streams.push(stream as u64);
        }
    }
}
