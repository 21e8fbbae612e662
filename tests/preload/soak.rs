//! Soak: long runs of changing loads do not leak.

use crate::harness::{Case, Trial};
use crate::library::{breakable_library, library};
use std::fs;
use std::path::Path;

/// Loads that change from round to round, and others that use up all memory: memory keeps its contents, and
/// does not grow.
#[test]
fn soak_memory_does_not_grow() {
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
