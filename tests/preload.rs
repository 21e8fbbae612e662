//! The library preloaded into programs: those that never touch CUDA run as without it, and those that
//! do see what they would see without it, but for addresses and time.
//!
//! The programs of `tests/programs/preload` run bare and preloaded, against the stand-ins for CUDA's
//! libraries, and have to say the same. Each is also run with a library in which the behaviour that it
//! guards is broken, and has to say something else then.

mod library;

use library::{Scratch, breakable_library, library, output, standin};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Compiles a program of `tests/programs/preload`, or with `-shared` a library.
fn compile(scratch: &Scratch, source: &str, name: &str, options: &[&str]) -> PathBuf {
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
fn run(command: &mut Command, preload: Option<&Path>) -> Output {
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

/// What a command that is ready to run says.
fn finish(command: &mut Command) -> Output {
    command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// What `command` makes leaves with the same status and says the same, preloaded as bare; returns
/// what it says.
#[track_caller]
fn same(mut command: impl FnMut() -> Command) -> String {
    let bare = run(&mut command(), None);
    let preloaded = run(&mut command(), Some(library()));
    assert_eq!(preloaded, bare, "{:?}", command());
    assert!(bare.status.success(), "{bare:?}");
    String::from_utf8(bare.stdout).expect("text")
}

#[test]
fn ordinary_programs_run_as_without_it() {
    for (program, arguments) in [
        ("ls", ["/", "-a"]),
        ("bash", ["-c", "echo $((6 * 7)); exec true"]),
        (
            "python3",
            [
                "-c",
                "import ctypes, subprocess, threading\n\
                 print(ctypes.CDLL(None).getppid() > 0)\n\
                 print(subprocess.run(['echo', 'child'], capture_output=True).stdout)",
            ],
        ),
    ] {
        let said = same(|| {
            let mut command = Command::new(program);
            command.args(arguments);
            command
        });
        assert!(!said.is_empty(), "{program}");
    }
}

#[test]
fn a_look_up_needs_no_memory() {
    let scratch = Scratch::new("preload-allocator");
    let program = compile(&scratch, "allocator.c", "allocator", &[]);
    assert_eq!(same(|| Command::new(&program)), "own allocator, 0 nested\n");
}

#[test]
fn a_look_up_needs_no_system_call() {
    let scratch = Scratch::new("preload-seccomp");
    let program = compile(&scratch, "seccomp.c", "seccomp", &[]);
    assert_eq!(same(|| Command::new(&program)), "found\nfound\n");
}

#[test]
fn other_look_ups_reach_the_real_dlsym_from_who_made_them() {
    let scratch = Scratch::new("preload-dlsym");
    let shared = ["-shared", "-fPIC"];
    let local = compile(&scratch, "dlsym_library.c", "liblocal.so", &shared);
    let linked = compile(&scratch, "dlsym_library.c", "liblinked.so", &shared);
    let link = linked.to_str().expect("a path of text");
    let program = compile(&scratch, "dlsym.c", "dlsym", &["-Wl,--no-as-needed", link]);
    let said = same(|| {
        let mut command = Command::new(&program);
        command.arg(&local).arg(&linked);
        command
    });
    for line in [
        "printf next: libc.so.6, no error",
        "cuda-like: nowhere, an error",
        "next to the program: liblinked.so, no error",
        "a library's own: liblocal.so, no error",
        "a local library, next: nowhere, an error",
        "a local library, its own name: liblinked.so, no error",
        "another's: liblocal.so, no error",
    ] {
        assert!(said.lines().any(|it| it == line), "no line {line}:\n{said}");
    }
}

/// A program that uses CUDA.
struct Case {
    program: &'static str,
    arguments: &'static [&'static str],
    /// What the simulated GPU is like, and our settings.
    environment: &'static [(&'static str, &'static str)],
    /// How many allocations the pool is to serve; `None` where the process leaves no statistics.
    pooled: Option<u64>,
    /// The mistakes that it has to notice.
    breaks: &'static [&'static str],
}

/// Bare, preloaded, and preloaded with each mistake.
fn compare(name: &str, case: &Case) {
    let scratch = Scratch::new(&format!("preload-case-{name}"));
    let link = format!("-L{}", standin().display());
    let program = compile(
        &scratch,
        &format!("{}.c", case.program),
        case.program,
        &[&link, "-Wl,--no-as-needed", "-lcudart", "-lcuda"],
    );
    let stats = scratch.path().join("stats.json");
    let violations = scratch.path().join("violations");
    let go = |library: Option<&Path>, mistake: Option<&str>| {
        let _ = fs::remove_file(&stats);
        let _ = fs::remove_file(&violations);
        // Whatever goes wrong, no program runs for ever.
        let mut command = Command::new("timeout");
        command.arg("60").arg(&program).args(case.arguments);
        command.env_remove("LD_PRELOAD");
        for name in ["CONCERTINA_CONF", "CONCERTINA_DISABLE", "CONCERTINA_BREAK"] {
            command.env_remove(name);
        }
        command.env("LD_LIBRARY_PATH", standin());
        command.env("STANDIN_VIOLATIONS", &violations);
        command.envs(case.environment.iter().copied());
        if let Some(library) = library {
            command.env("LD_PRELOAD", library);
            command.env("CONCERTINA_STATS", &stats);
        }
        if let Some(mistake) = mistake {
            command.env("CONCERTINA_BREAK", mistake);
        }
        let output = finish(&mut command);
        (output, library.map_or(0, |_| served(&stats)))
    };
    let (bare, _) = go(None, None);
    // Some programs do on purpose what they should not.
    let punished = violations.exists();
    let (preloaded, pooled) = go(Some(library()), None);
    // What a real GPU would punish.
    if let Ok(text) = fs::read_to_string(&violations)
        && !punished
    {
        panic!("{name}: {text}");
    }
    let text = |output: &Output| {
        let (said, errors) = (&output.stdout, &output.stderr);
        let (said, errors) = (
            String::from_utf8_lossy(said),
            String::from_utf8_lossy(errors),
        );
        format!("{said}{errors}{}", output.status)
    };
    assert_eq!(text(&preloaded), text(&bare), "{name}: preloaded, and bare");
    assert_ne!(bare.status.code(), Some(124), "{name}: did not end");
    if let Some(expected) = case.pooled {
        assert_eq!(
            pooled,
            expected,
            "{name}: allocations from the pool:\n{}",
            text(&bare)
        );
    }
    for mistake in case.breaks {
        let (broken, pooled) = go(Some(breakable_library()), Some(mistake));
        let same = case.pooled.is_none_or(|expected| expected == pooled);
        assert!(
            text(&broken) != text(&bare) || !same,
            "{name} does not notice that {mistake} is broken"
        );
    }
}

/// How many allocations the pool of a process served, as its statistics say.
fn served(stats: &Path) -> u64 {
    let Ok(text) = fs::read_to_string(stats) else {
        return 0;
    };
    let stats: Value = serde_json::from_str(&text).expect("JSON");
    let devices = stats["devices"].as_array().expect("devices");
    let count = |device: &Value| device["memory_stats"]["allocation.all.allocated"].as_u64();
    devices.iter().filter_map(count).sum()
}

macro_rules! cases {
    ($($name:ident: $program:literal $arguments:expr, $environment:expr, $pooled:expr, $breaks:expr;)*) => {
        $(
            #[test]
            fn $name() {
                compare(stringify!($name), &Case {
                    program: $program,
                    arguments: &$arguments,
                    environment: &$environment,
                    pooled: $pooled,
                    breaks: &$breaks,
                });
            }
        )*

        /// What is run here.
        fn runs() -> Vec<String> {
            vec![$([&[$program], &$arguments[..]].concat().join(" ")),*]
        }
    };
}

const HELD: (&str, &str) = ("STANDIN_PACE", "held");

cases! {
    // Of each width the first allocation with rows is the driver's own.
    reach_by_the_runtime: "runtime" [], [], Some(11), ["dlsym", "proc_address", "pool", "pitch"];
    reach_by_the_driver: "driver" [], [], Some(5), ["pool"];
    reach_by_symbols_looked_up: "loader" ["symbols"], [], Some(4), ["dlsym"];
    reach_by_the_old_look_up: "loader" ["v1"], [], Some(4), ["dlsym", "proc_address"];
    reach_by_the_new_look_up: "loader" ["v2"], [], Some(4), ["dlsym", "proc_address"];
    reach_by_entry_points: "entry_point" [], [], Some(3), ["dlsym", "proc_address"];
    sizes_and_errors: "sizes" [], [], Some(9), ["zero"];
    frees_that_are_wrong: "wrong_frees" [], [], Some(2), ["unknown"];
    cuda_free_waits: "waits" [], [HELD], Some(4), ["wait"];
    memory_in_order: "ordered" [], [HELD], Some(15), ["order", "apart"];
    memory_pools: "pools" [], [], Some(3), ["pools"];
    captures: "capture" [], [], Some(3), ["capture"];
    free_memory: "info" [], [], Some(9), ["info"];
    addresses: "attributes" ["1024"], [], Some(3), ["range", "attributes"];
    a_device_that_is_reset: "reset" [], [], Some(7), ["reset"];
    a_context_that_is_released: "release" [], [], Some(6), ["reset"];
    threads: "threads" [], [], Some(1600), ["pool"];
    a_process_that_returns: "processes" ["return"], [], Some(2), ["pool"];
    a_process_that_exits: "processes" ["exit"], [], Some(2), ["pool"];
    a_process_that_leaves_at_once: "processes" ["_exit"], [], None, [];
    a_process_that_exits_in_a_thread: "processes" ["thread"], [], Some(2), ["pool"];
    a_process_that_becomes_another: "processes" ["exec"], [], Some(1), ["pool"];
}

/// `scripts/test-preload.sh` runs on a GPU what the programs say themselves (`Run:`).
#[test]
fn what_the_programs_say_of_their_runs_is_run() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/preload");
    let mut said = Vec::new();
    for entry in fs::read_dir(directory).expect("a directory") {
        let text = fs::read_to_string(entry.expect("an entry").path()).expect("text");
        let run = |line: &str| Some(line.split_once("* Run: ")?.1.to_string());
        said.extend(text.lines().filter_map(run));
    }
    let mut run = runs();
    run.sort();
    run.dedup();
    said.sort();
    assert_eq!(said, run);
}
