//! The settings: their keys, defaults, parsing and documentation.
//!
//! `TABLE` is the one list: the parser, the diagnostics and the table of docs/settings.md are made from it.
//! Each key is looked up in [`VARIABLES`]; the first variable that names it decides, even if its value is a
//! mistake. A mistake's [`Severity`] says what follows from it: without its limit a program is not started
//! where that can still be prevented.

use crate::core::Tuning;
use std::ffi::OsString;
use std::fmt::Write;
use std::time::Duration;

/// The environment variables that hold settings; the first one that names a key decides.
pub const VARIABLES: [&str; 3] = [
    "CONCERTINA_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
];

const MIB: usize = 1 << 20;

/// The values of `stats_signal`, in the order of its words.
const SIGNALS: [Option<i32>; 4] = [
    None,
    Some(libc::SIGHUP),
    Some(libc::SIGUSR1),
    Some(libc::SIGUSR2),
];

/// The settings of one process.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Segments grow by mapping chunks; otherwise each segment is one `cudaMalloc`.
    pub expandable_segments: bool,
    /// The share of a device's memory that the process may hold, 0.0 to 1.0.
    pub per_process_memory_fraction: f64,
    /// The bytes that the process may hold on each device.
    pub limit: Option<usize>,
    /// The largest chunk that growth creates, in bytes; 0 lets the pool decide.
    pub chunk_size: usize,
    /// How sizes are rounded up.
    pub round_up: RoundUp,
    /// What `cudaFree` waits for under `LD_PRELOAD`.
    pub free: Free,
    /// `cudaMalloc`'s memory stays CUDA's own under `LD_PRELOAD`.
    pub ipc: bool,
    /// Bytes to allocate from each device when it is first used.
    pub preallocate: usize,
    /// A stream may be made to wait on the GPU for memory that another stream has freed.
    pub stream_waits: bool,
    /// Within a capture, blocks are reused once the other streams that used them have been joined.
    pub graph_capture_record_stream_reuse: bool,
    /// How long a whole chunk may be idle before it is released to the driver; zero keeps it.
    pub idle_release: Duration,
    /// CUDA calls are counted by calling library, too.
    pub stats_callers: bool,
    /// The signal at which the statistics are written.
    pub stats_signal: Option<i32>,
    /// The interval at which the statistics are written; zero is never.
    pub stats_interval: Duration,
    /// A line is printed when the GPU is first used.
    pub verbose: bool,
    /// The settings that differ from the defaults, as `key:value`.
    pub changed: Vec<String>,
    /// Constants of the pool's policy, for experiments: no key sets them.
    pub tuning: Tuning,
}

/// A message about the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// One line: the variable, its text, and what is wrong with it.
    pub line: String,
    /// What follows from it.
    pub severity: Severity,
}

/// What follows from a diagnostic, the worst last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The setting has no effect here, or is one that PyTorch's own allocator may know.
    Note,
    /// A mistake; the default is used.
    Mistake,
    /// A mistake in a limit: the default would be no limit at all, so the program must not run.
    LimitMistake,
}

impl Diagnostic {
    /// Whether a program with it is not to be started, where that can still be prevented.
    pub fn is_mistake(&self) -> bool {
        self.severity >= Severity::Mistake
    }
}

/// What `cudaFree` waits for where the library interposes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Free {
    /// All work of the device, as CUDA's own does.
    Strict,
    /// Nothing; the memory is reused only after the work that had been submitted.
    Relaxed,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            expandable_segments: true,
            per_process_memory_fraction: 1.0,
            limit: None,
            chunk_size: 0,
            round_up: RoundUp::default(),
            free: Free::Strict,
            ipc: false,
            preallocate: 0,
            stream_waits: true,
            graph_capture_record_stream_reuse: false,
            idle_release: Duration::ZERO,
            stats_callers: false,
            stats_signal: None,
            stats_interval: Duration::ZERO,
            verbose: false,
            changed: Vec::new(),
            tuning: Tuning::default(),
        }
    }
}

