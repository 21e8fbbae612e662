//! Runs programs bare and with the library preloaded, and compares what they say.

use crate::library::{Scratch, breakable_library, library, output, standin};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Compiles a program of `tests/programs/preload`, or with `-shared` a library.
pub fn compile(scratch: &Scratch, source: &str, name: &str, options: &[&str]) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = scratch.path().join(name);
    output(
        Command::new("cc")
            .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"])
            .arg(root.join("tests/programs/preload").join(source))
            .arg("-o")
            .arg(&file)
            .args(options)
            .args(["-ldl", "-pthread"]),
    );
    file
}

/// Runs a command, with the library preloaded or bare.
pub fn run(command: &mut Command, preload: Option<&Path>) -> Output {
    for name in [
        "CONCERTINA_CONF",
        "CONCERTINA_STATS",
        "CONCERTINA_DISABLE",
        "CONCERTINA_BREAK",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "LD_PRELOAD",
    ] {
        command.env_remove(name);
    }
    if let Some(preload) = preload {
        command.env("LD_PRELOAD", preload);
    }
    finish(command)
}

/// Runs a command as it is.
pub fn finish(command: &mut Command) -> Output {
    command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Asserts that the commands of `command` print the same and exit with the same status, preloaded as bare.
/// Returns what they print.
#[track_caller]
pub fn same(mut command: impl FnMut() -> Command) -> String {
    let bare = run(&mut command(), None);
    let preloaded = run(&mut command(), Some(library()));
    assert_eq!(preloaded, bare, "{:?}", command());
    assert!(bare.status.success(), "{bare:?}");
    String::from_utf8(bare.stdout).expect("text")
}

/// One run of a program that uses CUDA, and what is expected of it.
pub struct Case {
    /// The program of `tests/programs/preload`, and its arguments.
    pub command: &'static str,
    /// What the simulated GPU is like: variables of the stand-in driver.
    pub gpu: &'static [(&'static str, &'static str)],
    /// `CONCERTINA_CONF` of the preloaded run; empty for none.
    pub settings: &'static str,
    /// How many allocations the pool is to serve; `None` where the process writes no statistics.
    pub pool_serves: Option<u64>,
    /// Behaviours (`mutation::is_on` in the library): when one is broken, the program has to print something else.
    pub notices_broken: &'static [&'static str],
    /// The linker's option for the runtime.
    pub runtime: &'static str,
}

impl Case {
    /// With CUDA 13 and an ordinary GPU.
    pub const fn of(command: &'static str) -> Case {
        Case {
            command,
            gpu: &[],
            settings: "",
            pool_serves: None,
            notices_broken: &[],
            runtime: "-lcudart",
        }
    }

    fn program(&self) -> &'static str {
        self.command.split(' ').next().expect("a program")
    }

    fn arguments(&self) -> Vec<&'static str> {
        self.command.split(' ').skip(1).collect()
    }
}

/// A compiled program, with files for its statistics and for what the simulated GPU complains of.
pub struct Trial<'a> {
    case: &'a Case,
    pub scratch: Scratch,
    pub program: PathBuf,
}

impl Trial<'_> {
    pub fn new<'a>(name: &str, case: &'a Case) -> Trial<'a> {
        let scratch = Scratch::new(&format!("preload-case-{name}"));
        let link = format!("-L{}", standin().display());
        let program = compile(
            &scratch,
            &format!("{}.c", case.program()),
            case.program(),
            &[&link, "-Wl,--no-as-needed", case.runtime, "-lcuda"],
        );
        Trial {
            case,
            scratch,
            program,
        }
    }

    pub fn violations(&self) -> PathBuf {
        self.scratch.path().join("violations")
    }

    pub fn stats(&self) -> PathBuf {
        self.scratch.path().join("stats.json")
    }

    /// Runs the program, with `library` preloaded or bare, and with `variables` besides the case's. Returns
    /// what it prints, its exit status last, and how many allocations the pool served.
    pub fn run(&self, library: Option<&Path>, variables: &[(&str, &str)]) -> (String, u64) {
        self.run_with(library, variables, &self.case.arguments())
    }

    /// Like `run`, with other arguments than the case's.
    pub fn run_with(
        &self,
        library: Option<&Path>,
        variables: &[(&str, &str)],
        arguments: &[&str],
    ) -> (String, u64) {
        let stats = self.stats();
        let _ = fs::remove_file(&stats);
        let _ = fs::remove_file(self.violations());
        // A program that hangs is ended; with broken behaviour one may.
        let broken = variables.iter().any(|it| it.0 == "CONCERTINA_BREAK");
        let mut command = Command::new("timeout");
        command.arg(if broken { "10" } else { "300" });
        command.arg(&self.program).args(arguments);
        for name in [
            "CONCERTINA_CONF",
            "CONCERTINA_DISABLE",
            "CONCERTINA_BREAK",
            "LD_PRELOAD",
        ] {
            command.env_remove(name);
        }
        command
            .env("LD_LIBRARY_PATH", standin())
            .env("STANDIN_VIOLATIONS", self.violations())
            .envs(self.case.gpu.iter().copied());
        if !self.case.settings.is_empty() {
            command.env("CONCERTINA_CONF", self.case.settings);
        }
        command.envs(variables.iter().copied());
        if let Some(library) = library {
            command.env("LD_PRELOAD", library);
            command.env("CONCERTINA_STATS", &stats);
        }
        let output = finish(&mut command);
        let (said, errors) = (&output.stdout, &output.stderr);
        let (said, errors) = (
            String::from_utf8_lossy(said),
            String::from_utf8_lossy(errors),
        );
        assert!(
            broken || output.status.code() != Some(124),
            "{said}{errors}: did not end"
        );
        (format!("{said}{errors}{}", output.status), served(&stats))
    }
}

