//! `concertina replay`: replays recorded allocation traces on the pool, with a simulated GPU or a real one,
//! and reports memory and time.
//!
//! A replay allocates and frees exactly what the trace says, on streams made for it; only the loop over the
//! events is timed. All figures are the pool's statistics.

use crate::measured::{Report, Table};
use crate::print_error;
use crate::replay_options::{Choice, Options};
use crate::trace::{self, Event, Trace};
use concertina_engine::device::Device;
use concertina_engine::driver::{self, Functions};
use concertina_engine::process::allocator::Allocator;
use concertina_engine::process::stats;
use concertina_engine::process::stats_file;
use concertina_engine::process::stats_output;
use concertina_engine::process::stats_path;
use concertina_engine::settings::{Settings, variable};
use concertina_sim::{Bound, Config, Machine, Pace};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Limits are multiples of this.
const MIB: u64 = 1 << 20;

/// How long the statistics wait for locks. No other thread holds any here.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// `CU_STREAM_NON_BLOCKING`: no order with the default stream.
const NON_BLOCKING: u32 = 1;

/// The simulated GPU has at least this, and this many times the trace's peak.
const SIM_BYTES: u64 = 80 << 30;
const SIM_PEAKS: u64 = 4;

/// What the environment variables set for a replay.
pub struct Environment {
    settings: Settings,
    /// The file that the statistics of the last trace are written to.
    stats: Option<PathBuf>,
}

impl Environment {
    /// Reads it, and prints what has no effect. An error is one line about a mistake.
    pub fn read() -> Result<Environment, String> {
        let (settings, diagnostics) = Settings::from_environment();
        if let Some(mistake) = diagnostics
            .iter()
            .find(|diagnostic| diagnostic.is_mistake())
        {
            return Err(format!("replay: {}", mistake.line));
        }
        diagnostics.iter().for_each(|it| print_error(&it.line));
        let pattern = variable(stats_output::VARIABLE).filter(|pattern| !pattern.is_empty());
        let path = pattern.map(|pattern| {
            let path = stats_path::expand(pattern.as_bytes())?;
            stats_file::check_writable(&path).map(|()| path)
        });
        let stats = path
            .transpose()
            .map_err(|failure| format!("replay: {}: {}", stats_output::VARIABLE, failure.line))?;
        Ok(Environment { settings, stats })
    }
}

/// Replays every trace and writes its results to `out`. False if one could not be read or did not complete,
/// or if the statistics could not be written; lines on standard error say so.
pub fn run(
    options: &Options,
    surroundings: &Environment,
    out: &mut impl Write,
) -> io::Result<bool> {
    let source = match Source::choose(options) {
        Ok(source) => source,
        Err(why) => {
            print_error(&why);
            return Ok(false);
        }
    };
    let Environment { settings, stats } = surroundings;
    let names: Vec<String> = options.files.iter().map(|file| trace_name(file)).collect();
    let mut table = Table::new(&names, options.min_limit);
    let mut all = true;
    let mut statistics = None;
    for (file, name) in options.files.iter().zip(&names) {
        let trace = match trace::read(file) {
            Ok(trace) => trace,
            Err(refusal) => {
                print_error(&refusal.about(file));
                all = false;
                continue;
            }
        };
        let report = match measure(&source, settings, &trace, options) {
            Ok((report, text)) => {
                statistics = Some(text);
                report
            }
            Err(why) => {
                print_error(&format!("{}: {why}", file.display()));
                all = false;
                continue;
            }
        };
        if let Some(why) = &report.stopped {
            print_error(&format!("{}: {why}", file.display()));
            all = false;
        }
        if options.json {
            writeln!(out, "{}", report.json(name, &trace, options))?;
        } else {
            table.row(out, name, &trace, &report)?;
        }
        out.flush()?;
    }
    if let Some((path, text)) = stats.as_deref().zip(statistics)
        && let Err(failure) = stats_file::write(path, LOCK_TIMEOUT, || Some(text))
    {
        print_error(&format!("{}: {}", stats_output::VARIABLE, failure.line));
        all = false;
    }
    Ok(all)
}

/// The file's name, without the directory and without `.gz`.
fn trace_name(file: &Path) -> String {
    let name = file
        .file_name()
        .unwrap_or(file.as_os_str())
        .to_string_lossy();
    name.strip_suffix(".gz").unwrap_or(&name).to_owned()
}

/// The driver that replays run on.
struct Source {
    /// None for a simulated GPU.
    cuda: Option<Functions>,
    /// How many events later a simulated stream's work is executed.
    late: u32,
}