impl Settings {
    /// The settings of this process's environment, and a diagnostic for each mistake in them and each setting
    /// that has no effect. A process with elevated privileges gets the defaults.
    pub fn from_environment() -> (Settings, Vec<Diagnostic>) {
        Settings::from_lookup(variable_text)
    }

    /// [`Settings::from_environment`] with `lookup` in place of the environment.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> (Settings, Vec<Diagnostic>) {
        let mut settings = Settings::default();
        let mut diagnostics = Vec::new();
        let mut decided: Vec<&str> = Vec::new();
        for variable in VARIABLES {
            let Some(text) = lookup(variable) else {
                continue;
            };
            let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
            // Within one variable the last value of a key counts, as in PyTorch.
            let mut here: Vec<(&Setting, &str)> = Vec::new();
            for item in items(&text) {
                let Some((key, value)) = item.split_once(':') else {
                    let word = |c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-');
                    let similar = similar(item.split(word).next().unwrap_or_default());
                    let item = printable(item);
                    diagnostics.push(mistake(
                        variable,
                        similar.iter().any(|setting| setting.limits),
                        format!("{item} makes no sense: it is no key:value pair"),
                    ));
                    continue;
                };
                match TABLE.iter().find(|setting| setting.key == key) {
                    Some(setting) => {
                        here.retain(|(other, _)| other.key != key);
                        here.push((setting, value));
                    }
                    None => diagnostics.push(unknown(variable, key, value)),
                }
            }
            for (setting, value) in here {
                if decided.contains(&setting.key) {
                    continue;
                }
                decided.push(setting.key);
                setting.apply(variable, value, &mut settings, &mut diagnostics);
            }
        }
        (settings, diagnostics)
    }
}

/// A mistake in a variable. In PyTorch's variables it is a note, as a newer PyTorch may know the setting,
/// unless it is about a limit.
fn mistake(variable: &str, limits: bool, what: String) -> Diagnostic {
    let severity = match limits {
        true => Severity::LimitMistake,
        false if variable == VARIABLES[0] => Severity::Mistake,
        false => Severity::Note,
    };
    let line = format!("{variable}: {what}");
    Diagnostic { line, severity }
}

fn unknown(variable: &str, key: &str, value: &str) -> Diagnostic {
    let similar = similar(key);
    let names: Vec<_> = similar.iter().map(|setting| setting.key).collect();
    let help = match names.is_empty() {
        true => format!("the keys are {}", keys()),
        false => format!("did you mean {}?", names.join(" or ")),
    };
    // A size or a share of a key that is unlike any may have been meant as a limit. In PyTorch's variables it may be
    // a newer PyTorch's.
    let maybe_limit = variable == VARIABLES[0] && similar.is_empty();
    let limits = similar.iter().any(|setting| setting.limits)
        || maybe_limit && (is_size(value) || is_share(value));
    let (key, value) = (printable(key), printable(value));
    mistake(
        variable,
        limits,
        format!("{key}:{value} makes no sense: there is no such key; {help}"),
    )
}

/// Whether a text is a size with a unit, such as 8G.
fn is_size(text: &str) -> bool {
    text.ends_with(|it: char| it.is_ascii_alphabetic()) && size(text, 1).is_some()
}

/// Whether a text is a share, such as 0.5 or 50%.
fn is_share(text: &str) -> bool {
    let share = text
        .strip_suffix('%')
        .and_then(|it| it.trim().parse::<f64>().ok());
    let share = share.or_else(|| text.parse().ok().filter(|_| text.contains('.')));
    share.is_some_and(|it| (0.0..=100.0).contains(&it))
}

