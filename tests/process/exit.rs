//! Exit: the statistics file is written at the end, whatever happens there.

use crate::harness::{MIB, allocated, c, exits, only, run, scratch};
use crate::library::library;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;

#[test]
fn exit_writes_statistics() {
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
fn exit_writes_statistics_when_preloaded() {
    scratch!(scratch, file);
    let mut command = c("exit", &file);
    command.env("LD_PRELOAD", library());
    assert_eq!(exits(command, 3), "");
    assert_eq!(allocated(&only(&scratch, "stats.json")), MIB);
}

#[test]
fn exit_handlers_that_free_are_counted() {
    scratch!(scratch, file);
    assert_eq!(exits(c("late", &file), 0), "");
    assert_eq!(allocated(&only(&scratch, "stats.json")), 0);
}

#[test]
fn exit_that_crashes_leaves_a_statistics_file() {
    scratch!(scratch, file);
    let status = run(c("crash late", &file)).status;
    assert!(status.signal().is_some(), "{status}");
    assert_eq!(allocated(&only(&scratch, "stats.json")), MIB);
}

#[test]
fn exit_replaces_a_statistics_dump() {
    scratch!(scratch, file);
    assert_eq!(exits(c("by hand and exit", &file), 0), "");
    assert_eq!(allocated(&only(&scratch, "stats.json")), 2 * MIB);
}
