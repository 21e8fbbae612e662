//! Every way a process can begin, fork and end with the library in it, and what is left in the file.
//!
//! The processes are real ones, the library is the built one, the GPU is simulated.

#[path = "../library/mod.rs"]
mod library;

use library::{Scratch, library, output, standin};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

const MIB: u64 = 1 << 20;
const SIGTERM: i32 = 15;

/// The C program of `tests/programs`, compiled once.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<(Scratch, PathBuf)> = OnceLock::new();
    let (_, program) = PROGRAM.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let scratch = Scratch::new("process-program");
        let program = scratch.path().join("process");
        output(
            Command::new("cc")
                .args([
                    "-std=gnu11",
                    "-O1",
                    "-Wall",
                    "-Wextra",
                    "-Werror",
                    "-pthread",
                    "-I",
                ])
                .arg(root.join("include"))
                .arg(root.join("tests/programs/process.c"))
                .arg("-o")
                .arg(&program)
                .arg("-ldl"),
        );
        (scratch, program)
    });
    program
}

/// The environment that every process here runs in, with the statistics going to `stats`.
fn environment<'a>(command: &'a mut Command, stats: &Path) -> &'a mut Command {
    for name in [
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "LD_PRELOAD",
        "RANK",
    ] {
        command.env_remove(name);
    }
    command
        .env_remove("CONCERTINA_CONF")
        .env("LD_LIBRARY_PATH", standin())
        .env("CONCERTINA_STATS", stats)
}

/// The C program, ready to run `case`.
fn c(case: &str, stats: &Path) -> Command {
    let mut command = Command::new(program());
    environment(command.arg(library()).arg(case).arg(stats), stats);
    command
}

/// Python, ready to run `text` with the library as `concertina`, and `get` and `free` for a MiB.
fn python(text: &str, stats: &Path) -> Command {
    const PRELUDE: &str = "
import ctypes, os, signal, sys
concertina = ctypes.CDLL(sys.argv[1])
concertina.concertina_malloc.restype = ctypes.c_void_p
def get():
    block = concertina.concertina_malloc(ctypes.c_size_t(1 << 20), 0, None)
    assert block
    return ctypes.c_void_p(block)
def free(block):
    concertina.concertina_free(block, ctypes.c_size_t(1 << 20), 0, None)
";
    let mut command = Command::new("python3");
    let text = format!("{PRELUDE}{text}");
    environment(command.arg("-c").arg(text).arg(library()), stats);
    command
}

fn run(mut command: Command) -> Output {
    command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Runs `command` to an exit with `code`, and returns what it says on standard error.
#[track_caller]
fn exits(command: Command, code: i32) -> String {
    let output = run(command);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(
        output.status.code(),
        Some(code),
        "{}\n{errors}",
        output.status
    );
    errors
}

/// Runs `command` until it says `ready`, sends it SIGTERM, and returns what becomes of it.
#[track_caller]
fn terminate(mut command: Command) -> (ExitStatus, String) {
    let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    assert_eq!(lines.next().expect("a line").expect("text"), "ready");
    let kill = Command::new("kill")
        .arg("-TERM")
        .arg(child.id().to_string())
        .status();
    assert!(kill.expect("kill runs").success());
    let sent = Instant::now();
    let status = child.wait().expect("it ends");
    assert!(
        sent.elapsed() < Duration::from_secs(3),
        "it took {:?}",
        sent.elapsed()
    );
    (status, lines.map_while(Result::ok).collect())
}

/// The statistics in `file`, whole.
#[track_caller]
fn read(file: &Path) -> Value {
    let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
    assert!(text.ends_with("}\n"), "{text}");
    let stats: Value = serde_json::from_str(&text).expect("JSON");
    assert!(stats["schema_version"].is_u64(), "{text}");
    stats
}

/// The bytes that are allocated on all devices according to `file`.
#[track_caller]
fn allocated(file: &Path) -> u64 {
    let stats = read(file);
    let devices = stats["devices"].as_array().expect("a list of devices");
    let bytes = |device: &Value| {
        device["memory_stats"]["allocated_bytes.all.current"]
            .as_u64()
            .unwrap_or_else(|| panic!("{stats}"))
    };
    devices.iter().map(bytes).sum()
}

/// The files in `directory`: nothing temporary may be left.
fn files(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(directory)
        .expect("a directory")
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    names.sort();
    names
}

/// The one file that is in `scratch`, under `name`.
#[track_caller]
fn only(scratch: &Scratch, name: &str) -> PathBuf {
    assert_eq!(files(scratch.path()), [name]);
    scratch.path().join(name)
}

macro_rules! scratch {
    ($name:ident, $file:ident) => {
        let $name = Scratch::new(concat!("process-", line!()));
        let $file = $name.path().join("stats.json");
    };
}

#[test]
fn a_normal_exit_writes() {
    scratch!(scratch, file);
    assert_eq!(exits(c("exit", &file), 3), "");
    assert_eq!(allocated(&only(&scratch, "stats.json")), MIB);
    let mode = fs::metadata(&file)
        .expect("it is there")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777 & !0o644, 0, "{mode:o}");
}

