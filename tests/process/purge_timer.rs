//! The purge timer: a thread returns idle memory, and disturbs neither fork nor exit.

use crate::harness::{SIGTERM, allocated, c, exits, only, python, read, scratch, terminate};
use std::os::unix::process::ExitStatusExt;

/// The setting with which the timer purges as often as it can.
const SHORT_TIMEOUT: (&str, &str) = ("CONCERTINA_CONF", "idle_release_ms:1");

#[test]
fn purge_timer_returns_idle_memory() {
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
    command.env(SHORT_TIMEOUT.0, SHORT_TIMEOUT.1);
    assert_eq!(exits(command, 0), "");
    assert_eq!(allocated(&only(&scratch, "stats.json")), 0);
}

#[test]
fn purge_timer_has_no_effect_with_expandable_segments_off() {
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
fn purge_timer_while_a_process_forks_and_exits() {
    let ends = [
        ("exit", 3),
        ("late", 0),
        ("fork", 0),
        ("fork while locked", 0),
    ];
    for (case, code) in ends.repeat(3) {
        scratch!(scratch, file);
        let mut command = c(case, &file);
        command.env(SHORT_TIMEOUT.0, SHORT_TIMEOUT.1);
        let errors = exits(command, code);
        assert!(!errors.contains("failed"), "{case}: {errors}");
        read(&only(&scratch, "stats.json"));
    }
    scratch!(scratch, file);
    let mut command = c("hammer", &file);
    command.env(SHORT_TIMEOUT.0, SHORT_TIMEOUT.1);
    let (status, _) = terminate(command);
    assert_eq!(status.signal(), Some(SIGTERM), "{status}");
    read(&only(&scratch, "stats.json"));
}