/// The settings that an unknown key may have been meant for: those with the smallest edit distance, or else
/// those whose keys contain it or are contained in it.
fn similar(key: &str) -> Vec<&'static Setting> {
    /// Longer texts are not compared.
    const LONGEST: usize = 60;
    /// Shorter parts are contained in too many keys.
    const SHORTEST_PART: usize = 4;
    let key = key.to_ascii_lowercase().replace('-', "_");
    if key.len() > LONGEST {
        return Vec::new();
    }
    let least = TABLE.iter().map(|it| edit_distance(&key, it.key)).min();
    if let Some(least) = least.filter(|distance| *distance <= (key.len() / 3).max(1)) {
        let similar = TABLE
            .iter()
            .filter(|it| edit_distance(&key, it.key) == least);
        return similar.collect();
    }
    let is_part = |part: &str, whole: &str| part.len() >= SHORTEST_PART && whole.contains(part);
    let all = TABLE.iter();
    all.filter(|it| is_part(it.key, &key) || is_part(&key, it.key))
        .collect()
}

/// The Damerau-Levenshtein distance: how many letters have to be inserted, removed, changed or swapped with
/// the next.
fn edit_distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    // `rows[i][j]` is the distance of the first `i` letters of `a` from the first `j` of `b`.
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let changed = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = changed.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[i - 2][j - 2] + 1);
            }
            row.push(least);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

/// One row of [`TABLE`].
struct Setting {
    key: &'static str,
    kind: Kind,
    /// The default as it would be written in a variable, or `none`.
    default: &'static str,
    effect: Effect,
    doc: &'static str,
    /// A mistake in it lifts a limit.
    limits: bool,
}

/// The type of a value.
enum Kind {
    Bool,
    /// 1 or 0, for keys that PyTorch does not have; `True` and `False` are accepted.
    Switch,
    /// 0.0 to 1.0, both ends included.
    Fraction,
    /// Bytes, at least one.
    Size,
    /// A whole number of MiB.
    Megabytes {
        at_least: usize,
        multiple_of: usize,
    },
    /// A whole number of milliseconds.
    Milliseconds,
    /// A whole number of seconds.
    Seconds,
    /// A power of two, up to this one.
    PowerOfTwo(usize),
    Word(&'static [&'static str]),
    Divisions,
}

#[derive(Clone, Copy)]
enum Value {
    Bool(bool),
    Fraction(f64),
    /// Bytes, or a plain number for kinds that are not sizes.
    Number(usize),
    /// An index into the list of [`Kind::Word`].
    Word(usize),
    Divisions(RoundUp),
}

/// What a setting changes.
enum Effect {
    /// A field of [`Settings`].
    Sets(fn(&mut Settings, Value)),
    /// Nothing: only PyTorch's own allocator has it.
    Nothing,
    /// Pinned memory, which stays PyTorch's: PyTorch reads it in its own variables.
    Pinned,
}

macro_rules! table {
    ($($key:literal, $kind:expr, $default:literal, $effect:expr, $doc:literal;)*) => {
        const TABLE: &[Setting] = &[$(Setting {
            key: $key,
            kind: $kind,
            default: $default,
            effect: $effect,
            doc: $doc,
            limits: limits($key),
        },)*];
    };
}

/// Whether a mistake in the value of `key` lifts a limit.
const fn limits(key: &str) -> bool {
    matches!(key.as_bytes(), b"limit" | b"per_process_memory_fraction")
}

macro_rules! sets {
    ($field:ident, $value:ident($it:ident) => $result:expr) => {
        Effect::Sets(|settings, value| {
            if let Value::$value($it) = value {
                settings.$field = $result;
            }
        })
    };
}