#[test]
fn a_preloaded_library_writes_too() {
    scratch!(scratch, file);
    let mut command = c("exit", &file);
    command.env("LD_PRELOAD", library());
    assert_eq!(exits(command, 3), "");
    assert_eq!(allocated(&only(&scratch, "stats.json")), MIB);
}

#[test]
fn without_a_path_nothing_is_written() {
    scratch!(scratch, file);
    let mut command = c("exit", &file);
    command.env_remove("CONCERTINA_STATS");
    assert_eq!(exits(command, 3), "");
    assert_eq!(files(scratch.path()).len(), 0);
}

#[test]
fn with_elevated_privileges_the_environment_is_not_read() {
    scratch!(scratch, file);
    // Set-group-ID is enough, and root may choose the group.
    let elevated = scratch.path().join("elevated");
    fs::copy(program(), &elevated).expect("ours");
    let other = output(Command::new("id").arg("--groups"));
    let own = output(Command::new("id").arg("--group"));
    let other = other
        .split_whitespace()
        .find(|group| *group != own.trim())
        .unwrap_or("65534");
    if chown(&elevated, None, other.parse().ok()).is_err() {
        println!("SKIP: the user is in one group alone, so no program can be given another");
        return;
    }
    fs::set_permissions(&elevated, fs::Permissions::from_mode(0o2755)).expect("ours");
    let mut command = Command::new(&elevated);
    environment(command.arg(library()).arg("exit"), &file);
    // Without the stand-in there may be no memory to be had; the case says so by 99.
    let status = run(command).status.code();
    assert!(matches!(status, Some(3 | 99)), "{status:?}");
    assert_eq!(files(scratch.path()), ["elevated"]);
}

/// Statistics that say that no GPU was used.
#[track_caller]
fn is_unused(file: &Path) -> Value {
    let stats = read(file);
    assert_eq!(stats["used_gpu"], false, "{stats}");
    assert_eq!(stats["devices"].as_array().map(Vec::len), Some(0));
    stats
}

#[test]
fn a_process_that_used_no_gpu_says_so() {
    scratch!(scratch, file);
    assert_eq!(exits(c("unused", &file), 0), "");
    let stats = is_unused(&only(&scratch, "stats.json"));
    assert_eq!(stats["command_line"][2], "unused", "{stats}");
    // What is left of a process that is long over gives way.
    fs::write(&file, "{\"schema_version\": 1, \"pid\": 4194304}\n").expect("ours");
    let old = fs::File::options().write(true).open(&file).expect("ours");
    old.set_modified(SystemTime::UNIX_EPOCH).expect("ours");
    assert_eq!(exits(c("unused", &file), 0), "");
    is_unused(&file);
    for text in ["os._exit(3)", "sys.exit(3)"] {
        assert_eq!(exits(python(text, &file), 3), "");
        let stats = is_unused(&only(&scratch, "stats.json"));
        assert_eq!(stats["command_line"][1], "-c", "{stats}");
    }
    let mut disabled = c("unused", &file);
    disabled.env("CONCERTINA_DISABLE", "1");
    fs::remove_file(&file).expect("it is there");
    assert_eq!(exits(disabled, 0), "");
    assert_eq!(files(scratch.path()), [""; 0]);
}

