//! Statistics of calls, by function and by library.

use crate::harness::{Case, Trial, cases, compile};
use crate::library::{Scratch, library, output, standin};
use serde_json::{Value, json};
use std::fs;
use std::process::Command;

cases! {
    statistics_of_calls_do_not_change_what_the_program_sees: runs "call_counts", pool_serves 1625, notices_broken ["pool"];
}

#[test]
fn statistics_count_calls_by_function() {
    let case = Case::of("call_counts");
    let trial = Trial::new("counted", &case);
    let (bare, _) = trial.run(None, &[]);
    let (said, _) = trial.run(Some(library()), &[]);
    assert_eq!(said, bare);
    let (_, pitch) = said.split_once("\npitch ").expect("a pitch");
    let pitch: u64 = pitch
        .lines()
        .next()
        .and_then(|it| it.parse().ok())
        .expect("a number");
    let text = fs::read_to_string(trial.stats()).expect("statistics");
    let mut stats: Value = serde_json::from_str(&text).expect("JSON");
    let calls = stats["calls"].as_object_mut().expect("calls");
    for (name, call) in calls.iter_mut() {
        let call = call.as_object_mut().expect("an object");
        let time = call.remove("nanoseconds").and_then(|it| it.as_u64());
        assert!(time.is_some_and(|time| time > 0), "{name}: {text}");
    }
    // Each of 16 threads: 100 pairs and one more.
    let expected = json!({
        "cuMemAlloc": {"count": 4 + 1616, "failed": 1, "bytes": (6 << 20) + 1616 * 512},
        "cuMemAllocPitch": {"count": 2, "failed": 0, "bytes": 30 * pitch},
        "cuMemFree": {"count": 3 + 1616, "failed": 1},
        "cuMemAllocAsync": {"count": 5, "failed": 0, "bytes": 20 << 20},
        "cuMemFreeAsync": {"count": 5, "failed": 0},
    });
    assert_eq!(stats["calls"], expected);

    let mut report = Command::new(env!("CARGO_BIN_EXE_concertina"));
    let shown = output(report.arg("report").arg(trial.stats()));
    let line = shown.lines().find(|line| line.starts_with("cuMemAlloc "));
    let cells: Vec<_> = line.expect("a line").split_whitespace().collect();
    assert_eq!(
        cells[..5],
        ["cuMemAlloc", "1620", "1", "6.8", "MiB"],
        "{shown}"
    );
}

#[test]
fn statistics_count_calls_by_library_with_stats_callers() {
    let scratch = Scratch::new("preload-callers");
    let link = format!("-L{}", standin().display());
    let shared = ["-shared", "-fPIC", &link, "-lcudart"];
    let taker = compile(&scratch, "call_counts_library.c", "libtaker.so", &shared);
    let taker = taker.to_str().expect("a path of text");
    let options = [taker, &link, "-Wl,--no-as-needed", "-lcudart", "-lcuda"];
    let program = compile(&scratch, "call_counts_by_library.c", "callers", &options);
    let file = scratch.path().join("stats.json");
    let callers = |settings: &str| {
        let mut command = Command::new(&program);
        command
            .env("LD_LIBRARY_PATH", standin())
            .env("LD_PRELOAD", library())
            .env("CONCERTINA_STATS", &file)
            .env("CONCERTINA_CONF", settings);
        output(&mut command);
        let text = fs::read_to_string(&file).expect("statistics");
        let stats: Value = serde_json::from_str(&text).expect("JSON");
        stats["callers"].clone()
    };
    assert_eq!(callers(""), Value::Null);
    let mut callers = callers("stats_callers:True");
    for calls in callers.as_object_mut().expect("callers").values_mut() {
        for call in calls.as_object_mut().expect("calls").values_mut() {
            let time = call.as_object_mut().expect("a call").remove("nanoseconds");
            assert!(time.is_some_and(|time| time.is_u64()), "{call}");
        }
    }
    let expected = json!({
        "callers": {
            "cuMemAlloc": {"count": 1, "failed": 0, "bytes": 5 << 20},
            "cuMemFree": {"count": 4, "failed": 0},
        },
        "libtaker.so": {"cuMemAlloc": {"count": 4, "failed": 1, "bytes": 3 << 20}},
    });
    assert_eq!(callers, expected);

    let mut report = Command::new(env!("CARGO_BIN_EXE_concertina"));
    let shown = output(report.arg("report").arg(&file));
    let mut lines = shown.lines();
    assert!(
        lines.any(|line| line.starts_with("calls by library ")),
        "{shown}"
    );
    let line = lines.find(|line| line.starts_with("libtaker.so: cuMemAlloc "));
    let cells: Vec<_> = line.expect("a line").split_whitespace().collect();
    assert_eq!(cells[2..6], ["4", "1", "3.0", "MiB"], "{shown}");
}
