//! `free:relaxed`: cudaFree returns at once.

use crate::harness::{Case, HELD, Trial};
use crate::library::{breakable_library, library};

#[test]
fn free_relaxed_returns_at_once_and_keeps_contents_until_work_is_done() {
    let case = Case {
        gpu: &[HELD],
        settings: "free:relaxed",
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
fn free_relaxed_changes_nothing_but_when_cuda_free_returns() {
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
            gpu: &[("STANDIN_MEMORY_MB", "2048")],
            settings: "free:relaxed",
            ..Case::of(program)
        };
        let trial = Trial::new(&format!("relaxed-{program}"), &case);
        let (bare, _) = trial.run(None, &[HELD]);
        let (preloaded, pooled) = trial.run(Some(library()), &[HELD]);
        assert_eq!(preloaded, bare, "{program}");
        assert!(pooled > 0, "{program}");
    }
}