#[test]
fn a_process_that_used_no_gpu_takes_nobodys_place() {
    scratch!(scratch, file);
    // Of a parent that runs on, and of a child.
    let text = "
import subprocess
block = get()
assert concertina.concertina_dump_stats(None) == 0
subprocess.run([sys.executable, '-c', 'import ctypes, sys; ctypes.CDLL(sys.argv[1])', sys.argv[1]])
import json
assert json.load(open(os.environ['CONCERTINA_STATS']))['used_gpu']
os.kill(os.getpid(), signal.SIGKILL)
";
    assert_eq!(run(python(text, &file)).status.signal(), Some(9));
    assert_eq!(allocated(&only(&scratch, "stats.json")), MIB);
    let text = "
import subprocess
child = '''import ctypes, sys
concertina = ctypes.CDLL(sys.argv[1])
concertina.concertina_malloc(ctypes.c_size_t(1 << 20), 0, None)
'''
subprocess.run([sys.executable, '-c', child, sys.argv[1]], check=True)
";
    fs::remove_file(&file).expect("it is there");
    assert_eq!(exits(python(text, &file), 0), "");
    assert_eq!(allocated(&only(&scratch, "stats.json")), MIB);
}

/// A shell script that is preloaded leaves one file, not one for each program that it calls.
#[test]
fn a_preloaded_program_that_used_no_gpu_says_so_for_its_helpers() {
    scratch!(scratch, _file);
    let pattern = scratch.path().join("%p.json");
    let mut shell = Command::new("bash");
    environment(
        shell.args(["-c", "ls / >/dev/null; cat </dev/null; true"]),
        &pattern,
    );
    shell.env("LD_PRELOAD", library());
    assert_eq!(exits(shell, 0), "");
    let names = files(scratch.path());
    assert_eq!(names.len(), 1, "{names:?}");
    let stats = is_unused(&scratch.path().join(&names[0]));
    assert_eq!(stats["command_line"][0], "bash", "{stats}");
}

#[test]
fn a_relative_path_is_that_of_the_start() {
    scratch!(scratch, _file);
    let place = scratch.path().join("100%p");
    fs::create_dir(&place).expect("ours");
    let mut command = python("block = get(); os.chdir('/')", Path::new("stats.json"));
    command.current_dir(&place);
    assert_eq!(exits(command, 0), "");
    assert_eq!(files(&place), ["stats.json"]);
    assert_eq!(allocated(&place.join("stats.json")), MIB);
}

#[test]
fn the_process_is_told_by_host_rank_and_command_line() {
    scratch!(scratch, file);
    let mut command = c("exit", &file);
    command.env("RANK", "7");
    assert_eq!(exits(command, 3), "");
    let stats = read(&file);
    let host = fs::read_to_string("/proc/sys/kernel/hostname").expect("Linux has it");
    assert_eq!(stats["host"], host.trim(), "{stats}");
    assert_eq!(
        (&stats["rank"], &stats["used_gpu"]),
        (&7.into(), &true.into())
    );
    assert_eq!(stats["command_line"][2], "exit", "{stats}");
    assert_eq!(exits(c("exit", &file), 3), "");
    assert_eq!(read(&file)["rank"], Value::Null);
    drop(scratch);
}