table! {
    "expandable_segments", Kind::Bool, "True",
        sets!(expandable_segments, Bool(yes) => yes),
        "grow segments by mapping memory; `False` takes each segment with one `cudaMalloc`";
    "per_process_memory_fraction", Kind::Fraction, "1.0",
        sets!(per_process_memory_fraction, Fraction(share) => share),
        "share of each device's memory that the process may hold";
    "limit", Kind::Size, "none",
        sets!(limit, Number(bytes) => Some(bytes)),
        "bytes that the process may hold on each device; with a fraction, the smaller counts";
    "chunk_size_mb", Kind::Megabytes { at_least: 0, multiple_of: 2 }, "0",
        sets!(chunk_size, Number(bytes) => bytes),
        "largest physical chunk that growth creates, in MiB; 0 leaves it to the pool";
    "preallocate", Kind::Size, "none",
        sets!(preallocate, Number(bytes) => bytes),
        "bytes taken from each device at once on its first use; `empty_cache` gives back what is free";
    "stream_waits", Kind::Bool, "True",
        sets!(stream_waits, Bool(yes) => yes),
        "have a stream wait on the GPU for memory that others freed, rather than take more from the \
         driver; `False` for a program whose kernels never end, or wait for later work of other streams";
    "idle_release_ms", Kind::Milliseconds, "0",
        sets!(idle_release, Number(time) => Duration::from_millis(time as u64)),
        "how long memory may lie idle, in whole chunks, before it goes back to the driver; 0 keeps it";
    "roundup_power2_divisions", Kind::Divisions, "none",
        sets!(round_up, Divisions(divisions) => divisions),
        "round sizes up to this fraction of a power of two, for all or by size in MiB";
    "graph_capture_record_stream_reuse", Kind::Bool, "False",
        sets!(graph_capture_record_stream_reuse, Bool(yes) => yes),
        "use blocks again within a CUDA graph's capture that other streams have used, once those are \
         joined; capturing takes longer";
    "free", Kind::Word(&["strict", "relaxed"]), "strict",
        sets!(free, Word(which) => if which == 0 { Free::Strict } else { Free::Relaxed }),
        "with `LD_PRELOAD`: `strict` makes cudaFree wait for the device, as CUDA's own does; \
         `relaxed` returns at once, and the memory is used again only after the work before";
    "ipc", Kind::Bool, "False",
        sets!(ipc, Bool(yes) => yes),
        "with `LD_PRELOAD`: `True` leaves cudaMalloc's memory to CUDA, so that \
         cudaIpcGetMemHandle can share it with processes that do not have the library, too";
    "stats_callers", Kind::Bool, "False",
        sets!(stats_callers, Bool(yes) => yes),
        "with `LD_PRELOAD`: `True` counts the program's calls by the library that made them, too, \
         which takes microseconds a call";
    "stats_signal", Kind::Word(&["none", "SIGHUP", "SIGUSR1", "SIGUSR2"]), "none",
        sets!(stats_signal, Word(which) => SIGNALS[which]),
        "a signal that has the statistics written to the path in `CONCERTINA_STATS`, from the \
         first use of the GPU on; a handler that the program has for it by then is called as well";
    "stats_interval_s", Kind::Seconds, "0",
        sets!(stats_interval, Number(time) => Duration::from_secs(time as u64)),
        "how often the statistics are written there while the program runs; 0 is never";
    "verbose", Kind::Switch, "0",
        sets!(verbose, Bool(yes) => yes),
        "print one line when the GPU is first used: the version, how the library is attached, the \
         devices, the limit and the settings that differ from the defaults";
    "garbage_collection_threshold", Kind::Fraction, "0.0", Effect::Nothing, "";
    "max_split_size_mb", Kind::Megabytes { at_least: 20, multiple_of: 1 }, "none",
        Effect::Nothing, "";
    "max_non_split_rounding_mb", Kind::Megabytes { at_least: 20, multiple_of: 1 }, "20",
        Effect::Nothing, "";
    "large_segment_size_mb", Kind::Megabytes { at_least: 1, multiple_of: 1 }, "20",
        Effect::Nothing, "";
    "backend", Kind::Word(&["native", "cudaMallocAsync"]), "native", Effect::Nothing, "";
    "release_lock_on_cudamalloc", Kind::Bool, "False", Effect::Nothing, "";
    "throw_on_cudamalloc_oom", Kind::Bool, "False", Effect::Nothing, "";
    "pinned_use_cuda_host_register", Kind::Bool, "False", Effect::Pinned, "";
    "pinned_num_register_threads", Kind::PowerOfTwo(128), "1", Effect::Pinned, "";
    "pinned_use_background_threads", Kind::Bool, "False", Effect::Pinned, "";
    "pinned_reserve_segment_size_mb", Kind::Megabytes { at_least: 1, multiple_of: 1 }, "none",
        Effect::Pinned, "";
    "pinned_free_catch_all", Kind::Bool, "False", Effect::Pinned, "";
}

