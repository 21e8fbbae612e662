//! Python: every way its processes end.

use crate::harness::{MIB, SIGTERM, allocated, exits, only, python, scratch, terminate};
use crate::library::library;
use std::os::unix::process::ExitStatusExt;

#[test]
fn python_exits_of_every_kind() {
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
fn python_os_exit_when_preloaded() {
    scratch!(scratch, file);
    let mut command = python("get(); os._exit(6)", &file);
    command.env("LD_PRELOAD", library());
    assert_eq!(exits(command, 6), "");
    assert_eq!(allocated(&only(&scratch, "stats.json")), MIB);
}

#[test]
fn python_sigterm_writes_statistics_and_kills() {
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
fn python_sigterm_handler_of_the_program_is_left_alone() {
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
fn python_multiprocessing_workers_write_no_statistics() {
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
