//! Fork: a child of a process that has used the GPU gets no memory and writes no statistics.

use crate::harness::{MIB, allocated, c, exits, files, is_unused, only, scratch};
use std::fs;

#[test]
fn fork_child_writes_no_statistics() {
    for case in ["fork", "clone", "fork and term", "fork while locked"] {
        scratch!(scratch, file);
        let errors = exits(c(case, &file), 0);
        assert!(!errors.contains("failed"), "{case}: {errors}");
        assert!(allocated(&only(&scratch, "stats.json")) >= MIB, "{case}");
    }
}

#[test]
fn fork_child_is_told_why_it_gets_no_memory() {
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
fn fork_before_the_first_use_child_may_use_the_gpu() {
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