impl Setting {
    /// Parses the value and applies it.
    fn apply(
        &self,
        variable: &str,
        text: &str,
        settings: &mut Settings,
        diagnostics: &mut Vec<Diagnostic>,
    ) {
        let Setting { key, default, .. } = self;
        let is_default = |value: Value| {
            let default = self.kind.parse(default);
            default.is_some_and(|default| default.equals(value))
        };
        match (self.kind.parse(text), &self.effect) {
            (Some(value), Effect::Sets(set)) => {
                set(settings, value);
                if !is_default(value) {
                    settings.changed.push(format!("{key}:{}", printable(text)));
                }
            }
            (Some(_), Effect::Pinned) if variable != VARIABLES[0] => {}
            (Some(value), Effect::Nothing | Effect::Pinned) => {
                if !is_default(value) {
                    let text = printable(text);
                    let why = match self.effect {
                        Effect::Pinned => "PyTorch reads it in its own variables",
                        _ => "it is a setting of PyTorch's own allocator",
                    };
                    diagnostics.push(Diagnostic {
                        line: format!("{variable}: {key}:{text} has no effect here: {why}"),
                        severity: Severity::Note,
                    });
                }
            }
            (None, _) => diagnostics.push(mistake(
                variable,
                self.limits,
                format!(
                    "{key}:{} makes no sense: {key} takes {}; the default is {default}",
                    printable(text),
                    self.kind.allowed(),
                ),
            )),
        }
    }
}

impl Kind {
    /// The value of `text`, which has no white space.
    fn parse(&self, text: &str) -> Option<Value> {
        match self {
            Kind::Bool => match text {
                "True" => Some(Value::Bool(true)),
                "False" => Some(Value::Bool(false)),
                _ => None,
            },
            Kind::Switch => match text {
                "1" | "True" => Some(Value::Bool(true)),
                "0" | "False" => Some(Value::Bool(false)),
                _ => None,
            },
            Kind::Fraction => {
                let share = text.parse().ok()?;
                (0.0..=1.0)
                    .contains(&share)
                    .then_some(Value::Fraction(share))
            }
            Kind::Size => size(text, 1).map(Value::Number),
            Kind::Megabytes {
                at_least,
                multiple_of,
            } => {
                let number = number(text)?;
                let fits = number >= *at_least && number.is_multiple_of(*multiple_of);
                number.checked_mul(MIB).filter(|_| fits).map(Value::Number)
            }
            Kind::Milliseconds | Kind::Seconds => number(text).map(Value::Number),
            Kind::PowerOfTwo(at_most) => {
                let fits = |number: &usize| number.is_power_of_two() && number <= at_most;
                number(text).filter(fits).map(Value::Number)
            }
            Kind::Word(words) => words.iter().position(|word| *word == text).map(Value::Word),
            Kind::Divisions => RoundUp::parse(text).map(Value::Divisions),
        }
    }

    /// The texts that [`Kind::parse`] accepts, for "takes …".
    fn allowed(&self) -> String {
        match self {
            Kind::Bool => "True or False".into(),
            Kind::Switch => "1 or 0".into(),
            Kind::Fraction => "a number from 0.0 to 1.0".into(),
            Kind::Size => format!("bytes, more than 0: 8589934592, {SIZES}"),
            Kind::Megabytes {
                at_least,
                multiple_of: 1,
            } => {
                format!("a whole number of MiB, {at_least} or more")
            }
            Kind::Megabytes {
                at_least,
                multiple_of,
            } => {
                format!("a whole number of MiB, {at_least} or more, in steps of {multiple_of}")
            }
            Kind::Milliseconds => "a whole number of milliseconds".into(),
            Kind::Seconds => "a whole number of seconds".into(),
            Kind::PowerOfTwo(at_most) => format!("a power of two up to {at_most}"),
            Kind::Word(words) => words.join(" or "),
            Kind::Divisions => {
                "a power of two, or a list of SIZE_IN_MIB:POWER_OF_TWO_OR_0 such as \
                 [256:1,512:2,>:4]"
                    .into()
            }
        }
    }
}