/// What is wrong is said when the library is loaded, once, by a process that does not use it, too.
#[test]
fn mistakes_in_the_environment_are_said_at_the_start() {
    scratch!(scratch, file);
    let missing = scratch.path().join("no/such/file.json");
    for (settings, stats, said) in [
        ("limt:8", &file, "CONCERTINA_CONF: limt:8 makes no sense: "),
        (
            "free:lazy",
            &file,
            "CONCERTINA_CONF: free:lazy makes no sense: ",
        ),
        (
            "backend:cudaMallocAsync",
            &file,
            "CONCERTINA_CONF: backend:cuda",
        ),
        (
            "",
            &missing,
            "CONCERTINA_STATS: statistics cannot be written to ",
        ),
    ] {
        for preload in [false, true] {
            let mut command = c("unused", stats);
            command.env("CONCERTINA_CONF", settings);
            let mut code = 0;
            if preload {
                command.env("LD_PRELOAD", library());
                // Rather than without a limit it does not start.
                code = if settings.contains("lim") { 2 } else { 0 };
            }
            let errors = exits(command, code);
            assert_eq!(errors.lines().count(), 1, "{errors}");
            assert!(
                errors.starts_with(&format!("concertina: {said}")),
                "{errors}"
            );
        }
    }
    // Once: not again when the GPU is used.
    let mut command = c("exit", &file);
    command.env("CONCERTINA_CONF", "free:lazy");
    assert_eq!(exits(command, 3).lines().count(), 1);
    // What is set for PyTorch is nothing to a preloaded program.
    let mut command = c("unused", &file);
    command.env("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:2");
    command.env("LD_PRELOAD", library());
    assert_eq!(exits(command, 0), "");
}

/// Whoever only calls the library's functions gets no memory rather than any.
#[test]
fn without_the_limit_that_was_meant_there_is_no_memory() {
    scratch!(scratch, file);
    let text = "assert concertina.concertina_malloc(ctypes.c_size_t(1 << 20), 0, None) is None";
    let mut command = python(text, &file);
    command.env("CONCERTINA_CONF", "limit:8Q");
    let errors = exits(command, 0);
    let lines: Vec<_> = errors.lines().collect();
    assert!(lines[0].starts_with("concertina: CONCERTINA_CONF: limit:8Q makes no sense"));
    assert_eq!(
        lines[1..],
        ["concertina: no memory can be had: the limit that is set makes no sense"]
    );
    drop(scratch);
}

#[test]
fn what_is_freed_late_is_counted_free() {
    scratch!(scratch, file);
    assert_eq!(exits(c("late", &file), 0), "");
    assert_eq!(allocated(&only(&scratch, "stats.json")), 0);
}

#[test]
fn a_crash_after_the_first_exit_handlers_leaves_a_file() {
    scratch!(scratch, file);
    let status = run(c("crash late", &file)).status;
    assert!(status.signal().is_some(), "{status}");
    assert_eq!(allocated(&only(&scratch, "stats.json")), MIB);
}

#[test]
fn the_text_keeps_to_the_callers_buffer() {
    scratch!(scratch, file);
    let said = output(&mut c("text", &file));
    let (version, text) = said.split_once('\n').expect("two lines");
    assert_eq!(version, env!("CARGO_PKG_VERSION"));
    let stats: Value = serde_json::from_str(text).expect("JSON");
    assert_eq!(stats["version"], version);
    drop(scratch);
}

#[test]
fn by_hand_at_any_time() {
    scratch!(scratch, file);
    let mut command = c("by hand", &file);
    command.env_remove("CONCERTINA_STATS");
    assert_eq!(exits(command, 0), "");
    read(&only(&scratch, "stats.json"));
}

#[test]
fn the_exit_replaces_what_was_written_by_hand() {
    scratch!(scratch, file);
    assert_eq!(exits(c("by hand and exit", &file), 0), "");
    assert_eq!(allocated(&only(&scratch, "stats.json")), 2 * MIB);
}

#[test]
fn sigterm_writes_and_still_kills() {
    scratch!(scratch, file);
    let (status, _) = terminate(c("term", &file));
    assert_eq!(status.signal(), Some(SIGTERM), "{status}");
    assert_eq!(allocated(&only(&scratch, "stats.json")), MIB);
}

#[test]
fn sigterm_while_every_thread_allocates() {
    for round in 0..40 {
        scratch!(scratch, file);
        let case = if round % 2 == 0 {
            "hammer"
        } else {
            "hammer alone"
        };
        let (status, _) = terminate(c(case, &file));
        assert_eq!(status.signal(), Some(SIGTERM), "{status}");
        assert!(allocated(&only(&scratch, "stats.json")) >= MIB);
    }
}

#[test]
fn sigterm_kills_even_if_the_file_cannot_be_finished() {
    scratch!(scratch, file);
    let (status, _) = terminate(c("term while hanging", &file));
    assert_eq!(status.signal(), Some(SIGTERM), "{status}");
    assert!(!file.exists());
    drop(scratch);
}

