//! The command `concertina`.
//!
//! Exit status: 0 on success, 1 if something could not be done (a line on standard error says what), 2 for a
//! mistake in the arguments or the environment. `run` exits with the status of its program.

mod measured;
mod ranks;
mod replay;
mod replay_options;
mod report;
mod run;
mod trace;

use concertina_engine::settings::{SIZES, size};
use std::ffi::OsString;
use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::ExitCode;

const COMMANDS: &str = "run, report, replay, --help, --version";

const HELP: &str = "\
A CUDA memory allocator, and what goes with it.

  concertina run COMMAND…   runs a CUDA program with its memory from the pool (run --help says more)
  concertina report FILE…   shows statistics that programs have left (report --help says more)
  concertina replay FILE…   replays recorded allocations and measures (replay --help says more)
  concertina --version
  concertina --help
";

const REPLAY_OPTIONS: &str =
    "FILE…, --driver, --limit, --min-limit, --passes, --late, --json, --help";

const REPLAY_HELP: &str = "\
Replays allocation traces through concertina's pool and measures.

  concertina replay FILE… [options]

  FILE…            traces, plain text or gzip: a line that starts with #, then one event a line,
                   `a ID SIZE STREAM` (allocate) or `f ID` (free), ids counting up from 1
  --driver DRIVER  sim: a simulated GPU; cuda: device 0 of this machine; auto (the default): cuda
                   where there is one and --late isn't given, else sim
  --limit SIZE     the most memory the pool may hold: a whole number of MiB, or a size such as 8GiB,
                   8.5G (which is GiB) or 300MB (which is 300 times 10^6 bytes)
  --min-limit      search the smallest limit, in whole MiB, under which a replay from an empty pool
                   completes
  --passes N       replays of each trace, 1 to 1000 (default 3): the first starts with an empty
                   pool, the others keep it
  --late N         the work of each simulated stream finishes N events late, 0 to 1000000
  --json           one line of JSON a trace instead of a table

`live` counts each block rounded up to 512 bytes, `reserved` all memory held from the driver; `ns`
is nanoseconds an event: cold from the empty pool, warm the median of the passes after it. Where
CONCERTINA_STATS names a path, the statistics of the last trace are left there.
Exit status 1: a trace could not be read, or did not complete; 2: a mistake in the options, in the
settings or in the path of the statistics.
";

const RUN_OPTIONS: &str = "--library, --stats, --relaxed, --limit, --verbose, --help, --, COMMAND…";

const RUN_HELP: &str = "\
Runs a CUDA program, and what it starts, with its memory from the pool: the library is preloaded, and
PyTorch gets it as its allocator.

  concertina run [options] [--] COMMAND…

  --library FILE  the built libconcertina.so (else CONCERTINA_LIBRARY, else the one beside this
                  command, in ../lib, or in the Python module that came with it)
  --stats PATH    where the program leaves its statistics; %p in it is the process id, %r the
                  rank, %h the host
  --relaxed       cudaFree returns at once, as with CONCERTINA_CONF=free:relaxed
  --limit SIZE    the most memory that the program may hold on each device: a whole number of MiB, or
                  a size such as 8GiB, 8.5G (which is GiB) or 300MB (which is 300 times 10^6 bytes)
  --verbose       each process that uses the GPU says in one line that concertina is on, and how

CONCERTINA_CONF=key:value,key:value has further settings, which docs/settings.md lists; options come before
it. With CONCERTINA_DISABLE=1, COMMAND runs as without concertina.

Exit status: that of COMMAND; 2 for a mistake in the options, in CONCERTINA_CONF or in the path of the
statistics, and for a library that is none, with one line and before COMMAND starts; 125 where no
library is found, 126 if COMMAND can't be run, 127 if there is none.
";

const REPORT_OPTIONS: &str = "FILE…, --json, --help";

const REPORT_HELP: &str = "\
Shows what programs have left where CONCERTINA_STATS said, or `concertina run --stats`.

  concertina report FILE… [--json]

First what was read, and each file's host, rank, process and command line. Then each device of each
process: the most memory that was in use at one time and the most that was held from the driver, the
limit, how often memory ran out, and how many blocks were not freed. Then, over all files, the calls of
preloaded programs for memory, and the library's own to the driver.
`--json` has it all in one JSON object instead.
Exit status 1: a file could not be read, or holds no statistics.
";