impl Value {
    fn equals(self, other: Value) -> bool {
        match (self, other) {
            (Value::Bool(a), Value::Bool(b)) => a == b,
            (Value::Fraction(a), Value::Fraction(b)) => a == b,
            (Value::Number(a), Value::Number(b)) | (Value::Word(a), Value::Word(b)) => a == b,
            (Value::Divisions(a), Value::Divisions(b)) => a == b,
            _ => false,
        }
    }
}

/// PyTorch's `roundup_power2_divisions`: the number of equal steps between a power of two and the next. Sizes
/// are rounded up to a step, so that fewer different sizes are allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundUp {
    /// Binary logarithm of the divisions, by [`RoundUp::interval`]; 0 for no rounding.
    divisions: [u8; RoundUp::INTERVALS],
}

impl RoundUp {
    /// Below 2 MiB, below 4 MiB, … and the last from 32 GiB up.
    const INTERVALS: usize = 16;
    /// Steps smaller than PyTorch's smallest block are not rounded to.
    const SMALLEST_STEP: usize = 512;

    /// `size` in bytes, rounded up; a multiple of 512 if it changes, and unchanged if no rounding is set.
    #[inline]
    pub fn round_up(&self, size: usize) -> usize {
        if self.divisions == [0; RoundUp::INTERVALS] {
            return size;
        }
        let divisions = self.divisions[RoundUp::interval(size)];
        if divisions == 0
            || size.is_power_of_two()
            || size.saturating_sub(1) >> divisions < RoundUp::SMALLEST_STEP
        {
            return size;
        }
        let step = 1_usize << (size.ilog2() - u32::from(divisions));
        size.checked_next_multiple_of(step).unwrap_or(size)
    }

    fn interval(size: usize) -> usize {
        let mebibytes = size / MIB;
        mebibytes
            .checked_ilog2()
            .map_or(0, |log| (log as usize).min(RoundUp::INTERVALS - 1))
    }

    fn parse(text: &str) -> Option<RoundUp> {
        let mut result = RoundUp::default();
        let Some(list) = text.strip_prefix('[') else {
            let divisions = number(text).filter(|number| number.is_power_of_two())?;
            result.divisions.fill(divisions.ilog2() as u8);
            return Some(result);
        };
        // The first size also stands for all smaller ones, `>` for all above the last size; others are not
        // rounded.
        let mut last = None;
        for entry in list.strip_suffix(']')?.split(',') {
            let (size, divisions) = entry.split_once(':')?;
            let divisions = match number(divisions)? {
                0 => 0,
                divisions if divisions.is_power_of_two() => divisions.ilog2() as u8,
                _ => return None,
            };
            if size == ">" {
                result.divisions[last.map_or(1, |last| last + 1)..].fill(divisions);
                continue;
            }
            let size = number(size).filter(|size| size.is_power_of_two())?;
            let index = (size.ilog2() as usize).min(RoundUp::INTERVALS - 1);
            let from = if last.is_none() { 0 } else { index };
            result.divisions[from..=index].fill(divisions);
            last = Some(index);
        }
        Some(result)
    }
}

