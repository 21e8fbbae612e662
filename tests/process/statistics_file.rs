//! The statistics file: its path, what it names, and processes that used no GPU.

use crate::harness::{
    MIB, allocated, c, environment, exits, files, is_unused, only, python, read, run, scratch,
};
use crate::library::{library, output};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::SystemTime;

#[test]
fn statistics_file_is_not_written_without_a_path() {
    scratch!(scratch, file);
    let mut command = c("exit", &file);
    command.env_remove("CONCERTINA_STATS");
    assert_eq!(exits(command, 3), "");
    assert_eq!(files(scratch.path()).len(), 0);
}

#[test]
fn statistics_file_of_a_process_that_used_no_gpu() {
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
fn statistics_file_of_a_process_that_used_no_gpu_replaces_no_other() {
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

/// A preloaded shell script leaves one file, not one for each program that it runs.
#[test]
fn statistics_file_of_a_preloaded_shell_covers_its_child_processes() {
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
fn statistics_file_with_a_relative_path_is_relative_to_the_start() {
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
fn statistics_file_names_host_rank_and_command_line() {
    scratch!(scratch, file);
    let mut command = c("exit", &file);
    command.env("RANK", "7").env("LOCAL_RANK", "3");
    command.env("WORLD_SIZE", "").env("SLURM_NTASKS", "8");
    assert_eq!(exits(command, 3), "");
    let stats = read(&file);
    let host = fs::read_to_string("/proc/sys/kernel/hostname").expect("Linux has it");
    assert_eq!(stats["host"], host.trim(), "{stats}");
    assert_eq!(
        (&stats["rank"], &stats["used_gpu"]),
        (&7.into(), &true.into())
    );
    assert_eq!(
        (&stats["local_rank"], &stats["world_size"]),
        (&3.into(), &8.into())
    );
    assert_eq!(stats["command_line"][2], "exit", "{stats}");
    assert_eq!(exits(c("exit", &file), 3), "");
    assert_eq!(read(&file)["rank"], Value::Null);
    drop(scratch);
}

#[test]
fn statistics_json_keeps_to_the_callers_buffer() {
    scratch!(scratch, file);
    let said = output(&mut c("text", &file));
    let (version, text) = said.split_once('\n').expect("two lines");
    assert_eq!(version, env!("CARGO_PKG_VERSION"));
    let stats: Value = serde_json::from_str(text).expect("JSON");
    assert_eq!(stats["version"], version);
    drop(scratch);
}

#[test]
fn statistics_dump_at_any_time() {
    scratch!(scratch, file);
    let mut command = c("by hand", &file);
    command.env_remove("CONCERTINA_STATS");
    assert_eq!(exits(command, 0), "");
    read(&only(&scratch, "stats.json"));
}

#[test]
fn statistics_file_pattern_gives_each_process_its_own() {
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

#[test]
fn statistics_file_replaces_an_old_one() {
    scratch!(scratch, file);
    fs::write(&file, "x".repeat(1 << 20)).expect("ours");
    assert_eq!(exits(c("exit", &file), 3), "");
    assert_eq!(allocated(&only(&scratch, "stats.json")), MIB);
}