#[test]
fn a_programs_own_handler_is_left_alone() {
    for case in ["own handler", "own handler later"] {
        scratch!(scratch, file);
        let (status, said) = terminate(c(case, &file));
        assert_eq!(
            (status.code(), said.as_str()),
            (Some(7), "own handler"),
            "{case}"
        );
        // It called exit.
        read(&only(&scratch, "stats.json"));
    }
}

#[test]
fn an_ignored_sigterm_stays_ignored() {
    scratch!(scratch, file);
    assert_eq!(exits(c("ignored", &file), 0), "");
    read(&only(&scratch, "stats.json"));
}

/// The C program, with a setting that has statistics written while it runs.
fn asked(case: &str, setting: &str, stats: &Path) -> Command {
    let mut command = c(case, stats);
    command.env("CONCERTINA_CONF", format!("{setting}"));
    command
}

#[test]
fn a_signal_has_them_written() {
    for case in ["signal", "signal once", "signal alone"] {
        scratch!(scratch, file);
        let program = asked(case, "stats_signal:SIGUSR2", &file);
        assert_eq!(exits(program, 0), "", "{case}");
        assert_eq!(files(scratch.path()), ["stats.json", "stats.json.taken"]);
        assert_eq!(allocated(&file.with_extension("json.taken")), MIB);
        assert_eq!(allocated(&file), 2 * MIB);
    }
}

#[test]
fn signals_until_the_end_leave_one_file() {
    for _ in 0..20 {
        scratch!(scratch, file);
        let program = asked("signals and exit", "stats_signal:SIGUSR2", &file);
        assert_eq!(exits(program, 0), "");
        read(&only(&scratch, "stats.json"));
    }
}

#[test]
fn they_are_written_at_intervals() {
    scratch!(scratch, file);
    assert_eq!(exits(asked("interval", "stats_interval_s:1", &file), 0), "");
    assert_eq!(allocated(&file.with_extension("json.taken")), MIB);
    assert_eq!(allocated(&file), 2 * MIB);
}

#[test]
fn without_a_path_neither_has_an_effect() {
    scratch!(scratch, file);
    let settings = "stats_signal:SIGUSR2,stats_interval_s:1";
    let mut program = asked("exit", settings, &file);
    program.env_remove("CONCERTINA_STATS");
    let said = exits(program, 3);
    let line =
        "concertina: stats_signal, stats_interval_s has no effect without CONCERTINA_STATS\n";
    assert_eq!(said, line);
    assert_eq!(files(scratch.path()), [""; 0]);
}

#[test]
fn a_forked_child_writes_nothing() {
    for case in ["fork", "clone", "fork and term", "fork while locked"] {
        scratch!(scratch, file);
        let errors = exits(c(case, &file), 0);
        assert!(!errors.contains("failed"), "{case}: {errors}");
        assert!(allocated(&only(&scratch, "stats.json")) >= MIB, "{case}");
    }
}

#[test]
fn a_forked_child_is_told_why_it_gets_no_memory() {
    scratch!(scratch, file);
    let errors = exits(c("fork", &file), 0);
    let lines: Vec<_> = errors
        .lines()
        .filter(|line| line.contains("no memory"))
        .collect();
    assert_eq!(lines.len(), 1, "{errors}");
    assert!(lines[0].starts_with("concertina: "), "{errors}");
    drop(scratch);
}

#[test]
fn a_child_forked_before_the_first_use_is_free() {
    scratch!(scratch, shared);
    assert_eq!(exits(c("fork unused", &shared), 0), "");
    // Under one name it could be the parent's file that is written over.
    is_unused(&only(&scratch, "stats.json"));
    fs::remove_file(&shared).expect("it is there");
    assert_eq!(
        exits(c("fork unused", &scratch.path().join("%p.json")), 0),
        ""
    );
    assert_eq!(files(scratch.path()).len(), 2);
}

