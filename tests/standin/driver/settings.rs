//! What the simulated machine is like: read from the environment once, when the library is loaded.
//!
//! | variable | default | meaning |
//! | --- | --- | --- |
//! | `STANDIN_DEVICES` | 1 | number of devices, 0 to 64 |
//! | `STANDIN_MEMORY_MB` | 81920 | memory of each device, in MiB |
//! | `STANDIN_KERNELS_MB` | 0 | memory that a device takes for kernels when the first is launched, in MiB |
//! | `STANDIN_PEERS` | 0 | 1: each device reaches the others' memory; 2: each says so, but gets no access to what is mapped |
//! | `STANDIN_VIRTUAL_MEMORY` | 1 | 0: the device cannot map memory |
//! | `STANDIN_PACE` | `immediate` | when queued work runs: `immediate`; `held`, until something waits for it; `random:SEED`; `late:N`, N driver calls later |
//! | `STANDIN_FAIL` | none | failures by comma: `FUNCTION:NTH:STATUS`, such as `cuMemCreate:3:2`; NTH `*` is every use, STATUS a number of `CUresult` |
//! | `STANDIN_NESTED` | 0 | 1: every call takes and gives back memory by the process's own functions first, as tools that watch a driver may |
//! | `STANDIN_VIOLATIONS` | none | a file to which, at exit, what a real GPU would punish is written, a line each, if there was any |
//! | `STANDIN_REPORT` | none | a file to which, at exit, is written how often each function was called, as `FUNCTION COUNT`, and the `most` bytes that were in use at once, and what was not given back: `bytes`, `handles`, `mappings`, `addresses` |
//!
//! A mistake in them ends the process at once: a test that ran on another machine than it asked for
//! would prove nothing.

use concertina_sim::{Config, Pace};
use cudarc::driver::sys::CUresult;
use std::env;
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

/// The environment's wishes.
pub(crate) struct Settings {
    pub config: Config,
    pub pace: Pace,
    pub failures: Vec<(String, Option<u64>, CUresult)>,
    pub nested: bool,
    pub violations: Option<PathBuf>,
    pub report: Option<PathBuf>,
}

impl Settings {
    /// # Errors
    /// The variable that makes no sense, and what it may be.
    pub fn read() -> Result<Settings, String> {
        let peers = number("STANDIN_PEERS", 0, 0..=2)?;
        let config = Config {
            devices: number("STANDIN_DEVICES", 1, 0..=64)?,
            memory: number("STANDIN_MEMORY_MB", 81920_u64, 1..=1 << 24)? << 20,
            kernels: number("STANDIN_KERNELS_MB", 0_u64, 0..=1 << 24)? << 20,
            peers: peers > 0,
            peers_refuse: peers == 2,
            virtual_memory: number("STANDIN_VIRTUAL_MEMORY", 1, 0..=1)? == 1,
            ..Config::default()
        };
        Ok(Settings {
            config,
            pace: pace()?,
            failures: failures()?,
            nested: number("STANDIN_NESTED", 0, 0..=1)? == 1,
            violations: env::var_os("STANDIN_VIOLATIONS").map(PathBuf::from),
            report: env::var_os("STANDIN_REPORT").map(PathBuf::from),
        })
    }
}

fn text(name: &str) -> Option<String> {
    env::var(name).ok().filter(|text| !text.is_empty())
}

fn number<T>(name: &str, default: T, range: std::ops::RangeInclusive<T>) -> Result<T, String>
where
    T: FromStr + PartialOrd + Display,
{
    let Some(text) = text(name) else {
        return Ok(default);
    };
    let wanted = text.parse().ok().filter(|value| range.contains(value));
    let (low, high) = (range.start(), range.end());
    wanted.ok_or_else(|| format!("{name}={text}: a whole number from {low} to {high} is wanted"))
}

fn pace() -> Result<Pace, String> {
    let Some(text) = text("STANDIN_PACE") else {
        return Ok(Pace::Immediate);
    };
    let pace = match text.split_once(':') {
        None if text == "immediate" => Some(Pace::Immediate),
        None if text == "held" => Some(Pace::Held),
        Some(("random", seed)) => seed.parse().ok().map(Pace::Random),
        Some(("late", ticks)) => ticks.parse().ok().map(Pace::Late),
        _ => None,
    };
    pace.ok_or_else(|| {
        format!("STANDIN_PACE={text}: immediate, held, random:SEED or late:N is wanted")
    })
}

fn failures() -> Result<Vec<(String, Option<u64>, CUresult)>, String> {
    let Some(text) = text("STANDIN_FAIL") else {
        return Ok(Vec::new());
    };
    let one = |part: &str| {
        let mut parts = part.split(':');
        let (function, nth, status) = (parts.next()?, parts.next()?, parts.next()?);
        let nth = match nth {
            "*" => None,
            nth => Some(nth.parse().ok().filter(|nth| *nth > 0)?),
        };
        let status = status.parse().ok().and_then(status_of)?;
        let known = concertina_sim::FUNCTIONS.contains(&function) && parts.next().is_none();
        known.then(|| (function.to_string(), nth, status))
    };
    text.split(',')
        .map(|part| {
            one(part).ok_or_else(|| {
                format!("STANDIN_FAIL: {part}: FUNCTION:NTH:STATUS is wanted, as cuMemCreate:3:2")
            })
        })
        .collect()
}

/// The statuses that tests ask for.
fn status_of(number: u32) -> Option<CUresult> {
    use CUresult::*;
    [
        CUDA_ERROR_INVALID_VALUE,
        CUDA_ERROR_OUT_OF_MEMORY,
        CUDA_ERROR_NOT_INITIALIZED,
        CUDA_ERROR_NO_DEVICE,
        CUDA_ERROR_INVALID_DEVICE,
        CUDA_ERROR_INVALID_CONTEXT,
        CUDA_ERROR_MAP_FAILED,
        CUDA_ERROR_INVALID_HANDLE,
        CUDA_ERROR_NOT_FOUND,
        CUDA_ERROR_NOT_READY,
        CUDA_ERROR_ILLEGAL_ADDRESS,
        CUDA_ERROR_LAUNCH_FAILED,
        CUDA_ERROR_NOT_SUPPORTED,
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
        CUDA_ERROR_UNKNOWN,
    ]
    .into_iter()
    .find(|status| *status as u32 == number)
}
