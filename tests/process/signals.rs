//! Signals: SIGTERM, and handlers of the program.

use crate::harness::{MIB, SIGTERM, allocated, c, exits, only, read, scratch, terminate};
use std::os::unix::process::ExitStatusExt;

#[test]
fn sigterm_writes_statistics_and_kills() {
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
fn sigterm_handler_of_the_program_is_left_alone() {
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
fn sigterm_that_is_ignored_stays_ignored() {
    scratch!(scratch, file);
    assert_eq!(exits(c("ignored", &file), 0), "");
    read(&only(&scratch, "stats.json"));
}