#[test]
fn two_processes_write_two_files() {
    scratch!(scratch, _file);
    let pattern = scratch.path().join("out-%p-%r-%%.json");
    let start = || {
        let mut command = c("term", &pattern);
        command
            .env("RANK", "3")
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts")
    };
    let mut processes = [start(), start()];
    let mut names: Vec<_> = processes
        .iter()
        .map(|process| format!("out-{}-3-%.json", process.id()))
        .collect();
    names.sort();
    for process in &mut processes {
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("text");
        assert_eq!(line, "ready\n");
        Command::new("kill")
            .arg(process.id().to_string())
            .status()
            .expect("kill runs");
        process.wait().expect("it ends");
    }
    assert_eq!(files(scratch.path()), names);
    for name in names {
        assert_eq!(allocated(&scratch.path().join(name)), MIB);
    }
}

/// The one line that a failed `CONCERTINA_STATS` leaves, the exit status being what it was.
#[track_caller]
fn complains(stats: &Path, about: &str) {
    let errors = exits(c("exit", stats), 3);
    let lines: Vec<_> = errors.lines().collect();
    assert_eq!(lines.len(), 1, "{errors}");
    assert!(
        lines[0].starts_with("concertina: CONCERTINA_STATS: "),
        "{errors}"
    );
    assert!(lines[0].contains(about), "{errors}");
}

#[test]
fn an_unwritable_path_is_one_line() {
    scratch!(scratch, _file);
    complains(
        &scratch.path().join("no/such/directory.json"),
        "No such file or directory",
    );
    complains(scratch.path(), "it is a directory");
    complains(&scratch.path().join("%q.json"), "%q means nothing");
    complains(&scratch.path().join("100%"), "single %");
    let pipe = scratch.path().join("pipe");
    output(Command::new("mkfifo").arg(&pipe));
    complains(&pipe, "not a regular file");
    assert_eq!(files(scratch.path()), ["pipe"]);
}

#[test]
fn a_symbolic_link_is_refused() {
    scratch!(scratch, file);
    let victim = scratch.path().join("victim");
    fs::write(&victim, "precious").expect("ours");
    symlink(&victim, &file).expect("ours");
    complains(&file, "symbolic link");
    assert_eq!(fs::read_to_string(&victim).expect("there"), "precious");
    assert_eq!(files(scratch.path()), ["stats.json", "victim"]);
}

#[test]
fn an_old_file_is_replaced() {
    scratch!(scratch, file);
    fs::write(&file, "x".repeat(1 << 20)).expect("ours");
    assert_eq!(exits(c("exit", &file), 3), "");
    assert_eq!(allocated(&only(&scratch, "stats.json")), MIB);
}

#[test]
fn python_at_every_end() {
    for (text, code, left, complaint) in [
        ("block = get()", 0, 1, ""),
        ("free(get()); get()", 0, 1, ""),
        (
            "block = get(); raise RuntimeError('uncaught')",
            1,
            1,
            "RuntimeError: uncaught",
        ),
        ("get(); sys.exit(5)", 5, 1, ""),
        ("get(); os._exit(6)", 6, 1, ""),
        ("get()\nimport posix\nposix._exit(6)", 6, 1, ""),
        ("block = get(); free(block); os._exit(status=6)", 6, 0, ""),
        // Freed when the interpreter takes its modules down.
        (
            "class Tensor:\n    def __init__(self): self.block = get()\n    \
             def __del__(self, free=free): free(self.block)\ntensor = Tensor()",
            0,
            0,
            "",
        ),
        // The first use on another thread.
        (
            "import threading\nthread = threading.Thread(target=get)\nthread.start()\n\
             thread.join()\nos._exit(6)",
            6,
            1,
            "",
        ),
    ] {
        scratch!(scratch, file);
        let errors = exits(python(text, &file), code);
        assert!(errors.contains(complaint), "{text}\n{errors}");
        assert!(!errors.contains("concertina:"), "{text}\n{errors}");
        assert_eq!(
            allocated(&only(&scratch, "stats.json")),
            left * MIB,
            "{text}"
        );
    }
}

#[test]
fn python_with_the_library_preloaded_writes_at_os_exit() {
    scratch!(scratch, file);
    let mut command = python("get(); os._exit(6)", &file);
    command.env("LD_PRELOAD", library());
    assert_eq!(exits(command, 6), "");
    assert_eq!(allocated(&only(&scratch, "stats.json")), MIB);
}