impl Source {
    fn choose(options: &Options) -> Result<Source, String> {
        let cuda = match options.driver {
            Choice::Sim => None,
            Choice::Auto if options.late.is_some() => None,
            Choice::Auto => usable_cuda().ok(),
            Choice::Cuda => match usable_cuda() {
                Ok(functions) => Some(functions),
                Err(why) => return Err(format!("--driver cuda: {why}; --driver sim needs no GPU")),
            },
        };
        Ok(Source {
            cuda,
            late: options.late.unwrap_or(0),
        })
    }

    fn name(&self) -> &'static str {
        if self.cuda.is_some() { "cuda" } else { "sim" }
    }
}

/// The CUDA driver, if it starts and has a device.
fn usable_cuda() -> Result<Functions, String> {
    let functions = driver::cuda()?;
    Allocator::new(functions, Settings::default()).map(|_| functions)
}

/// An empty pool on device 0, with the trace's streams. Dropping it releases all memory.
struct Bench<'a> {
    functions: Functions,
    allocator: Allocator,
    /// The streams, in the order of [`Trace::streams`].
    streams: Vec<u64>,
    /// The address of each live block by id, else 0.
    addresses: Vec<u64>,
    trace: &'a Trace,
    /// The simulated GPU, if its clock advances with the events.
    clock: Option<Machine>,
    _bound: Option<Bound>,
}

impl<'a> Bench<'a> {
    fn new(source: &Source, settings: &Settings, trace: &'a Trace) -> Result<Self, String> {
        let (functions, machine) = match source.cuda {
            Some(functions) => (functions, None),
            None => {
                let memory = SIM_BYTES.max(SIM_PEAKS * trace.peak_live_bytes);
                // Nothing accesses the memory, so it need not be backed nor checked.
                let (checks, host_pointers) = (false, false);
                let config = Config {
                    memory,
                    checks,
                    host_pointers,
                    ..Config::default()
                };
                (concertina_sim::functions(), Some(Machine::new(config)))
            }
        };
        let bound = machine.as_ref().map(Machine::bind);
        let allocator = Allocator::new(functions, settings.clone())?;
        let mut bench = Bench {
            functions,
            allocator,
            streams: Vec::with_capacity(trace.streams.len()),
            addresses: vec![0; trace.allocations as usize + 1],
            trace,
            clock: None,
            _bound: bound,
        };
        bench.enter()?;
        for &number in &trace.streams {
            let stream = if number == 0 { 0 } else { bench.new_stream()? };
            bench.streams.push(stream);
        }
        if let Some(machine) = machine.filter(|_| source.late > 0) {
            machine.set_pace(Pace::Late(source.late.into()));
            bench.clock = Some(machine);
        }
        Ok(bench)
    }

    /// Makes device 0 current on this thread; streams are made where one is.
    fn enter(&self) -> Result<(), String> {
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: a number, and the address of a variable that outlives the call.
        let status = unsafe { (self.functions.cuDeviceGet)(&mut device, 0) };
        self.checked("cuDeviceGet", status)?;
        // SAFETY: a device of the driver's, and the address of a variable that outlives the call.
        let status = unsafe { (self.functions.cuDevicePrimaryCtxRetain)(&mut context, device) };
        self.checked("cuDevicePrimaryCtxRetain", status)?;
        // SAFETY: the context was retained above and is never released.
        let status = unsafe { (self.functions.cuCtxPushCurrent_v2)(context) };
        self.checked("cuCtxPushCurrent", status)
    }