/// What the arguments ask for.
enum Request {
    Run(run::Options),
    Print(String),
    Replay(replay_options::Options, replay::Environment),
    Report(report::Options),
}

fn main() -> ExitCode {
    let request = match request(lexopt::Parser::from_env()) {
        Ok(request) => request,
        Err(message) => {
            print_error(&message);
            return ExitCode::from(2);
        }
    };
    let mut out = io::stdout().lock();
    let done = match request {
        Request::Print(text) => out.write_all(text.as_bytes()).map(|()| true),
        Request::Replay(options, surroundings) => replay::run(&options, &surroundings, &mut out),
        Request::Report(options) => report::run(&options, &mut out),
        Request::Run(options) => {
            let (why, status) = run::run(&options);
            print_error(&why);
            return status;
        }
    };
    match done.and_then(|done| out.flush().map(|()| done)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // The reader of the output has closed it, as `head` does.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::FAILURE,
        Err(error) => {
            print_error(&format!("standard output: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Prints `message` on standard error, on one line. An error in that is ignored.
fn print_error(message: &str) {
    let _ = writeln!(io::stderr(), "concertina: {}", trace::printable(message));
}

fn request(mut arguments: lexopt::Parser) -> Result<Request, String> {
    use lexopt::Arg::{Long, Short, Value};
    let wrong = |what: &str| format!("{what}; allowed is one of {COMMANDS}");
    match arguments
        .next()
        .map_err(|error| wrong(&error.to_string()))?
    {
        Some(Value(command)) if command == "replay" => replay_request(arguments),
        Some(Value(command)) if command == "run" => run_request(arguments),
        Some(Value(command)) if command == "report" => report_request(arguments),
        Some(Long("help") | Short('h')) => only(arguments, "--help", HELP.into()),
        Some(Long("version") | Short('V')) => {
            let version = env!("CARGO_PKG_VERSION");
            only(arguments, "--version", format!("concertina {version}\n"))
        }
        Some(Value(command)) => Err(wrong(&format!(
            "there is no command '{}'",
            command.to_string_lossy()
        ))),
        Some(option) => Err(wrong(&option.unexpected().to_string())),
        None => Err(wrong("no command is given")),
    }
}

/// Prints `text`, if nothing follows the option.
fn only(mut arguments: lexopt::Parser, option: &str, text: String) -> Result<Request, String> {
    match arguments.next() {
        Ok(None) => Ok(Request::Print(text)),
        Ok(Some(more)) => Err(format!(
            "{}; {option} takes nothing after it",
            more.unexpected()
        )),
        Err(error) => Err(format!("{error}; {option} takes nothing after it")),
    }
}

fn replay_request(mut arguments: lexopt::Parser) -> Result<Request, String> {
    use lexopt::Arg::{Long, Short, Value};
    let wrong = |error: lexopt::Error| format!("replay: {error}; allowed are {REPLAY_OPTIONS}");
    let mut options = replay_options::Options::default();
    while let Some(argument) = arguments.next().map_err(wrong)? {
        match argument {
            Long("help") | Short('h') => return Ok(Request::Print(REPLAY_HELP.into())),
            Long("driver") => {
                options.driver = driver(&mut arguments)?;
            }
            Long("limit") => {
                options.limit_bytes = Some(limit(&mut arguments, "replay")?);
            }
            Long("min-limit") => options.min_limit = true,
            Long("passes") => {
                options.passes =
                    number(&mut arguments, "replay", "--passes", 1..=1000, "passes")? as u32;
            }
            Long("late") => {
                let late = number(&mut arguments, "replay", "--late", 0..=1_000_000, "events")?;
                options.late = Some(late as u32);
            }
            Long("json") => options.json = true,
            Value(file) => options.files.push(PathBuf::from(file)),
            other => return Err(wrong(other.unexpected())),
        }
    }
    if options.files.is_empty() {
        return Err("replay: no trace file is given; at least one is needed".into());
    }
    if options.min_limit && options.limit_bytes.is_some() {
        return Err("replay: --limit and --min-limit exclude each other; give one of them".into());
    }
    if options.late.is_some() && options.driver == replay_options::Choice::Cuda {
        return Err(
            "replay: --late needs the simulated GPU; allowed with it is --driver sim".into(),
        );
    }
    Ok(Request::Replay(options, replay::Environment::read()?))
}

fn report_request(mut arguments: lexopt::Parser) -> Result<Request, String> {
    use lexopt::Arg::{Long, Short, Value};
    let wrong = |error: lexopt::Error| format!("report: {error}; allowed are {REPORT_OPTIONS}");
    let mut options = report::Options::default();
    while let Some(argument) = arguments.next().map_err(wrong)? {
        match argument {
            Long("help") | Short('h') => return Ok(Request::Print(REPORT_HELP.into())),
            Long("json") => options.json = true,
            Value(file) => options.files.push(PathBuf::from(file)),
            other => return Err(wrong(other.unexpected())),
        }
    }
    match options.files.is_empty() {
        true => Err("report: no file is given; at least one is needed".into()),
        false => Ok(Request::Report(options)),
    }
}

fn run_request(mut arguments: lexopt::Parser) -> Result<Request, String> {
    use lexopt::Arg::{Long, Short, Value};
    let wrong = |error: lexopt::Error| format!("run: {error}; allowed are {RUN_OPTIONS}");
    let mut options = run::Options::default();
    while let Some(argument) = arguments.next().map_err(wrong)? {
        match argument {
            Long("help") | Short('h') => return Ok(Request::Print(RUN_HELP.into())),
            Long("library") => options.library = Some(arguments.value().map_err(wrong)?.into()),
            Long("stats") => options.stats = Some(arguments.value().map_err(wrong)?),
            Long("relaxed") => options.settings.push("free:relaxed".into()),
            Long("limit") => {
                let bytes = limit(&mut arguments, "run")?;
                options.settings.push(format!("limit:{bytes}"));
            }
            Long("verbose") => options.settings.push("verbose:1".into()),
            // All that follows belongs to the program.
            Value(program) => {
                options.command.push(program);
                options.command.extend(arguments.raw_args().map_err(wrong)?);
                break;
            }
            other => return Err(wrong(other.unexpected())),
        }
    }
    match options.command.is_empty() {
        true => Err("run: no command is given; one is needed".into()),
        false => Ok(Request::Run(options)),
    }
}

/// The value of `--driver`.
fn driver(arguments: &mut lexopt::Parser) -> Result<replay_options::Choice, String> {
    let allowed = "allowed is one of auto, sim, cuda";
    let value = value(arguments, "replay", "--driver", allowed)?;
    match value.to_str() {
        Some("auto") => Ok(replay_options::Choice::Auto),
        Some("sim") => Ok(replay_options::Choice::Sim),
        Some("cuda") => Ok(replay_options::Choice::Cuda),
        _ => Err(format!(
            "replay: --driver {}: {allowed}",
            value.to_string_lossy()
        )),
    }
}

/// The value of `--limit` in bytes.
fn limit(arguments: &mut lexopt::Parser, command: &str) -> Result<u64, String> {
    const MIB: usize = 1 << 20;
    /// It is also the most that a trace may have live.
    const MOST: u64 = 1 << 46;
    let allowed = format!("allowed is 1 to {} MiB, or {SIZES}", MOST >> 20);
    let value = value(arguments, command, "--limit", &allowed)?;
    // As in CONCERTINA_CONF, white space does not matter.
    let bytes = value.to_str().and_then(|value| {
        let text = value.replace(char::is_whitespace, "");
        size(&text, MIB)
    });
    bytes
        .map(|bytes| bytes as u64)
        .filter(|bytes| *bytes <= MOST)
        .ok_or_else(|| format!("{command}: --limit {}: {allowed}", value.to_string_lossy()))
}

/// The value of an option that takes a whole number of some `unit`.
fn number(
    arguments: &mut lexopt::Parser,
    command: &str,
    option: &str,
    range: RangeInclusive<u64>,
    unit: &str,
) -> Result<u64, String> {
    let allowed = format!("allowed is {} to {} {unit}", range.start(), range.end());
    let value = value(arguments, command, option, &allowed)?;
    let number = value.to_str().and_then(|value| value.parse().ok());
    number
        .filter(|number| range.contains(number))
        .ok_or_else(|| format!("{command}: {option} {}: {allowed}", value.to_string_lossy()))
}

fn value(
    arguments: &mut lexopt::Parser,
    command: &str,
    option: &str,
    allowed: &str,
) -> Result<OsString, String> {
    arguments
        .value()
        .map_err(|_| format!("{command}: {option} needs a value; {allowed}"))
}
