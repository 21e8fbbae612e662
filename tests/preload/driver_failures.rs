//! Driver calls that fail: what the program hears of it.

use crate::harness::{Case, Trial, counted, report};
use crate::library::breakable_library;
use crate::library::library;
use std::fs;

/// The program does not notice calls of the pool that fail, once or always.
#[test]
fn driver_failure_of_the_pools_calls_is_not_noticed() {
    let case = Case::of("runtime_symbols");
    let trial = Trial::new("failing", &case);
    let (bare, _) = trial.run(None, &[]);
    for function in [
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemAddressReserve",
        "cuMemGetAllocationGranularity",
        "cuDevicePrimaryCtxGetState",
        "cuStreamGetCtx",
        "cuStreamGetId",
    ] {
        for (use_of, status) in [("1", 2), ("2", 2), ("*", 2), ("1", 999), ("*", 999)] {
            let failure = format!("{function}:{use_of}:{status}");
            let (said, _) = trial.run(Some(library()), &[("STANDIN_FAIL", &failure)]);
            let said = said.replace(
                "concertina: device 0 (Simulated GPU) cannot map memory: plain cudaMalloc segments \
                 are used there\n",
                "",
            );
            assert_eq!(said, bare, "{failure}");
        }
    }
}

/// Each driver call fails at each of its uses: the program gets that error, or none; its memory keeps its
/// contents; and nothing leaks.
#[test]
fn driver_failure_of_any_call() {
    /// Uses of a function that are tried, at most.
    const USES: u64 = 8;
    const GOOD: &str = "0 wrong, all there\nexit status: 0";
    /// How lines begin that say why there is no pool, or one without mapped memory.
    const SAID: [&str; 2] = [
        "concertina: no memory can be had: the CUDA driver does not start: ",
        "concertina: device 0 (Simulated GPU) cannot map memory: ",
    ];
    let case = Case::of("driver_failures");
    let trial = Trial::new("unlucky", &case);
    let report_file = trial.scratch.path().join("report");
    let mut mistakes = Vec::new();
    for (pace, conf) in [
        ("immediate", ""),
        ("held", ""),
        ("held", "free:relaxed"),
        ("immediate", "expandable_segments:False"),
    ] {
        let mut run = |failure: &str| {
            let mut variables = vec![
                ("STANDIN_MEMORY_MB", "160"),
                ("STANDIN_PACE", pace),
                ("STANDIN_REPORT", report_file.to_str().expect("text")),
                ("CONCERTINA_CONF", conf),
            ];
            if !failure.is_empty() {
                variables.push(("STANDIN_FAIL", failure));
            }
            let status = failure.rsplit(':').next().unwrap_or_default();
            let (said, _) = trial.run_with(Some(library()), &variables, &[status]);
            let said = said
                .lines()
                .filter(|line| !SAID.iter().any(|it| line.starts_with(it)));
            let said = said.collect::<Vec<_>>().join("\n");
            let violations = fs::read_to_string(trial.violations()).unwrap_or_default();
            let report = report(&report_file);
            let left = |name| report.iter().any(|(it, count)| it == name && *count > 0);
            let counts = [
                "allocation",
                "allocated_bytes",
                "active_bytes",
                "reserved_bytes",
            ];
            let counted = |name| counted(&trial.stats(), &format!("{name}.all.current")) > 0;
            // What begins CUDA may fail for good, without the library, too.
            let good = match said == GOOD {
                true => {
                    !["bytes", "handles", "mappings"].into_iter().any(left)
                        && !counts.into_iter().any(counted)
                }
                false => said == trial.run_with(None, &variables, &[status]).0,
            };
            if !good || !violations.is_empty() {
                let left: Vec<_> = report.iter().rev().take(4).collect();
                mistakes.push(format!(
                    "{failure} {pace} {conf}: {said}\n{violations}{left:?}"
                ));
            }
            report
        };
        let calls = run("");
        for (function, count) in calls.iter().filter(|(name, _)| name.starts_with("cu")) {
            let step = count.div_ceil(USES) as usize;
            for (which, nth) in (1..=*count).step_by(step).enumerate() {
                let status = if which % 2 == 0 { 999 } else { 2 };
                run(&format!("{function}:{nth}:{status}"));
            }
        }
    }
    assert!(mistakes.is_empty(), "{}", mistakes.join("\n"));
}

/// Errors that the program has to get: of its own work, and of a device without memory.
#[test]
fn driver_failure_of_the_programs_work_reaches_the_program() {
    let case = Case::of("failed_work");
    let trial = Trial::new("failures", &case);
    for (failure, mistake) in [
        // What a GPU answers whose work has failed: everything fails with it.
        (
            "cuStreamGetCtx:*:700,cuMemAlloc_v2:*:700,cuCtxSynchronize:*:700,cuMemFree_v2:*:700,\
             cuMemAllocAsync:*:700,cuEventSynchronize:*:700",
            "health",
        ),
        (
            "cuCtxSynchronize:*:700,cuEventSynchronize:*:700,cuMemFree_v2:*:700",
            "wait",
        ),
        // A device without memory.
        ("cuMemCreate:*:2,cuMemAlloc_v2:*:2", "pool"),
    ] {
        let failure = ("STANDIN_FAIL", failure);
        let (bare, _) = trial.run(None, &[failure]);
        let (preloaded, _) = trial.run(Some(library()), &[failure]);
        assert_eq!(preloaded, bare, "{failure:?}");
        assert!(bare.contains(": 700") || bare.contains(": 2"), "{bare}");
        if mistake != "pool" {
            let broken = [failure, ("CONCERTINA_BREAK", mistake)];
            let (said, _) = trial.run(Some(breakable_library()), &broken);
            assert_ne!(said, bare, "{failure:?} with {mistake} broken");
        }
    }
}