    fn new_stream(&self) -> Result<u64, String> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` outlives the call that writes it.
        let status = unsafe { (self.functions.cuStreamCreate)(&mut stream, NON_BLOCKING) };
        self.checked("cuStreamCreate", status)
            .map(|()| stream as u64)
    }

    /// An error for a status other than success.
    fn checked(&self, call: &str, status: u32) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        Err(format!(
            "{call} failed: {}",
            self.functions.error_name(status)
        ))
    }

    fn device(&self) -> Result<&Device, String> {
        self.allocator.device(0)
    }

    /// Replays the trace once, and says how long that took or where it stopped and why. What is
    /// live at the end is freed outside the time taken.
    fn pass(&mut self) -> Result<Duration, String> {
        // Taken out so that the loop holds nothing but this array and the device.
        let mut addresses = std::mem::take(&mut self.addresses);
        let device = self.device()?;
        let (events, streams) = (&self.trace.events, &self.streams);
        // They end after all else.
        streams.iter().for_each(|stream| device.add_stream(*stream));
        let outcome = match &self.clock {
            None => timed(device, events, streams, &mut addresses, || ()),
            Some(machine) => timed(device, events, streams, &mut addresses, || machine.tick()),
        };
        for address in addresses.iter_mut().filter(|address| **address != 0) {
            device.free(std::mem::take(address), 0).map_err(|_| STRAY)?;
        }
        self.addresses = addresses;
        outcome
    }
}

/// Printed only if the pool is broken.
const STRAY: &str = "the pool does not know an address that it gave out";

/// The loop that is timed. `tick` follows each event.
#[inline(never)]
fn timed(
    device: &Device,
    events: &[Event],
    streams: &[u64],
    addresses: &mut [u64],
    tick: impl Fn(),
) -> Result<Duration, String> {
    let start = Instant::now();
    for (number, event) in events.iter().enumerate() {
        let address = &mut addresses[event.id as usize];
        let stream = streams[usize::from(event.stream)];
        if event.size > 0 {
            match device.allocate(event.size as usize, stream) {
                Ok(allocated) => *address = allocated,
                Err(error) => {
                    let (number, all) = (number + 1, events.len());
                    return Err(format!("stopped at event {number} of {all}: {error}"));
                }
            }
        } else if device.free(std::mem::take(address), stream).is_err() {
            return Err(format!("stopped at event {}: {STRAY}", number + 1));
        }
        tick();
    }
    Ok(start.elapsed())
}

impl Drop for Bench<'_> {
    fn drop(&mut self) {
        let functions = &self.functions;
        for &stream in &self.streams {
            // SAFETY: the stream is the default one or was made by `new_stream`.
            unsafe { (functions.cuStreamSynchronize)(stream as _) };
        }
        if let Ok(device) = self.device() {
            device.empty_cache();
        }
        for &stream in self.streams.iter().filter(|stream| **stream != 0) {
            if let Ok(device) = self.device() {
                device.remove_stream(stream);
            }
            // SAFETY: made by `new_stream`, and not used after this.
            unsafe { (functions.cuStreamDestroy_v2)(stream as _) };
        }
        // SAFETY: pops the context that `enter` made current.
        unsafe { (functions.cuCtxPopCurrent_v2)(&mut std::ptr::null_mut()) };
    }
}

/// The results of a trace, and the pool's statistics after the last pass.
fn measure(
    source: &Source,
    settings: &Settings,
    trace: &Trace,
    options: &Options,
) -> Result<(Report, String), String> {
    let mut bench = Bench::new(source, settings, trace)?;
    if let Some(bytes) = options.limit_bytes {
        bench.device()?.set_limit(Some(bytes));
    }
    let (mut times, mut stopped) = (Vec::new(), None);
    let mut figures = Vec::with_capacity(options.passes as usize);
    while stopped.is_none() && figures.len() < options.passes as usize {
        bench.device()?.reset_peaks();
        match bench.pass() {
            Ok(time) => times.push(time),
            Err(why) => stopped = Some(why),
        }
        figures.push(bench.device()?.figures());
    }
    let device = bench.device()?.name().to_owned();
    let total_bytes = bench.device()?.total_bytes();
    let mut report = Report {
        driver: source.name(),
        device,
        times,
        figures,
        stopped,
        min_limit_bytes: None,
    };
    let statistics = stats::json_of(Some(&bench.allocator), LOCK_TIMEOUT);
    drop(bench);
    if options.min_limit && report.completed() {
        let reserved_bytes = report.peak_reserved_bytes();
        report.min_limit_bytes =
            smallest_limit(source, settings, trace, reserved_bytes, total_bytes)?;
    }
    Ok((report, statistics))
}

/// The smallest limit in whole MiB with which a replay from an empty pool completes, as far as
/// halving finds it, given what it reserves with none. Under a limit the pool grows otherwise and may
/// need more than that. `None` if not even all memory of the device is enough.
fn smallest_limit(
    source: &Source,
    settings: &Settings,
    trace: &Trace,
    reserved_bytes: u64,
    total_bytes: u64,
) -> Result<Option<u64>, String> {
    let completes = |mib: u64| {
        let mut bench = Bench::new(source, settings, trace)?;
        bench.device()?.set_limit(Some(mib * MIB));
        Ok::<_, String>(bench.pass().is_ok())
    };
    let mut low = trace.peak_live_bytes.div_ceil(MIB);
    let mut high = reserved_bytes.div_ceil(MIB).max(low);
    let most = (total_bytes / MIB).max(high);
    let mut step = 1;
    while !completes(high)? {
        if high == most {
            return Ok(None);
        }
        low = high + 1;
        high = (high + step).min(most);
        step *= 2;
    }
    while low < high {
        let middle = low.midpoint(high);
        if completes(middle)? {
            high = middle
        } else {
            low = middle + 1
        }
    }
    Ok(Some(high * MIB))
}