/// The items of `text`, which are separated by commas outside brackets.
fn items(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_usize;
    text.split(move |c| {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
    .filter(|item| !item.is_empty())
}

/// A number of digits only: `str::parse` would accept a sign.
fn number(text: &str) -> Option<usize> {
    text.bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| text.parse().ok())?
}

/// The formats of sizes with a unit, for messages.
pub const SIZES: &str = "8GiB, 8.5G (which is GiB) or 300MB (which is 300 times 10^6 bytes)";

/// Parses a size in bytes, at least 1: a number, with a decimal point or without, and a unit in upper or
/// lower case. `K`, `M`, `G` and `T` are `KiB`, `MiB`, `GiB` and `TiB`; `KB` to `TB` are powers of 1000.
/// Without a unit it is a whole number of `default_unit` bytes.
pub fn size(text: &str, default_unit: usize) -> Option<usize> {
    /// Most decimal places: few enough for 128-bit arithmetic.
    const LONGEST: usize = 18;
    let end = text.find(|c: char| c != '.' && !c.is_ascii_digit());
    let (count, unit) = text.split_at(end.unwrap_or(text.len()));
    let scale = match unit.to_ascii_lowercase().as_str() {
        "" => default_unit,
        "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return None,
    };
    let (whole, part) = match count.split_once('.') {
        // There are no fractions of a byte, nor of a number without a unit.
        Some(_) if matches!(unit, "" | "b" | "B") => return None,
        Some((_, part)) if part.is_empty() || part.len() > LONGEST => return None,
        Some((whole, part)) => (whole, part),
        None => (count, ""),
    };
    let digits = 10_u128.pow(part.len() as u32);
    let whole = number(whole).filter(|_| !whole.is_empty())? as u128;
    let part = if part.is_empty() { 0 } else { number(part)? };
    // At most 64 and 40 bits each.
    let bytes = whole * scale as u128 + part as u128 * scale as u128 / digits;
    usize::try_from(bytes).ok().filter(|bytes| *bytes > 0)
}

/// The user's text for a message: escaped, and cut off if it is long.
fn printable(text: &str) -> String {
    const LONGEST: usize = 80;
    let mut printable: String = text
        .chars()
        .take(LONGEST)
        .flat_map(char::escape_debug)
        .collect();
    if text.chars().nth(LONGEST).is_some() {
        printable.push('…');
    }
    printable
}

fn keys() -> String {
    TABLE
        .iter()
        .map(|setting| setting.key)
        .collect::<Vec<_>>()
        .join(", ")
}

/// The settings as docs/settings.md shows them: a Markdown table, then the keys that have no effect.
pub fn markdown() -> String {
    let mut text =
        String::from("| key | default | values | meaning |\n| --- | --- | --- | --- |\n");
    let with = |wanted: fn(&Effect) -> bool| TABLE.iter().filter(move |it| wanted(&it.effect));
    for Setting {
        key,
        kind,
        default,
        doc,
        ..
    } in with(|effect| matches!(effect, Effect::Sets(_)))
    {
        let allowed = kind.allowed();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| `{key}` | `{default}` | {allowed} | {doc} |");
    }
    let list = |of: fn(&Effect) -> bool| {
        let keys: Vec<_> = with(of)
            .map(|setting| format!("`{}`", setting.key))
            .collect();
        keys.join(", ")
    };
    let _ = writeln!(
        text,
        "\nAccepted for PyTorch's sake, and named on standard error as having no effect when set \
         to anything but PyTorch's default: {}.",
        list(|effect| matches!(effect, Effect::Nothing))
    );
    let _ = writeln!(
        text,
        "\nPinned memory stays PyTorch's own, with its settings in its variables: {}.",
        list(|effect| matches!(effect, Effect::Pinned))
    );
    text
}

/// An environment variable; `None` if it is not set, or if the process has elevated privileges, which the
/// user who set it may not have.
pub fn variable(name: &str) -> Option<OsString> {
    // SAFETY: getauxval only reads what the kernel handed to the process.
    let elevated = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    std::env::var_os(name).filter(|_| !elevated)
}

/// The variable that turns the library off.
pub const DISABLE: &str = "CONCERTINA_DISABLE";

/// Whether the library is turned off in this process.
pub fn is_disabled() -> bool {
    variable(DISABLE).is_some_and(|value| value == "1")
}

/// [`variable`] as text.
pub fn variable_text(name: &str) -> Option<String> {
    Some(variable(name)?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_in_the_table_are_those_of_the_code() {
        let mut settings = Settings {
            chunk_size: 1,
            ..Settings::default()
        };
        for setting in TABLE {
            match (setting.kind.parse(setting.default), &setting.effect) {
                (Some(value), Effect::Sets(set)) => set(&mut settings, value),
                (Some(_), Effect::Nothing | Effect::Pinned) => {}
                (None, _) => assert_eq!(setting.default, "none", "{}", setting.key),
            }
        }
        assert_eq!(settings, Settings::default());
    }
}
