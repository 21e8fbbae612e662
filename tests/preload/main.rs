//! The library preloaded into programs: those that never touch CUDA run as without it, and those that
//! do see what they would see without it, but for addresses and time.
//!
//! The programs of `tests/programs/preload` run bare and preloaded, against the stand-ins for CUDA's
//! libraries, and have to say the same. Each is also run with a library in which the behaviour that it
//! guards is broken, and has to say something else then.

#[path = "../library/mod.rs"]
mod library;

use library::{Scratch, breakable_library, library, output, standin};
use serde_json::{Value, json};
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
    let program = compile(&scratch, "dlsym_in_own_allocator.c", "allocator", &[]);
    assert_eq!(same(|| Command::new(&program)), "own allocator, 0 nested\n");
}

#[test]
fn a_look_up_needs_no_system_call() {
    let scratch = Scratch::new("preload-seccomp");
    let program = compile(&scratch, "dlsym_under_seccomp.c", "seccomp", &[]);
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
    /// The runtime that it is linked to.
    runtime: &'static str,
}

impl Case {
    /// With CUDA 13, an ordinary GPU and no mistakes.
    const fn of(program: &'static str) -> Case {
        Case {
            program,
            arguments: &[],
            environment: &[],
            pooled: None,
            breaks: &[],
            runtime: "-lcudart",
        }
    }
}

/// A program of `tests/programs/preload`, its statistics and what the simulated GPU has to complain of.
struct Trial<'a> {
    case: &'a Case,
    scratch: Scratch,
    program: PathBuf,
}

