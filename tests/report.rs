//! `concertina report`: what it shows of statistics, and what it says of other files.

mod library;

use library::Scratch;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

fn report(files: &[PathBuf]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_concertina"));
    let output = command.arg("report").args(files).output();
    output.expect("it runs")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

/// Statistics of a process with one device, which has had this many bytes in use and held.
fn process(number: u32, used: u64, held: u64, calls: Value) -> Value {
    json!({
        "schema_version": 1, "version": "0.1.0", "pid": number, "host": "node1", "rank": 3,
        "command_line": ["python", "train.py", "two words"], "used_gpu": true,
        "time": 1, "driver": "cuda",
        "calls": calls,
        "devices": [{
            "device": 0, "name": "GPU", "total_bytes": 1 << 30, "busy": false,
            "memory_stats": {
                "allocated_bytes.all.peak": used, "reserved_bytes.all.peak": held, "num_ooms": 2,
            },
            "limit_bytes": null, "live_blocks": 3,
            "driver_calls": {
                "cuMemCreate": {"count": 2, "nanoseconds": 3000, "failed": 1},
                "cuMemMap": {"count": 0, "nanoseconds": 0, "failed": 0},
            },
        }],
    })
}

#[test]
fn it_shows_devices_and_sums_of_calls() {
    let scratch = Scratch::new("report-shows");
    let calls = |nanoseconds: Value| {
        json!({
            "cuMemFree": {"count": 1, "failed": 0, "nanoseconds": 500},
            "cuMemAlloc": {"count": 2, "failed": 1, "bytes": 1 << 20, "nanoseconds": nanoseconds},
        })
    };
    let mut files = Vec::new();
    for (name, process) in [
        ("one", process(17, 8 << 20, 12 << 20, calls(json!(1000)))),
        ("two", process(4, 0, 0, calls(json!(2000)))),
        (
            "none",
            json!({"schema_version": 1, "pid": 5, "calls": {}, "devices": []}),
        ),
    ] {
        files.push(scratch.path().join(name));
        fs::write(&files[files.len() - 1], process.to_string()).expect("a file");
    }
    let output = report(&files);
    assert_eq!(text(&output.stderr), "");
    let directory = format!("{}/", scratch.path().display());
    let spaces = " ".repeat(directory.len());
    assert_eq!(
        text(&output.stdout)
            .replace(&directory, "")
            .replace(&spaces, ""),
        "\
3 of 3 files read: 3 processes on 2 hosts, 1 of which used no GPU

file  host   rank  process  command line
one   node1  3     17       python train.py 'two words'
two   node1  3     4        python train.py 'two words'
none  -      -     5        -

process   device  most in use  most held  held / in use  limit  out of memory  not freed
17       0 (GPU)      8.0 MiB   12.0 MiB          1.500      -              2          3
4        0 (GPU)      0.0 MiB    0.0 MiB              -      -              2          3
5              -            -          -              -      -              -          -

the program's calls  times  failed  asked for      time      each
cuMemAlloc               4       2    2.0 MiB  0.003 ms  0.750 us
cuMemFree                2       0          -  0.001 ms  0.500 us

calls to the driver  times  failed      time      each
cuMemCreate              4       2  0.006 ms  1.500 us
"
    );
    assert!(output.status.success());

    let mut command = Command::new(env!("CARGO_BIN_EXE_concertina"));
    let output = command.args(["report", "--json"]).args(&files).output();
    let output = output.expect("it runs");
    assert!(output.status.success(), "{output:?}");
    let shown: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(
        (&shown["files"], &shown["files_read"]),
        (&3.into(), &3.into())
    );
    let processes = shown["processes"].as_array().expect("a list");
    assert_eq!(
        processes[0],
        json!({
            "file": files[0], "host": "node1", "rank": 3, "local_rank": null, "world_size": null, "pid": 17,
            "command_line": ["python", "train.py", "two words"], "used_gpu": true,
            "devices": [{
                "device": 0, "name": "GPU", "peak_allocated_bytes": 8 << 20,
                "peak_reserved_bytes": 12 << 20, "limit_bytes": null, "num_ooms": 2,
                "live_blocks": 3,
            }],
        })
    );
    assert_eq!(processes[2]["used_gpu"], false);
    assert_eq!(shown["calls"]["cuMemAlloc"]["nanoseconds"], 3000);
    assert_eq!(shown["driver_calls"]["cuMemCreate"]["count"], 4);
}

#[test]
fn other_libraries_beside_pytorch_have_a_column() {
    let scratch = Scratch::new("report-others");
    let mut with = process(1, 8 << 20, 12 << 20, json!({}));
    with["devices"][0]["other_libraries"] = json!({"allocated_bytes.all.peak": 2 << 20});
    let mut files = Vec::new();
    for (name, process) in [
        ("with", with),
        ("without", process(2, 1 << 20, 2 << 20, json!({}))),
    ] {
        files.push(scratch.path().join(name));
        fs::write(&files[files.len() - 1], process.to_string()).expect("a file");
    }
    let table = "\
process   device  most in use  by other libraries  most held  held / in use  limit  out of memory  not freed
1        0 (GPU)      8.0 MiB             2.0 MiB   12.0 MiB          1.200      -              2          3
2        0 (GPU)      1.0 MiB                   -    2.0 MiB          2.000      -              2          3
";
    let said = report(&files);
    assert!(text(&said.stdout).contains(table), "{}", text(&said.stdout));
}

/// Where the time of one process is not known, that of all is not.
#[test]
fn it_adds_up_no_part_of_a_sum() {
    let scratch = Scratch::new("report-null");
    let files: Vec<_> = [json!(1000), json!(null)]
        .into_iter()
        .enumerate()
        .map(|(at, time)| {
            let calls = json!({"cuMemFree": {"count": 1, "failed": 0, "nanoseconds": time}});
            let file = scratch.path().join(at.to_string());
            fs::write(&file, process(1, 1, 1, calls).to_string()).expect("a file");
            file
        })
        .collect();
    let said = report(&files);
    let line = "cuMemFree                2       0     -     -\n";
    assert!(text(&said.stdout).contains(line), "{said:?}");
}

#[test]
fn what_is_no_statistics_is_named() {
    let scratch = Scratch::new("report-named");
    let good = scratch.path().join("good");
    fs::write(&good, process(1, 1, 1, json!({})).to_string()).expect("a file");
    for (name, content, why) in [
        ("absent", None, "No such file"),
        ("text", Some("{"), "no JSON: "),
        (
            "other",
            Some("{}"),
            "no statistics: there is no schema_version",
        ),
        (
            "newer",
            Some("{\"schema_version\": 999}"),
            "schema_version 999",
        ),
    ] {
        let file = scratch.path().join(name);
        if let Some(content) = content {
            fs::write(&file, content).expect("a file");
        }
        let output = report(&[file, good.clone()]);
        let said = text(&output.stderr);
        assert!(
            said.starts_with("concertina: report: ") && said.contains(why),
            "{said}"
        );
        assert_eq!(said.lines().count(), 1, "{said}");
        assert_eq!(output.status.code(), Some(1));
        assert!(
            text(&output.stdout).starts_with("1 of 2 files read: 1 process on 1 host\n\nfile "),
            "{output:?}"
        );
    }
    for arguments in [&["report"][..], &["report", "--fast", "file"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_concertina"));
        let output = command.args(arguments).output().expect("it runs");
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(text(&output.stderr).lines().count(), 1, "{output:?}");
    }
}

/// Statistics of a rank with one device and a limit.
fn rank(rank: u64, used: u64, limit: Option<u64>, ooms: u64) -> Value {
    let mut process = process(rank as u32 + 1, used, used + (1 << 20), json!({}));
    process["rank"] = json!(rank);
    process["devices"][0]["limit_bytes"] = json!(limit);
    process["devices"][0]["memory_stats"]["num_ooms"] = json!(ooms);
    process
}

fn write_all(scratch: &Scratch, processes: &[Value]) -> Vec<PathBuf> {
    let files = processes.iter().enumerate().map(|(at, process)| {
        let file = scratch.path().join(format!("stats-{at}.json"));
        fs::write(&file, process.to_string()).expect("a file");
        file
    });
    files.collect()
}

#[test]
fn ranks_are_summed_and_compared() {
    const GIB: u64 = 1 << 30;
    let scratch = Scratch::new("report-ranks");
    let files = write_all(
        &scratch,
        &[
            rank(0, 2 * GIB, Some(4 * GIB), 0),
            rank(1, 3 * GIB, Some(4 * GIB), 2),
            rank(2, 2 * GIB, Some(16 * GIB), 0),
        ],
    );
    let output = report(&files);
    let shown = text(&output.stdout);
    let lines = "
3 ranks: 7.00 GiB in use at their peaks, 7.00 GiB held
most in use: rank 1 with 3.00 GiB, 1.50 times as much as rank 0 with 2.00 GiB, which has least
nearest to its limit: rank 1, which held 75.0 % of 4.00 GiB
OUT OF MEMORY: rank 1, 2 times
";
    assert!(shown.contains(lines), "{shown}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_concertina"));
    let output = command.arg("report").arg("--json").args(&files).output();
    let found: Value = serde_json::from_slice(&output.expect("it runs").stdout).expect("JSON");
    let ranks = &found["ranks"];
    assert_eq!(ranks["count"], 3);
    assert_eq!(ranks["peak_allocated_bytes"], 7 * GIB);
    assert_eq!(ranks["most_allocated"]["rank"], 1);
    assert_eq!(ranks["out_of_memory"], json!([{"rank": 1, "num_ooms": 2}]));
}

/// Files of several jobs, or of processes without ranks, have no sums over ranks.
#[test]
fn ranks_are_not_summed_over_several_jobs() {
    let scratch = Scratch::new("report-no-ranks");
    let same = [rank(1, 5, None, 0), rank(1, 6, None, 0)];
    let mut without = same.clone();
    without.iter_mut().for_each(|it| it["rank"] = Value::Null);
    for processes in [&same[..], &without[..], &same[..1]] {
        let output = report(&write_all(&scratch, processes));
        assert!(!text(&output.stdout).contains("ranks:"));
        assert!(output.status.success());
    }
}

/// Ranks that never used memory, or have no limit, divide nothing by zero.
#[test]
fn ranks_with_nothing_in_use_are_named() {
    let scratch = Scratch::new("report-empty-ranks");
    let files = write_all(
        &scratch,
        &[rank(0, 0, Some(0), 0), rank(1, 1 << 30, None, 1)],
    );
    let output = report(&files);
    let shown = text(&output.stdout);
    assert!(
        shown.contains("rank 0 used none\nOUT OF MEMORY: rank 1, once\n"),
        "{shown}"
    );
}