/// Runs a case bare, preloaded, and preloaded with each behaviour broken, and compares.
pub fn compare(name: &str, case: &Case) {
    let trial = Trial::new(name, case);
    let (bare, _) = trial.run(None, &[]);
    // Some programs misuse memory on purpose.
    let punished = trial.violations().exists();
    let (preloaded, pooled) = trial.run(Some(library()), &[]);
    // Misuse that only the simulated GPU reports.
    if let Ok(text) = fs::read_to_string(trial.violations())
        && !punished
    {
        panic!("{name}: {text}");
    }
    assert_eq!(preloaded, bare, "{name}: preloaded, and bare");
    if let Some(expected) = case.pool_serves {
        assert_eq!(
            pooled, expected,
            "{name}: allocations from the pool:\n{bare}"
        );
    }
    for mistake in case.notices_broken {
        let variables = [("CONCERTINA_BREAK", *mistake)];
        let (broken, pooled) = trial.run(Some(breakable_library()), &variables);
        let same = case.pool_serves.is_none_or(|expected| expected == pooled)
            && trial.violations().exists() == punished;
        assert!(
            broken != bare || !same,
            "{name} does not notice that {mistake} is broken"
        );
    }
}

/// How many allocations the pool of a process served, by its statistics.
pub fn served(stats: &Path) -> u64 {
    counted(stats, "allocation.all.allocated")
}

/// One of PyTorch's counters, of all devices; 0 where there are no statistics.
pub fn counted(stats: &Path, name: &str) -> u64 {
    let Ok(text) = fs::read_to_string(stats) else {
        return 0;
    };
    let stats: Value = serde_json::from_str(&text).expect("JSON");
    let devices = stats["devices"].as_array().expect("devices");
    let count = |device: &Value| device["memory_stats"][name].as_u64();
    devices.iter().filter_map(count).sum()
}

/// A table of cases, each of which becomes a test:
///
/// ```text
/// NAME: runs "PROGRAM ARGUMENT...", on [GPU, ...], set "SETTINGS", pool_serves NUMBER, notices_broken ["BEHAVIOUR", ...];
/// ```
///
/// All but the first part may be left out; see the fields of [`Case`].
macro_rules! cases {
    ($(
        $name:ident: runs $command:literal
        $(, on [$($gpu:expr),*])?
        $(, set $settings:literal)?
        $(, pool_serves $pool_serves:literal)?
        $(, notices_broken [$($broken:literal),*])?;
    )*) => {
        $(
            #[test]
            fn $name() {
                $crate::harness::compare(stringify!($name), &$crate::harness::Case {
                    $(gpu: &[$($gpu),*],)?
                    $(settings: $settings,)?
                    $(pool_serves: Some($pool_serves),)?
                    $(notices_broken: &[$($broken),*],)?
                    ..$crate::harness::Case::of($command)
                });
            }
        )*

        /// The commands of this table.
        pub fn runs() -> Vec<&'static str> {
            vec![$($command),*]
        }
    };
}
pub(crate) use cases;

/// Work does not run before something waits for it.
pub const HELD: (&str, &str) = ("STANDIN_PACE", "held");
pub const MEMORY_512_MB: (&str, &str) = ("STANDIN_MEMORY_MB", "512");
pub const MEMORY_1_GB: (&str, &str) = ("STANDIN_MEMORY_MB", "1024");
/// The driver needs memory for a program's kernels when the first one starts.
pub const KERNELS_300_MB: (&str, &str) = ("STANDIN_KERNELS_MB", "300");
pub const TWO_GPUS: (&str, &str) = ("STANDIN_DEVICES", "2");
/// The GPUs have access to each other's memory.
pub const PEERS: (&str, &str) = ("STANDIN_PEERS", "1");
/// Every driver call first allocates and frees memory by the process's functions, as tools that watch a
/// driver may.
pub const NESTED_CALLS: (&str, &str) = ("STANDIN_NESTED", "1");

/// What the stand-in reports at exit: how often each function was called, and what was not freed.
pub fn report(path: &Path) -> Vec<(String, u64)> {
    let text = fs::read_to_string(path).expect("a report");
    let entry = |line: &str| {
        let (name, count) = line.split_once(' ')?;
        Some((name.to_string(), count.parse().ok()?))
    };
    text.lines()
        .map(|line| entry(line).expect("a name and a number"))
        .collect()
}