impl Trial<'_> {
    fn new<'a>(name: &str, case: &'a Case) -> Trial<'a> {
        let scratch = Scratch::new(&format!("preload-case-{name}"));
        let link = format!("-L{}", standin().display());
        let program = compile(
            &scratch,
            &format!("{}.c", case.program),
            case.program,
            &[&link, "-Wl,--no-as-needed", case.runtime, "-lcuda"],
        );
        Trial {
            case,
            scratch,
            program,
        }
    }

    fn violations(&self) -> PathBuf {
        self.scratch.path().join("violations")
    }

    fn stats(&self) -> PathBuf {
        self.scratch.path().join("stats.json")
    }

    /// Runs the program with a library, which may be none, and variables besides the case's. Returns
    /// all that it says, its status last, and how many allocations the pool served.
    fn run(&self, library: Option<&Path>, variables: &[(&str, &str)]) -> (String, u64) {
        self.run_with(library, variables, self.case.arguments)
    }

    /// The same with other arguments than the case's.
    fn run_with(
        &self,
        library: Option<&Path>,
        variables: &[(&str, &str)],
        arguments: &[&str],
    ) -> (String, u64) {
        let stats = self.stats();
        let _ = fs::remove_file(&stats);
        let _ = fs::remove_file(self.violations());
        // Whatever goes wrong, no program runs for ever; one with a mistake may try to.
        let broken = variables.iter().any(|it| it.0 == "CONCERTINA_BREAK");
        let mut command = Command::new("timeout");
        command.arg(if broken { "10" } else { "60" });
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
            .envs(self.case.environment.iter().copied())
            .envs(variables.iter().copied());
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

/// Bare, preloaded, and preloaded with each mistake.
fn compare(name: &str, case: &Case) {
    let trial = Trial::new(name, case);
    let (bare, _) = trial.run(None, &[]);
    // Some programs do on purpose what they should not.
    let punished = trial.violations().exists();
    let (preloaded, pooled) = trial.run(Some(library()), &[]);
    // What a real GPU would punish.
    if let Ok(text) = fs::read_to_string(trial.violations())
        && !punished
    {
        panic!("{name}: {text}");
    }
    assert_eq!(preloaded, bare, "{name}: preloaded, and bare");
    if let Some(expected) = case.pooled {
        assert_eq!(
            pooled, expected,
            "{name}: allocations from the pool:\n{bare}"
        );
    }
    for mistake in case.breaks {
        let variables = [("CONCERTINA_BREAK", *mistake)];
        let (broken, pooled) = trial.run(Some(breakable_library()), &variables);
        let same = case.pooled.is_none_or(|expected| expected == pooled)
            && trial.violations().exists() == punished;
        assert!(
            broken != bare || !same,
            "{name} does not notice that {mistake} is broken"
        );
    }
}

/// How many allocations the pool of a process served, as its statistics say.
fn served(stats: &Path) -> u64 {
    counted(stats, "allocation.all.allocated")
}

/// One of PyTorch's counters, of all devices; 0 where there are no statistics.
fn counted(stats: &Path, name: &str) -> u64 {
    let Ok(text) = fs::read_to_string(stats) else {
        return 0;
    };
    let stats: Value = serde_json::from_str(&text).expect("JSON");
    let devices = stats["devices"].as_array().expect("devices");
    let count = |device: &Value| device["memory_stats"][name].as_u64();
    devices.iter().filter_map(count).sum()
}

macro_rules! cases {
    ($($name:ident: $program:literal $arguments:expr, $environment:expr, $pooled:expr, $breaks:expr;)*) => {
        $(
            #[test]
            fn $name() {
                compare(stringify!($name), &Case {
                    arguments: &$arguments,
                    environment: &$environment,
                    pooled: $pooled,
                    breaks: &$breaks,
                    ..Case::of($program)
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
    reach_by_the_runtime: "runtime_symbols" [], [], Some(11), ["dlsym", "proc_address", "pool", "pitch"];
    reach_by_the_driver: "driver_symbols" [], [], Some(5), ["pool"];
    reach_by_symbols_looked_up: "dlsym_driver" ["symbols"], [], Some(4), ["dlsym"];
    reach_by_the_old_look_up: "dlsym_driver" ["v1"], [], Some(4), ["dlsym", "proc_address"];
    reach_by_the_new_look_up: "dlsym_driver" ["v2"], [], Some(4), ["dlsym", "proc_address"];
    reach_by_entry_points: "runtime_entry_point" [], [], Some(3), ["dlsym", "proc_address"];
    sizes_and_errors: "cuda_malloc_sizes" [], [], Some(9), ["zero"];
    frees_that_are_wrong: "wrong_frees" [], [], Some(2), ["unknown"];
    cuda_free_waits: "cuda_free_waits" [], [HELD], Some(4), ["wait"];
    devices: "several_gpus" [], [("STANDIN_DEVICES", "2"), ("STANDIN_PEERS", "1")], Some(3), ["elsewhere"];
    contexts: "own_context" [], [], Some(2), ["context"];
    a_driver_that_calls_itself: "runtime_symbols" [], [("STANDIN_NESTED", "1")], None, ["inside"];
    a_runtime_that_is_opened: "dlopen_runtime" [], [], Some(3), ["dlsym"];
    memory_that_runs_out: "out_of_memory" [], [("STANDIN_MEMORY_MB", "512")], None, [];
    memory_in_order: "malloc_async" [], [HELD], Some(15), ["order", "apart", "numbers"];
    each_threads_default_stream: "per_thread_default_stream" [], [HELD], Some(8), ["per thread"];
    memory_of_the_programs_own: "own_mappings" [], [], Some(1), ["handles", "own handles"];
    memory_that_the_program_maps: "vmm_map" [], [], Some(1), ["kept asked", "kept released", "kept shared"];
    memory_that_is_kept_mapped: "vmm_map" ["400"], [("STANDIN_MEMORY_MB", "512")], Some(1), ["kept back"];
    memory_that_is_kept_mapped_beside_cudas_own: "vmm_map" ["400"], [("STANDIN_MEMORY_MB", "512"), ("CONCERTINA_CONF", "ipc:True")], None, ["kept back"];
    memory_that_the_driver_takes: "out_of_memory_retry" [], [("STANDIN_MEMORY_MB", "1024"), ("STANDIN_KERNELS_MB", "300")], None, ["room"];
    memory_that_the_driver_takes_while_frees_wait: "out_of_memory_retry" [], [("STANDIN_MEMORY_MB", "1024"), ("STANDIN_KERNELS_MB", "300"), ("CONCERTINA_CONF", "free:relaxed")], None, ["room"];
    memory_that_is_kept_mapped_beside_cudas_own_under_a_limit: "vmm_map" ["400"], [("STANDIN_MEMORY_MB", "512"), ("CONCERTINA_CONF", "ipc:True,limit:500MiB")], None, ["kept back"];
    memory_pools: "mem_pools" [], [], Some(5), ["pools", "pool attributes"];
    captures_while_memory_is_idle: "capture_while_memory_is_idle" [], [("CONCERTINA_CONF", "idle_release_ms:20")], Some(1), [];
    idle_memory_under_a_driver_that_calls_itself: "purge" [], [("STANDIN_NESTED", "1"), ("CONCERTINA_CONF", "idle_release_ms:20")], None, ["inside"];
    captures: "capture" [], [], Some(3), ["capture"];
    captures_global_beside_threads_that_allocate_in_order: "capture_by_another_thread" ["order", "300", "0"], [], None, [];
    captures_thread_local_beside_threads_that_allocate_in_order: "capture_by_another_thread" ["order", "300", "1"], [], None, [];
    captures_relaxed_beside_threads_that_allocate_in_order: "capture_by_another_thread" ["order", "300", "2"], [], None, [];
    captures_thread_local_beside_threads_that_free: "capture_by_another_thread" ["free", "3000", "1"], [], None, ["idle"];
    captures_relaxed_beside_threads_that_free: "capture_by_another_thread" ["free", "300", "2"], [], None, [];
    captures_beside_threads_that_free_relaxed: "capture_by_another_thread" ["free", "3000", "1"], [("CONCERTINA_CONF", "free:relaxed")], None, [];
    captures_on_a_full_device: "capture_on_a_full_device" [], [("STANDIN_MEMORY_MB", "512")], None, [];
    captures_of_a_blocking_stream: "capture_by_another_thread" ["blocking", "300", "2"], [], None, [];
    a_capture_on_a_device_that_is_reset: "capture_while_the_device_is_reset" [], [], Some(65), [];
    memory_freed_in_the_order_of_another_devices_stream: "free_async_on_another_device" [], [HELD, ("STANDIN_DEVICES", "2"), ("STANDIN_PEERS", "1")], None, [];
    captures_of_several_threads_default_streams: "capture_on_per_thread_streams" [], [], None, [];
    free_memory: "mem_info" [], [], Some(9), ["info"];
    addresses: "pointer_attributes" ["1024"], [], Some(3), ["range", "attributes"];
    a_device_that_is_reset: "device_reset" [], [], Some(7), ["reset"];
    a_context_that_is_released: "primary_context_release" [], [], Some(6), ["reset"];
    threads: "threads" [], [], Some(1600), ["pool"];
    calls_of_every_kind: "call_counts" [], [], Some(1625), ["pool"];
    threads_and_streams: "threads_and_streams" [], [HELD], None, ["wait"];
    memory_in_another_process: "ipc" [], [], Some(5), ["ipc", "ipc offset", "ipc count"];
    memory_in_another_process_on_two_devices: "ipc" ["devices"], [("STANDIN_DEVICES", "2"), ("STANDIN_PEERS", "1")], Some(5), ["ipc", "ipc offset"];
    segments_in_another_process: "ipc" [], [("CONCERTINA_CONF", "expandable_segments:False")], Some(5), ["ipc", "ipc offset"];
    a_process_that_returns: "fork_and_exit" ["return"], [], Some(2), ["pool"];
    a_process_that_exits: "fork_and_exit" ["exit"], [], Some(2), ["pool"];
    a_process_that_leaves_at_once: "fork_and_exit" ["_exit"], [], None, [];
    a_process_that_exits_in_a_thread: "fork_and_exit" ["thread"], [], Some(2), ["pool"];
    a_process_that_becomes_another: "fork_and_exit" ["exec"], [], Some(1), ["pool"];
}

#[test]
fn the_runtime_of_cuda_12() {
    let case = Case {
        runtime: "-l:libcudart.so.12",
        pooled: Some(11),
        ..Case::of("runtime_symbols")
    };
    compare("the_runtime_of_cuda_12", &case);
}

/// Without a driver a program hears what it would hear without us. One that is there is hidden by a file
/// that the linker cannot load.
#[test]
fn a_machine_without_a_driver() {
    for (program, arguments) in [
        ("dlsym_driver", ["symbols"]),
        ("dlsym_driver", ["v2"]),
        ("dlopen_runtime", [""]),
    ] {
        let case = Case::of(program);
        let trial = Trial::new("driverless", &case);
        fs::write(trial.scratch.path().join("libcuda.so.1"), "no driver\n").expect("a file");
        let hidden = trial.scratch.path().to_str().expect("text");
        let runtime = trial.scratch.path().join("libcudart.so.13");
        fs::copy(standin().join("libcudart.so.13"), runtime).expect("a library");
        let variables = [("LD_LIBRARY_PATH", hidden)];
        let (bare, _) = trial.run_with(None, &variables, &arguments);
        let preloaded = trial.run_with(Some(library()), &variables, &arguments);
        assert_eq!(preloaded, (bare, 0), "{program}");
    }
}

/// What the environment can say, of a program that runs the same all the time.
#[test]
fn memory_that_cannot_be_mapped() {
    for (name, variable) in [
        ("unmappable", ("STANDIN_VIRTUAL_MEMORY", "0")),
        ("plain", ("CONCERTINA_CONF", "expandable_segments:False")),
    ] {
        for program in [
            "runtime_symbols",
            "wrong_frees",
            "cuda_free_waits",
            "malloc_async",
            "device_reset",
        ] {
            let case = Case::of(program);
            let trial = Trial::new(&format!("{name}-{program}"), &case);
            let variables = [variable, HELD];
            let (bare, _) = trial.run(None, &variables);
            let (preloaded, pooled) = trial.run(Some(library()), &variables);
            let said = "concertina: device 0 (Simulated GPU) cannot map memory: plain cudaMalloc \
                        segments are used there\n";
            assert_eq!(preloaded.replace(said, ""), bare, "{program}, {name}");
            assert!(pooled > 0, "{program}, {name}");
        }
    }
}

/// The command does no more than set the environment, and leaves with the program's status.
#[test]
fn the_command_runs_a_program() {
    let case = Case::of("limit");
    let trial = Trial::new("command", &case);
    let stats = trial.scratch.path().join("stats.json");
    let concertina = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_concertina"));
        command
            .arg("run")
            .args(arguments)
            .env("LD_LIBRARY_PATH", standin());
        for name in ["CONCERTINA_CONF", "CONCERTINA_STATS", "LD_PRELOAD"] {
            command.env_remove(name);
        }
        command
    };
    let path = |path: &Path| path.to_str().expect("text").to_string();
    let (library, program) = (path(library()), path(&trial.program));
    let options = ["--library", &library, "--stats", &path(&stats)];
    let run = [
        &options[..],
        &["--limit", "64", "--relaxed", "--", &program],
    ]
    .concat();
    let said = output(&mut concertina(&run));
    assert!(said.contains("24 of 64 MiB\n"), "{said}");
    assert_eq!(served(&stats), 65);

    let mut shell = concertina(&["--library", &library, "sh", "-c"]);
    shell.arg("echo $LD_PRELOAD $CONCERTINA_CONF; exit 9");
    let other = "/lib/x86_64-linux-gnu/libc.so.6";
    let ended = shell
        .env("LD_PRELOAD", other)
        .env("CONCERTINA_CONF", "free:strict")
        .output()
        .expect("it runs");
    assert_eq!(ended.status.code(), Some(9));
    let said = String::from_utf8_lossy(&ended.stdout);
    assert_eq!(said, format!("{library}:{other} free:strict\n"));

    // The path of the statistics is the same for programs that go elsewhere.
    let directory = trial.scratch.path().join("5%p");
    fs::create_dir(&directory).expect("a directory");
    let elsewhere = path(&trial.scratch.path().join("stats.json"));
    for (given, expected) in [
        (
            "stats-%p.json",
            format!("{}/stats-%p.json", path(&trial.scratch.path().join("5%%p"))),
        ),
        (&elsewhere, elsewhere.clone()),
    ] {
        let options = ["--library", &library, "--stats", given, "sh", "-c"];
        let mut shell = concertina(&options);
        shell
            .arg("cd /; echo $CONCERTINA_STATS")
            .current_dir(&directory);
        assert_eq!(output(&mut shell), format!("{expected}\n"));
    }

    let no_library = trial.scratch.path().join("no-library.so");
    fs::write(&no_library, "no library\n").expect("a file");
    let no_library = path(&no_library);
    let other = path(
        &standin()
            .join("libcuda.so.1")
            .canonicalize()
            .expect("it is there"),
    );
    for (arguments, status, line) in [
        (
            &["--library", &library, "/no/such/program"][..],
            127,
            "run: /no/such/program: ",
        ),
        (&["--library", &library, "/"], 126, "run: /: "),
        (
            &["--library", "/no/such/file", "true"],
            2,
            "run: the library /no/such/file: ",
        ),
        (
            &["--library", &no_library, "true"],
            2,
            &format!("run: the library {no_library}: "),
        ),
        (
            &["--library", &other, "true"],
            2,
            &format!("run: the library {other}: it is not concertina's library"),
        ),
        (
            &["--stats", "no/such/directory/stats.json", "true"],
            2,
            "run: --stats: statistics cannot be written to \"no/such/directory/stats.json\": No such file",
        ),
        (
            &["--stats", "/dev/null/stats.json", "true"],
            2,
            "run: --stats: statistics cannot be written to \"/dev/null/stats.json\": Not a directory",
        ),
        (
            &["--stats", "100%", "true"],
            2,
            "run: --stats: statistics path \"100%\": it ends in a single %",
        ),
        (
            &["--stats", "", "true"],
            2,
            "run: --stats: statistics path \"\": it names no file",
        ),
        (
            &["--limit", "8Q", "true"],
            2,
            "run: --limit 8Q: allowed is 1 to 67108864 MiB, or 8GiB, ",
        ),
        (
            &["--limit", "0", "true"],
            2,
            "run: --limit 0: allowed is 1 to ",
        ),
        (
            &["--fast", "true"],
            2,
            "run: invalid option '--fast'; allowed are --library, ",
        ),
        (&[], 2, "run: no command is given; one is needed"),
    ] {
        let output = concertina(arguments).output().expect("it runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{errors}");
        assert!(
            errors.starts_with(&format!("concertina: {line}")),
            "{errors}"
        );
        assert_eq!(errors.lines().count(), 1, "{errors}");
    }
}

/// What is set wrong is said before the program starts, which it then does not.
#[test]
fn run_does_not_start_a_program_that_is_set_wrong() {
    let start = |variable: &str, value: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_concertina"));
        for name in [
            "CONCERTINA_CONF",
            "CONCERTINA_STATS",
            "PYTORCH_CUDA_ALLOC_CONF",
        ] {
            command.env_remove(name);
        }
        command.args(["run", "--library"]).arg(library());
        command.args(["echo", "started"]).env(variable, value);
        let output = command.output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        (
            output.status.code(),
            said,
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    for (variable, value) in [
        ("CONCERTINA_CONF", "limit:8Q"),
        ("CONCERTINA_CONF", "limt:8G"),
        ("CONCERTINA_CONF", "free:lazy"),
        ("CONCERTINA_CONF", "nonsense"),
        ("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:2"),
        ("CONCERTINA_STATS", "/no/such/directory/stats.json"),
    ] {
        let (status, said, errors) = start(variable, value);
        assert_eq!(
            (status, said.as_str()),
            (Some(2), ""),
            "{variable}={value}: {errors}"
        );
        assert_eq!(errors.lines().count(), 1, "{errors}");
        assert!(
            errors.starts_with(&format!("concertina: run: {variable}: ")),
            "{errors}"
        );
    }
    for (variable, value) in [
        ("CONCERTINA_CONF", "limit:8.5g,verbose:1"),
        // A newer PyTorch may know it.
        ("PYTORCH_CUDA_ALLOC_CONF", "of_a_newer_release:True"),
    ] {
        let (status, said, errors) = start(variable, value);
        assert_eq!((status, said.as_str()), (Some(0), "started\n"), "{errors}");
        assert_eq!(errors, "");
    }
}

/// One line, from each process that uses the GPU and no other.
#[test]
fn verbose_says_that_it_is_on() {
    let case = Case::of("runtime_symbols");
    let trial = Trial::new("verbose", &case);
    let program = trial.program.to_str().expect("text");
    let mut command = Command::new(env!("CARGO_BIN_EXE_concertina"));
    command
        .args(["run", "--verbose", "--limit", "1.5G", "--library"])
        .arg(library());
    command
        .args(["sh", "-c"])
        .arg(format!("{program} >/dev/null; true"));
    command
        .env_remove("CONCERTINA_CONF")
        .env_remove("CONCERTINA_STATS");
    command
        .env("LD_LIBRARY_PATH", standin())
        .env("STANDIN_DEVICES", "2");
    let output = command.output().expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    let said: Vec<_> = errors
        .lines()
        .filter(|line| line.starts_with("concertina: "))
        .collect();
    let start = format!(
        "concertina: {} is on, under LD_PRELOAD; devices: 0 ",
        env!("CARGO_PKG_VERSION")
    );
    assert_eq!(said.len(), 1, "{errors}");
    assert!(
        said[0].starts_with(&start) && said[0].contains(", 1 "),
        "{errors}"
    );
    let end = "; limit: 1.500 GiB on each device; settings: verbose:1,limit:1610612736";
    assert!(said[0].ends_with(end), "{errors}");
}

#[test]
fn nothing_is_done_where_it_is_disabled() {
    let case = Case::of("runtime_symbols");
    let trial = Trial::new("disabled", &case);
    let (bare, _) = trial.run(None, &[]);
    let disabled = [("CONCERTINA_DISABLE", "1")];
    assert_eq!(trial.run(Some(library()), &disabled), (bare.clone(), 0));
    let enabled = [("CONCERTINA_DISABLE", "0")];
    assert_eq!(trial.run(Some(library()), &enabled), (bare, 11));
}

/// A call of the pool's that the driver refuses, once or always, is none that the program notices.
#[test]
fn failures_that_the_driver_makes_up_for() {
    let case = Case::of("runtime_symbols");
    let trial = Trial::new("failing", &case);
    let (bare, _) = trial.run(None, &[]);
    for function in [
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemAddressReserve",
        "cuMemGetAllocationGranularity",
        "cuDevicePrimaryCtxGetState",
        "cuStreamGetCtx",
        "cuStreamGetId",
    ] {
        for (use_of, status) in [("1", 2), ("2", 2), ("*", 2), ("1", 999), ("*", 999)] {
            let failure = format!("{function}:{use_of}:{status}");
            let (said, _) = trial.run(Some(library()), &[("STANDIN_FAIL", &failure)]);
            let said = said.replace(
                "concertina: device 0 (Simulated GPU) cannot map memory: plain cudaMalloc segments \
                 are used there\n",
                "",
            );
            assert_eq!(said, bare, "{failure}");
        }
    }
}

/// What the stand-in reports at exit: how often each function was called, and what was not given back.
fn report(path: &Path) -> Vec<(String, u64)> {
    let text = fs::read_to_string(path).expect("a report");
    let entry = |line: &str| {
        let (name, count) = line.split_once(' ')?;
        Some((name.to_string(), count.parse().ok()?))
    };
    text.lines()
        .map(|line| entry(line).expect("a name and a number"))
        .collect()
}

/// Whichever call of the driver's fails, at whichever use: the program gets that error, or none; what it
/// holds stays as it is; and nothing is lost.
#[test]
fn any_call_may_fail() {
    /// Uses of a function that are tried, at most.
    const USES: u64 = 8;
    const GOOD: &str = "0 wrong, all there\nexit status: 0";
    /// How a line begins that says why there is no pool, or one without mapped memory.
    const SAID: [&str; 2] = [
        "concertina: no memory can be had: the CUDA driver does not start: ",
        "concertina: device 0 (Simulated GPU) cannot map memory: ",
    ];
    let case = Case::of("driver_failures");
    let trial = Trial::new("unlucky", &case);
    let kept = trial.scratch.path().join("report");
    let mut mistakes = Vec::new();
    for (pace, conf) in [
        ("immediate", ""),
        ("held", ""),
        ("held", "free:relaxed"),
        ("immediate", "expandable_segments:False"),
    ] {
        let mut run = |failure: &str| {
            let mut variables = vec![
                ("STANDIN_MEMORY_MB", "160"),
                ("STANDIN_PACE", pace),
                ("STANDIN_REPORT", kept.to_str().expect("text")),
                ("CONCERTINA_CONF", conf),
            ];
            if !failure.is_empty() {
                variables.push(("STANDIN_FAIL", failure));
            }
            let status = failure.rsplit(':').next().unwrap_or_default();
            let (said, _) = trial.run_with(Some(library()), &variables, &[status]);
            let said = said
                .lines()
                .filter(|line| !SAID.iter().any(|it| line.starts_with(it)));
            let said = said.collect::<Vec<_>>().join("\n");
            let violations = fs::read_to_string(trial.violations()).unwrap_or_default();
            let report = report(&kept);
            let left = |name| report.iter().any(|(it, count)| it == name && *count > 0);
            let counts = [
                "allocation",
                "allocated_bytes",
                "active_bytes",
                "reserved_bytes",
            ];
            let counted = |name| counted(&trial.stats(), &format!("{name}.all.current")) > 0;
            // What begins CUDA may fail for good, without the library, too.
            let good = match said == GOOD {
                true => {
                    !["bytes", "handles", "mappings"].into_iter().any(left)
                        && !counts.into_iter().any(counted)
                }
                false => said == trial.run_with(None, &variables, &[status]).0,
            };
            if !good || !violations.is_empty() {
                let left: Vec<_> = report.iter().rev().take(4).collect();
                mistakes.push(format!(
                    "{failure} {pace} {conf}: {said}\n{violations}{left:?}"
                ));
            }
            report
        };
        let calls = run("");
        for (function, count) in calls.iter().filter(|(name, _)| name.starts_with("cu")) {
            let step = count.div_ceil(USES) as usize;
            for (which, nth) in (1..=*count).step_by(step).enumerate() {
                let status = if which % 2 == 0 { 999 } else { 2 };
                run(&format!("{function}:{nth}:{status}"));
            }
        }
    }
    assert!(mistakes.is_empty(), "{}", mistakes.join("\n"));
}

/// Whatever a program does with memory of its own, wrong calls among it, says what it says bare.
#[test]
fn memory_that_is_mapped_in_no_order_at_all() {
    const SEEDS: u32 = 10;
    let case = Case::of("vmm_random_calls");
    let trial = Trial::new("random-maps", &case);
    let mut noticed = 0;
    for devices in ["1", "2"] {
        for seed in 0..SEEDS {
            let seed = seed.to_string();
            let run = |library: Option<&Path>, mistake: Option<&str>| {
                let mut variables = vec![("STANDIN_DEVICES", devices), ("STANDIN_PEERS", "1")];
                variables.extend(mistake.map(|it| ("CONCERTINA_BREAK", it)));
                trial.run_with(library, &variables, &[&seed, "300"]).0
            };
            let bare = run(None, None);
            let preloaded = run(Some(library()), None);
            assert_eq!(preloaded, bare, "{devices} devices, {seed}");
            let broken = run(Some(breakable_library()), Some("kept asked"));
            noticed += u32::from(broken != bare);
        }
    }
    assert!(noticed > 0, "of {}", 2 * SEEDS);
}

/// Memory that the program maps itself, as it takes it down, is left up for its next request, and goes back
/// where nobody asks for it any more.
#[test]
fn memory_that_is_mapped_again_costs_the_driver_nothing() {
    let case = Case::of("vmm_map");
    let trial = Trial::new("mapped-again", &case);
    let kept = trial.scratch.path().join("report");
    let calls = |library: Option<&Path>, more: &[(&str, &str)], arguments: &[&str]| {
        let mut variables = vec![("STANDIN_REPORT", kept.to_str().expect("text"))];
        variables.extend(more);
        trial.run_with(library, &variables, arguments);
        report(&kept)
    };
    let of = |report: &[(String, u64)], name: &str| {
        let found = report.iter().find(|(it, _)| it == name);
        found.map_or(0, |(_, count)| *count)
    };
    let bare = calls(None, &[], &[]);
    let broken = calls(
        Some(breakable_library()),
        &[("CONCERTINA_BREAK", "kept")],
        &[],
    );
    let preloaded = calls(Some(library()), &[], &[]);
    let stats = fs::read_to_string(trial.stats()).expect("statistics");
    let stats: Value = serde_json::from_str(&stats).expect("JSON");
    let served = stats["kept"]["served"].as_u64();
    assert!(served.is_some_and(|served| served > 500), "{stats}");
    for function in ["cuMemCreate", "cuMemSetAccess", "cuMemUnmap"] {
        let [bare, broken, preloaded] = [&bare, &broken, &preloaded].map(|it| of(it, function));
        assert!(preloaded < 100, "{function}: {preloaded}");
        assert!(bare > 500 && broken > 500, "{function}: {bare} {broken}");
    }
    for (conf, argument, left) in [
        ("", "0", true),
        ("idle_release_ms:20", "0", false),
        ("", "asleep", false),
    ] {
        let report = calls(Some(library()), &[("CONCERTINA_CONF", conf)], &[argument]);
        assert_eq!(
            of(&report, "bytes") > 0,
            left,
            "{conf} {argument}: {report:?}"
        );
    }
}

/// Addresses that a program has given back are there for it again. A real driver gives such only sometimes.
#[test]
fn addresses_that_are_wanted_again() {
    let case = Case {
        arguments: &["wanted"],
        breaks: &["kept wanted"],
        ..Case::of("vmm_map")
    };
    compare("wanted", &case);
}

/// What a machine without a GPU can show only, or a GPU only sometimes.
#[test]
fn memory_that_the_driver_takes_elsewhere_and_meanwhile() {
    const MEMORY: (&str, &str) = ("STANDIN_MEMORY_MB", "1024");
    let on_standin = |arguments: &'static [&str], environment: &'static [(&str, &str)]| {
        let case = Case {
            arguments,
            environment,
            breaks: &["room"],
            ..Case::of("out_of_memory_retry")
        };
        compare(&format!("passed-on-{}", arguments[0]), &case);
    };
    on_standin(&["managed"], &[MEMORY]);
    on_standin(&["held"], &[MEMORY, HELD]);
    on_standin(&["devices"], &[MEMORY, ("STANDIN_DEVICES", "2")]);
}

/// Loads that change from round to round, and storms that take all memory: nothing adds up.
#[test]
fn what_is_kept_does_not_grow() {
    let case = Case::of("soak");
    let trial = Trial::new("soak", &case);
    let rounds = |kind: &str, pace: &str, conf: &str, library: Option<&Path>, mistake: &str| {
        let variables = [
            ("STANDIN_MEMORY_MB", "512"),
            ("STANDIN_PACE", pace),
            ("CONCERTINA_CONF", conf),
            ("CONCERTINA_BREAK", mistake),
        ];
        let (said, pooled) = trial.run_with(library, &variables, &[kind, "8"]);
        let good = said.starts_with("0 wrong\n") && said.ends_with("exit status: 0");
        let violations = fs::read_to_string(trial.violations()).unwrap_or_default();
        (good && violations.is_empty(), pooled, said + &violations)
    };
    for kind in ["load", "storm"] {
        for pace in ["immediate", "held"] {
            for conf in ["", "free:relaxed"] {
                let (good, pooled, said) = rounds(kind, pace, conf, Some(library()), "");
                assert!(good && pooled > 0, "{kind}, {pace}, {conf}: {said}");
            }
        }
        assert!(rounds(kind, "held", "", None, "").0, "{kind}, bare");
        let (good, _, said) = rounds(kind, "held", "", Some(breakable_library()), "leak");
        assert!(!good, "{kind} does not notice a leak: {said}");
    }
}

/// Failures that the program has to hear of.
#[test]
fn failures_of_work_are_the_programs() {
    let case = Case::of("failed_work");
    let trial = Trial::new("failures", &case);
    for (failure, mistake) in [
        // What a GPU answers whose work has failed: everything fails with it.
        (
            "cuStreamGetCtx:*:700,cuMemAlloc_v2:*:700,cuCtxSynchronize:*:700,cuMemFree_v2:*:700,\
             cuMemAllocAsync:*:700,cuEventSynchronize:*:700",
            "health",
        ),
        (
            "cuCtxSynchronize:*:700,cuEventSynchronize:*:700,cuMemFree_v2:*:700",
            "wait",
        ),
        // A device without memory.
        ("cuMemCreate:*:2,cuMemAlloc_v2:*:2", "pool"),
    ] {
        let failure = ("STANDIN_FAIL", failure);
        let (bare, _) = trial.run(None, &[failure]);
        let (preloaded, _) = trial.run(Some(library()), &[failure]);
        assert_eq!(preloaded, bare, "{failure:?}");
        assert!(bare.contains(": 700") || bare.contains(": 2"), "{bare}");
        if mistake != "pool" {
            let broken = [failure, ("CONCERTINA_BREAK", mistake)];
            let (said, _) = trial.run(Some(breakable_library()), &broken);
            assert_ne!(said, bare, "{failure:?} with {mistake} broken");
        }
    }
}

#[test]
fn relaxed_frees_keep_their_promise() {
    let case = Case {
        environment: &[HELD, ("CONCERTINA_CONF", "free:relaxed")],
        ..Case::of("free_relaxed")
    };
    let trial = Trial::new("relaxed", &case);
    let (said, pooled) = trial.run(Some(library()), &[]);
    assert_eq!(said.matches("returned at once: 1\n").count(), 20, "{said}");
    assert_eq!(said.matches("read what it held: 1\n").count(), 20, "{said}");
    assert!(!trial.violations().exists(), "{said}");
    assert_eq!(pooled, 40);
    let broken = [("CONCERTINA_BREAK", "relaxed")];
    let (said, _) = trial.run(Some(breakable_library()), &broken);
    assert!(said.contains("read what it held: 0\n"), "{said}");
}

#[test]
fn relaxed_frees_change_nothing_but_when_they_return() {
    for program in [
        "runtime_symbols",
        "wrong_frees",
        "malloc_async",
        "device_reset",
        "mem_info",
        "out_of_memory",
        "threads",
        "capture",
    ] {
        let case = Case {
            environment: &[
                ("STANDIN_MEMORY_MB", "2048"),
                ("CONCERTINA_CONF", "free:relaxed"),
            ],
            ..Case::of(program)
        };
        let trial = Trial::new(&format!("relaxed-{program}"), &case);
        let (bare, _) = trial.run(None, &[HELD]);
        let (preloaded, pooled) = trial.run(Some(library()), &[HELD]);
        assert_eq!(preloaded, bare, "{program}");
        assert!(pooled > 0, "{program}");
    }
}

/// A process without the library cannot open what one with it shares, and nobody knows; a setting makes
/// it CUDA's own.
#[test]
fn what_nobody_could_open_is_explained() {
    let case = Case::of("ipc_unopened_handle");
    let trial = Trial::new("handle", &case);
    let (bare, _) = trial.run(None, &[]);
    let (said, pooled) = trial.run(Some(library()), &[]);
    let explained: Vec<&str> = said.lines().filter(|it| !bare.contains(it)).collect();
    assert!(
        explained.len() == 1 && explained[0].contains("CONCERTINA_CONF=ipc:True"),
        "{said}"
    );
    assert_eq!(pooled, 1);
    let with = [("CONCERTINA_CONF", "ipc:True")];
    assert_eq!(trial.run(Some(library()), &with), (bare, 0));
}

/// What was freed opens no more. Of CUDA's own it may, so that there is nothing to compare on a GPU.
#[test]
fn a_handle_goes_with_its_memory() {
    let case = Case {
        arguments: &["freed"],
        ..Case::of("ipc")
    };
    let trial = Trial::new("shared_freed", &case);
    let opens = |library: &Path, environment: &[(&str, &str)]| {
        let (said, _) = trial.run(Some(library), environment);
        let line = said.lines().find(|it| it.starts_with("what was freed"));
        line.map(str::to_string)
    };
    let whole = opens(library(), &[]);
    assert_eq!(whole.as_deref(), Some("what was freed opens: 0"));
    let broken = opens(breakable_library(), &[("CONCERTINA_BREAK", "ipc freed")]);
    assert_eq!(broken.as_deref(), Some("what was freed opens: 1"));
}

#[test]
fn a_limit_is_all_the_memory_there_is() {
    let case = Case {
        environment: &[("CONCERTINA_CONF", "limit:64MiB")],
        ..Case::of("limit")
    };
    let trial = Trial::new("limited", &case);
    let (said, pooled) = trial.run(Some(library()), &[]);
    assert_eq!(
        said,
        "cudaMemGetInfo(&free, &total): 0\n\
         64 of 64 MiB\n\
         cudaMallocPitch(&one, &pitch, MIB, 65): 2\n\
         cudaMallocPitch(&one, &pitch, 2 * MIB, 30): 0\n\
         cudaMemGetInfo(&free, &total): 0\n\
         4 of 64 MiB\n\
         cudaFree(one): 0\n\
         0 failed\n\
         cudaMalloc(&one, 40 * MIB): 0\n\
         cudaMemGetInfo(&free, &total): 0\n\
         24 of 64 MiB\n\
         cudaMalloc(&two, 40 * MIB): 2\n\
         cudaGetLastError(): 2\n\
         cudaMalloc(&two, 24 * MIB): 0\n\
         cudaMallocAsync(&one, 8 * MIB, NULL): 2\n\
         cudaFree(two): 0\n\
         cudaMallocAsync(&one, 8 * MIB, NULL): 0\n\
         cudaGetLastError(): 2\n\
         cuMemAlloc_v2(&address, 17 * MIB): 2\n\
         cuMemAlloc_v2(&address, 16 * MIB): 0\n\
         exit status: 0"
    );
    assert_eq!(pooled, 65);
    let relaxed = [("CONCERTINA_CONF", "limit:64MiB,free:relaxed")];
    assert_eq!(trial.run(Some(library()), &relaxed), (said.clone(), 65));
    // Also what the driver hands out in the pool's place.
    let outside = [("CONCERTINA_CONF", "limit:64MiB,ipc:True")];
    assert_eq!(trial.run(Some(library()), &outside), (said, 1));
}

#[test]
fn a_limit_holds_what_the_driver_hands_out() {
    let case = Case {
        environment: &[("CONCERTINA_CONF", "limit:64MiB")],
        ..Case::of("limit_counts_driver_memory")
    };
    let trial = Trial::new("outside", &case);
    let kept = trial.scratch.path().join("report");
    let report_to = [("STANDIN_REPORT", kept.to_str().expect("text"))];
    let (said, pooled) = trial.run(Some(library()), &report_to);
    let most = report(&kept).into_iter().find(|it| it.0 == "most");
    assert_eq!(most, Some(("most".to_string(), 64 << 20)));
    assert_eq!(
        said,
        "cudaStreamCreateWithFlags(&stream, NON_BLOCKING): 0\n\
         cudaMalloc(&one, 8 * MIB): 0\n\
         cudaStreamBeginCapture(stream, RELAXED): 0\n\
         cudaMalloc(&two, 40 * MIB): 0\n\
         cudaMemGetInfo(&free, &total): 0\n\
         16 of 64 MiB\n\
         cudaMalloc(&three, 40 * MIB): 2\n\
         cudaStreamEndCapture(stream, &graph): 0\n\
         cudaFree(one): 0\n\
         cudaFree(two): 0\n\
         cudaMemGetInfo(&free, &total): 0\n\
         64 of 64 MiB\n\
         cudaMalloc(&one, 64 * MIB): 0\n\
         cudaFree(one): 0\n\
         cudaStreamBeginCapture(stream, RELAXED): 0\n\
         cudaMalloc(&two, MIB): 0\n\
         cudaStreamEndCapture(stream, &graph): 0\n\
         cudaMalloc(&two, 40 * MIB): 0\n\
         cudaDeviceReset(): 0\n\
         cudaMalloc(&two, MIB): 0\n\
         cudaMemGetInfo(&free, &total): 0\n\
         62 of 64 MiB\n\
         exit status: 0"
    );
    // One of them in a capture, of what the pool kept.
    assert_eq!(pooled, 5);
}

#[test]
fn calls_are_counted_by_function() {
    let case = Case::of("call_counts");
    let trial = Trial::new("counted", &case);
    let (bare, _) = trial.run(None, &[]);
    let (said, _) = trial.run(Some(library()), &[]);
    assert_eq!(said, bare);
    let (_, pitch) = said.split_once("\npitch ").expect("a pitch");
    let pitch: u64 = pitch
        .lines()
        .next()
        .and_then(|it| it.parse().ok())
        .expect("a number");
    let text = fs::read_to_string(trial.stats()).expect("statistics");
    let mut stats: Value = serde_json::from_str(&text).expect("JSON");
    let calls = stats["calls"].as_object_mut().expect("calls");
    for (name, call) in calls.iter_mut() {
        let call = call.as_object_mut().expect("an object");
        let time = call.remove("nanoseconds").and_then(|it| it.as_u64());
        assert!(time.is_some_and(|time| time > 0), "{name}: {text}");
    }
    // Each of 16 threads: 100 pairs and one more.
    let expected = json!({
        "cuMemAlloc": {"count": 4 + 1616, "failed": 1, "bytes": (6 << 20) + 1616 * 512},
        "cuMemAllocPitch": {"count": 2, "failed": 0, "bytes": 30 * pitch},
        "cuMemFree": {"count": 3 + 1616, "failed": 1},
        "cuMemAllocAsync": {"count": 5, "failed": 0, "bytes": 20 << 20},
        "cuMemFreeAsync": {"count": 5, "failed": 0},
    });
    assert_eq!(stats["calls"], expected);

    let mut report = Command::new(env!("CARGO_BIN_EXE_concertina"));
    let shown = output(report.arg("report").arg(trial.stats()));
    let line = shown.lines().find(|line| line.starts_with("cuMemAlloc "));
    let cells: Vec<_> = line.expect("a line").split_whitespace().collect();
    assert_eq!(
        cells[..5],
        ["cuMemAlloc", "1620", "1", "6.8", "MiB"],
        "{shown}"
    );
}

#[test]
fn calls_are_counted_by_caller_where_that_is_asked() {
    let scratch = Scratch::new("preload-callers");
    let link = format!("-L{}", standin().display());
    let shared = ["-shared", "-fPIC", &link, "-lcudart"];
    let taker = compile(&scratch, "call_counts_library.c", "libtaker.so", &shared);
    let taker = taker.to_str().expect("a path of text");
    let options = [taker, &link, "-Wl,--no-as-needed", "-lcudart", "-lcuda"];
    let program = compile(&scratch, "call_counts_by_library.c", "callers", &options);
    let file = scratch.path().join("stats.json");
    let callers = |settings: &str| {
        let mut command = Command::new(&program);
        command
            .env("LD_LIBRARY_PATH", standin())
            .env("LD_PRELOAD", library())
            .env("CONCERTINA_STATS", &file)
            .env("CONCERTINA_CONF", settings);
        output(&mut command);
        let text = fs::read_to_string(&file).expect("statistics");
        let stats: Value = serde_json::from_str(&text).expect("JSON");
        stats["callers"].clone()
    };
    assert_eq!(callers(""), Value::Null);
    let mut callers = callers("stats_callers:True");
    for calls in callers.as_object_mut().expect("callers").values_mut() {
        for call in calls.as_object_mut().expect("calls").values_mut() {
            let time = call.as_object_mut().expect("a call").remove("nanoseconds");
            assert!(time.is_some_and(|time| time.is_u64()), "{call}");
        }
    }
    let expected = json!({
        "callers": {
            "cuMemAlloc": {"count": 1, "failed": 0, "bytes": 5 << 20},
            "cuMemFree": {"count": 4, "failed": 0},
        },
        "libtaker.so": {"cuMemAlloc": {"count": 4, "failed": 1, "bytes": 3 << 20}},
    });
    assert_eq!(callers, expected);

    let mut report = Command::new(env!("CARGO_BIN_EXE_concertina"));
    let shown = output(report.arg("report").arg(&file));
    let mut lines = shown.lines();
    assert!(
        lines.any(|line| line.starts_with("calls by library ")),
        "{shown}"
    );
    let line = lines.find(|line| line.starts_with("libtaker.so: cuMemAlloc "));
    let cells: Vec<_> = line.expect("a line").split_whitespace().collect();
    assert_eq!(cells[2..6], ["4", "1", "3.0", "MiB"], "{shown}");
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
