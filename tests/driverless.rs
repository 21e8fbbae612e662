//! The library on a machine without a CUDA driver: it loads, says so in one line, and does no harm.
//!
//! A machine that has a driver hides it from the process under test: the first `libcuda.so.1` that
//! the dynamic linker finds there is a file that it cannot load.

mod library;

use library::{Scratch, library};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// What every process here begins with: the library as `concertina`, and proof that there is no
/// driver.
const PRELUDE: &str = "
import ctypes, json, sys, threading
try:
    ctypes.CDLL('libcuda.so.1')
except OSError:
    pass
else:
    sys.exit('there is a driver here')
concertina = ctypes.CDLL(sys.argv[1])
concertina.concertina_malloc.restype = ctypes.c_void_p
concertina.concertina_base_alloc.restype = ctypes.c_void_p
concertina.concertina_stats_json.restype = ctypes.c_size_t
concertina.concertina_version.restype = ctypes.c_char_p
def malloc(device=0):
    return concertina.concertina_malloc(ctypes.c_size_t(1 << 20), device, None)
";

/// Runs Python without a driver, the statistics going to `stats`; it has to succeed.
#[track_caller]
fn python(scratch: &Scratch, stats: &Path, text: &str) -> Output {
    let hidden = scratch.path().join("libraries");
    fs::create_dir_all(&hidden).expect("a directory");
    fs::write(hidden.join("libcuda.so.1"), "this is no driver\n").expect("a file");
    let mut command = Command::new("python3");
    for name in [
        "CONCERTINA_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
        "LD_PRELOAD",
        "RANK",
    ] {
        command.env_remove(name);
    }
    let output = command
        .arg("-c")
        .arg(format!("{PRELUDE}{text}"))
        .arg(library())
        .env("LD_LIBRARY_PATH", &hidden)
        .env("CONCERTINA_STATS", stats)
        .output()
        .expect("python3 runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    output
}

/// The line that says what is missing is all that stands on standard error.
#[track_caller]
fn says_it_once(output: &Output) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(errors.matches('\n').count(), 1, "{errors}");
    assert!(
        errors.starts_with("concertina: no memory can be had: no CUDA driver: "),
        "{errors}"
    );
    assert!(errors.contains("libcuda.so.1"), "{errors}");
}

/// Statistics of a process that never had a device.
#[track_caller]
fn is_empty(text: &str) {
    let stats: Value = serde_json::from_str(text).expect("JSON");
    assert_eq!(stats["schema_version"], 1, "{text}");
    assert_eq!(stats["driver"], Value::Null, "{text}");
    assert_eq!(stats["devices"], Value::Array(vec![]), "{text}");
}

#[test]
fn it_loads_in_silence() {
    let scratch = Scratch::new("driverless-load");
    let stats = scratch.path().join("stats.json");
    let output = python(
        &scratch,
        &stats,
        "print(concertina.concertina_version().decode())",
    );
    assert_eq!(
        String::from_utf8_lossy(&output.stdout).trim(),
        env!("CARGO_PKG_VERSION")
    );
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn it_says_once_that_there_is_no_memory() {
    let scratch = Scratch::new("driverless-malloc");
    let stats = scratch.path().join("stats.json");
    let output = python(
        &scratch,
        &stats,
        "
for device in 0, 0, 1, -1, 0:
    assert malloc(device) is None
threads = [threading.Thread(target=malloc) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
length = concertina.concertina_stats_json(None, 0)
text = ctypes.create_string_buffer(length + 1)
assert concertina.concertina_stats_json(text, length + 1) == length
print(text.value.decode())
",
    );
    says_it_once(&output);
    is_empty(&String::from_utf8_lossy(&output.stdout));
    is_empty(&fs::read_to_string(&stats).expect("statistics"));
}

/// PyTorch calls these before it allocates, and when it ends.
#[test]
fn the_other_functions_do_nothing() {
    let scratch = Scratch::new("driverless-others");
    let stats = scratch.path().join("stats.json");
    let output = python(
        &scratch,
        &stats,
        "
concertina.concertina_init(1)
concertina.concertina_memory_fraction(ctypes.c_double(0.5), 0)
assert malloc() is None
concertina.concertina_free(None, ctypes.c_size_t(1 << 20), 0, None)
concertina.concertina_record_stream(None, None)
size = ctypes.c_size_t(1)
assert concertina.concertina_base_alloc(None, ctypes.byref(size)) is None and size.value == 0
concertina.concertina_empty_cache()
assert concertina.concertina_dump_stats(None) == 0
",
    );
    says_it_once(&output);
    is_empty(&fs::read_to_string(&stats).expect("statistics"));
}