#[test]
fn python_dies_by_sigterm() {
    for text in [
        "get(); print('ready', flush=True)\nimport time\ntime.sleep(60)",
        "get(); print('ready', flush=True)\nwhile True: free(get())",
    ] {
        scratch!(scratch, file);
        let (status, _) = terminate(python(text, &file));
        assert_eq!(status.signal(), Some(SIGTERM), "{text}: {status}");
        assert!(allocated(&only(&scratch, "stats.json")) >= MIB, "{text}");
    }
}

#[test]
fn pythons_own_handler_is_left_alone() {
    scratch!(scratch, file);
    let text = "
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
get()
print('ready', flush=True)
signal.pause()";
    let (status, _) = terminate(python(text, &file));
    assert_eq!(status.code(), Some(7), "{status}");
    assert_eq!(allocated(&only(&scratch, "stats.json")), MIB);
}

#[test]
fn pythons_workers_write_nothing() {
    scratch!(scratch, file);
    // Workers end by os._exit, whose wrapper they inherit.
    let text = "
import multiprocessing
def work(): os._exit(0)
block = get()
context = multiprocessing.get_context('fork')
for target in (work, print):
    worker = context.Process(target=target)
    worker.start()
    worker.join()
    assert worker.exitcode == 0, worker.exitcode
worker = context.Process(target=signal.pause)
worker.start()
worker.terminate()
worker.join()
assert worker.exitcode == -15, worker.exitcode
assert not os.path.exists(os.environ['CONCERTINA_STATS'])
";
    exits(python(text, &file), 0);
    assert_eq!(allocated(&only(&scratch, "stats.json")), MIB);
}

/// The settings under which a thread gives idle memory back, looking as often as it can.
const RESTLESS: (&str, &str) = ("CONCERTINA_CONF", "idle_release_ms:1");

#[test]
fn idle_memory_goes_back_by_itself() {
    scratch!(scratch, file);
    let text = "
import json, time
def held():
    text = ctypes.create_string_buffer(1 << 20)
    concertina.concertina_stats_json(text, ctypes.c_size_t(len(text)))
    stats = json.loads(text.value)['devices'][0]['memory_stats']
    return stats['reserved_bytes.all.current']
for block in [get() for _ in range(64)]: free(block)
block = get()
assert held() > 0
# As long as it takes.
while held() > 2 << 20: time.sleep(0.001)
free(block)
while held() > 0: time.sleep(0.001)
";
    let mut command = python(text, &file);
    command.env(RESTLESS.0, RESTLESS.1);
    assert_eq!(exits(command, 0), "");
    assert_eq!(allocated(&only(&scratch, "stats.json")), 0);
}

#[test]
fn plain_segments_do_not_go_back_by_themselves_and_that_is_said() {
    scratch!(scratch, file);
    let mut command = c("exit", &file);
    command.env(
        "CONCERTINA_CONF",
        "expandable_segments:False,idle_release_ms:1",
    );
    assert_eq!(
        exits(command, 3),
        "concertina: idle_release_ms has no effect with expandable_segments:False\n"
    );
    drop(scratch);
}

#[test]
fn a_process_ends_and_forks_as_ever_while_idle_memory_is_looked_after() {
    let ends = [
        ("exit", 3),
        ("late", 0),
        ("fork", 0),
        ("fork while locked", 0),
    ];
    for (case, code) in ends.repeat(3) {
        scratch!(scratch, file);
        let mut command = c(case, &file);
        command.env(RESTLESS.0, RESTLESS.1);
        let errors = exits(command, code);
        assert!(!errors.contains("failed"), "{case}: {errors}");
        read(&only(&scratch, "stats.json"));
    }
    scratch!(scratch, file);
    let mut command = c("hammer", &file);
    command.env(RESTLESS.0, RESTLESS.1);
    let (status, _) = terminate(command);
    assert_eq!(status.signal(), Some(SIGTERM), "{status}");
    read(&only(&scratch, "stats.json"));
}
