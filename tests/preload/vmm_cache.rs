//! The VMM cache: the program's own mappings are cached, and reused for identical requests.

use crate::harness::{Case, MEMORY_512_MB, Trial, cases, compare, report};
use crate::library::{breakable_library, library};
use serde_json::Value;
use std::fs;
use std::path::Path;

cases! {
    vmm_cache_serves_the_programs_own_mappings: runs "vmm_map", pool_serves 1, notices_broken ["kept asked", "kept released", "kept shared"];
    vmm_cache_makes_way_for_the_pool: runs "vmm_map 400", on [MEMORY_512_MB], pool_serves 1, notices_broken ["kept back"];
    vmm_cache_makes_way_for_cuda_malloc_without_the_pool: runs "vmm_map 400", on [MEMORY_512_MB], set "ipc:True", notices_broken ["kept back"];
    vmm_cache_makes_way_for_cuda_malloc_without_the_pool_under_a_limit: runs "vmm_map 400", on [MEMORY_512_MB], set "ipc:True,limit:500MiB", notices_broken ["kept back"];
}

/// Random calls that map and unmap, wrong ones among them, return what they return bare.
#[test]
fn vmm_cache_under_random_calls() {
    const SEEDS: u32 = 10;
    let case = Case::of("vmm_random_calls");
    let trial = Trial::new("random-maps", &case);
    let mut noticed = 0;
    for devices in ["1", "2"] {
        for seed in 0..SEEDS {
            let seed = seed.to_string();
            let run = |library: Option<&Path>, mistake: Option<&str>| {
                let mut variables = vec![("STANDIN_DEVICES", devices), ("STANDIN_PEERS", "1")];
                variables.extend(mistake.map(|it| ("CONCERTINA_BREAK", it)));
                trial.run_with(library, &variables, &[&seed, "300"]).0
            };
            let bare = run(None, None);
            let preloaded = run(Some(library()), None);
            assert_eq!(preloaded, bare, "{devices} devices, {seed}");
            let broken = run(Some(breakable_library()), Some("kept asked"));
            noticed += u32::from(broken != bare);
        }
    }
    assert!(noticed > 0, "of {}", 2 * SEEDS);
}

/// Memory that the program unmaps stays mapped for its next identical request, and returns to the driver when
/// it is idle.
#[test]
fn vmm_cache_saves_driver_calls_until_it_is_purged() {
    let case = Case::of("vmm_map");
    let trial = Trial::new("mapped-again", &case);
    let report_file = trial.scratch.path().join("report");
    let calls = |library: Option<&Path>, more: &[(&str, &str)], arguments: &[&str]| {
        let mut variables = vec![("STANDIN_REPORT", report_file.to_str().expect("text"))];
        variables.extend(more);
        trial.run_with(library, &variables, arguments);
        report(&report_file)
    };
    let of = |report: &[(String, u64)], name: &str| {
        let found = report.iter().find(|(it, _)| it == name);
        found.map_or(0, |(_, count)| *count)
    };
    let bare = calls(None, &[], &[]);
    let broken = calls(
        Some(breakable_library()),
        &[("CONCERTINA_BREAK", "kept")],
        &[],
    );
    let preloaded = calls(Some(library()), &[], &[]);
    let stats = fs::read_to_string(trial.stats()).expect("statistics");
    let stats: Value = serde_json::from_str(&stats).expect("JSON");
    let served = stats["kept"]["served"].as_u64();
    assert!(served.is_some_and(|served| served > 500), "{stats}");
    for function in ["cuMemCreate", "cuMemSetAccess", "cuMemUnmap"] {
        let [bare, broken, preloaded] = [&bare, &broken, &preloaded].map(|it| of(it, function));
        assert!(preloaded < 100, "{function}: {preloaded}");
        assert!(bare > 500 && broken > 500, "{function}: {bare} {broken}");
    }
    for (conf, argument, left) in [
        ("", "0", true),
        ("idle_release_ms:20", "0", false),
        ("", "asleep", false),
    ] {
        let report = calls(Some(library()), &[("CONCERTINA_CONF", conf)], &[argument]);
        assert_eq!(
            of(&report, "bytes") > 0,
            left,
            "{conf} {argument}: {report:?}"
        );
    }
}

/// A program that has freed addresses gets them when it asks for them. A real driver gives them only
/// sometimes.
#[test]
fn vmm_cache_frees_addresses_that_the_program_asks_for() {
    let case = Case {
        notices_broken: &["kept wanted"],
        ..Case::of("vmm_map wanted")
    };
    compare("wanted", &case);
}
