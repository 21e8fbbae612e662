//! The built command `concertina replay`: the recorded traces stay within their bounds on the
//! simulated GPU, and nothing in a file or among the arguments makes it do worse than say so.

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The recorded traces and peak reserved over peak live, at most: from an empty pool, and over six
/// passes. PyTorch's expandable segments reserve 1.042, 1.146, 1.043, 1.092 and 1.002 from empty
/// (PyTorch 2.11 replaying the same traces on an H100).
const BOUNDS: [(&str, f64, f64); 5] = [
    ("gpt2_varlen", 1.01, 1.01),
    ("llama_lora_ckpt", 1.01, 1.01),
    ("llama_serve", 1.01, 1.015),
    ("prefetch_streams", 1.01, 1.01),
    ("resnet_multiscale", 1.01, 1.01),
];

fn concertina(arguments: &[&str]) -> Output {
    concertina_with(arguments, &[])
}

fn concertina_with(arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_concertina"));
    for variable in [
        "CONCERTINA_CONF",
        "CONCERTINA_STATS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ALLOC_CONF",
    ] {
        command.env_remove(variable);
    }
    command.envs(variables.iter().copied());
    command.args(arguments).output().unwrap()
}

fn recorded(name: &str) -> String {
    format!("{}/tests/traces/{name}.gz", env!("CARGO_MANIFEST_DIR"))
}

/// The lines that a successful replay prints.
fn replayed(arguments: &[&str]) -> Vec<Value> {
    let output = concertina(&[&["replay", "--driver", "sim", "--json"], arguments].concat());
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Takes out what differs from run to run: the times.
fn without_times(mut line: Value) -> Value {
    for key in [
        "ns_per_event_cold",
        "ns_per_event_warm",
        "driver_ms_cold",
        "driver_ms",
    ] {
        assert!(
            line.as_object_mut().unwrap().shift_remove(key).is_some(),
            "{key} is missing"
        );
    }
    line
}

#[test]
fn recorded_traces_stay_within_bounds() {
    let files = BOUNDS.map(|(name, ..)| recorded(name));
    let files = files.each_ref().map(String::as_str);
    let files: Vec<&str> = ["--passes", "6"].into_iter().chain(files).collect();
    let lines = replayed(&files);
    assert_eq!(lines.len(), BOUNDS.len());
    for (line, (name, cold, later)) in lines.iter().zip(BOUNDS) {
        assert_eq!(line["trace"], name);
        assert_eq!(line["driver"], "sim");
        assert_eq!(line["completed"], true, "{name}");
        let live = line["peak_live_bytes"].as_u64().unwrap();
        for (key, bound) in [
            ("peak_reserved_bytes_cold", cold),
            ("peak_reserved_bytes", later),
        ] {
            let reserved = line[key].as_u64().unwrap();
            let ratio = reserved as f64 / live as f64;
            assert!(
                (1.0..=bound).contains(&ratio),
                "{name}: {key} is {ratio:.4} of peak live, at most {bound}"
            );
        }
    }
    let late = replayed(&[&["--late", "50"], &files[..]].concat());
    for (line, (name, _, later)) in late.iter().zip(BOUNDS) {
        let ratio = line["reserved_ratio"].as_f64().unwrap();
        assert!(
            ratio <= later,
            "{name}, work late: {ratio:.4}, at most {later}"
        );
    }
    let again = replayed(&files);
    let [first, again] = [lines, again].map(|lines| lines.into_iter().map(without_times));
    assert!(first.eq(again), "two replays on the simulated GPU differ");
}

/// A limit of 1.005 of peak live, or 1.01 for the trace whose caches grow, and a chunk for each stream;
/// work that is late needs no more.
#[test]
fn recorded_traces_complete_under_a_tight_limit() {
    const CHUNK_MIB: u64 = 2;
    for (name, ..) in BOUNDS {
        let file = recorded(name);
        let line = &replayed(&["--passes", "1", &file])[0];
        let live = line["peak_live_bytes"].as_u64().unwrap() as f64 / 1048576.0;
        let share = if name == "llama_serve" { 1.01 } else { 1.005 };
        let limit = live * share + (CHUNK_MIB * line["streams"].as_u64().unwrap()) as f64;
        let limit = (limit.ceil() as u64)
            .next_multiple_of(CHUNK_MIB)
            .to_string();
        for late in ["0", "50"] {
            let arguments = ["--passes", "1", "--late", late, "--limit", &limit, &file];
            assert_eq!(
                replayed(&arguments)[0]["completed"],
                true,
                "{name}, {late} late"
            );
        }
    }
}

#[test]
fn a_limit_holds_and_the_smallest_is_found() {
    let file = recorded("prefetch_streams");
    let line = &replayed(&["--min-limit", "--passes", "1", &file])[0];
    assert!(line["ns_per_event_warm"].is_null());
    let mib = line["min_limit_bytes"].as_u64().unwrap() >> 20;
    let limited = |mib: u64| {
        let mib = mib.to_string();
        concertina(&[
            "replay", "--driver", "sim", "--json", "--passes", "1", "--limit", &mib, &file,
        ])
    };
    let fits = limited(mib);
    let line: Value = serde_json::from_slice(&fits.stdout).unwrap();
    assert_eq!(line["completed"], true);
    assert!(line["peak_reserved_bytes"].as_u64().unwrap() <= mib << 20);

    let short = limited(line["peak_live_bytes"].as_u64().unwrap() >> 21);
    let line: Value = serde_json::from_slice(&short.stdout).unwrap();
    assert_eq!(line["completed"], false);
    assert_eq!(short.status.code(), Some(1));
    complains(&short, &file);
}

/// Under a limit the pool grows otherwise, and may need more than without one.
#[test]
fn min_limit_is_found_beyond_what_is_reserved_without_one() {
    let file = directory("min-limit").join("trace");
    fs::write(&file, BEYOND).unwrap();
    let file = file.to_str().unwrap();
    let line = &replayed(&["--min-limit", "--passes", "1", file])[0];
    assert_eq!(line["completed"], true);
    let bytes = line["min_limit_bytes"].as_u64();
    let bytes = bytes.unwrap_or_else(|| panic!("no limit is found: {line}"));
    assert!(bytes >= line["peak_live_bytes"].as_u64().unwrap());
    // White space does not matter, as in CONCERTINA_CONF.
    let limit = format!(" {bytes} B");
    let line = &replayed(&["--limit", &limit, "--passes", "1", file])[0];
    assert_eq!(
        (&line["completed"], &line["limit_bytes"]),
        (&true.into(), &bytes.into())
    );
}

/// A trace that did not complete under the limit of what it reserves without one, 860 MiB.
const BEYOND: &str = "\
# by hand
a 1 131858432 0
a 2 851968 0
a 3 327680 0
f 2
a 4 112197632 0
a 5 2818048 0
f 1
a 6 26214400 0
a 7 164888576 0
a 8 65536 0
a 9 258998272 0
a 10 103022592 0
a 11 1441792 0
a 12 28311552 0
f 9
a 13 104595456 0
a 14 160432128 0
a 15 3276800 0
a 16 2621440 0
";

#[test]
fn statistics_of_a_replay_are_left_where_the_environment_says() {
    let directory = directory("replay-stats");
    let pattern = directory.join("stats-%r.json");
    let file = recorded("prefetch_streams");
    let arguments = ["replay", "--driver", "sim", "--passes", "1", &file];
    let path = ("CONCERTINA_STATS", pattern.to_str().unwrap());
    let output = concertina_with(&arguments, &[path, ("RANK", "5")]);
    assert!(output.status.success(), "{output:?}");
    let text = fs::read_to_string(directory.join("stats-5.json")).unwrap();
    let stats: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&stats["driver"], &stats["used_gpu"]),
        (&"sim".into(), &true.into())
    );
    let counters = &stats["devices"][0]["memory_stats"];
    assert!(counters["allocated_bytes.all.peak"].as_u64().unwrap() > 1 << 30);
    let missing = directory.join("no/such/directory");
    for (variable, complaint) in [
        (
            ("CONCERTINA_STATS", missing.to_str().unwrap()),
            "replay: CONCERTINA_STATS: ",
        ),
        (
            ("CONCERTINA_CONF", "limt:8G"),
            "replay: CONCERTINA_CONF: limt:8G makes no sense",
        ),
    ] {
        let output = concertina_with(&arguments, &[variable]);
        complains(&output, complaint);
        assert_eq!(output.status.code(), Some(2), "{variable:?}");
    }
}

#[test]
fn a_replay_with_late_work_completes() {
    let line = &replayed(&[
        "--late",
        "200",
        "--passes",
        "2",
        &recorded("prefetch_streams"),
    ])[0];
    assert_eq!(line["completed"], true);
    assert_eq!(line["late"], 200);
}

#[test]
fn the_table_is_aligned() {
    let file = recorded("prefetch_streams");
    let output = concertina(&["replay", "--driver", "sim", "--passes", "1", &file]);
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let [head, row] = text.lines().collect::<Vec<_>>()[..] else {
        panic!("{text}")
    };
    assert_eq!(head.len(), row.len(), "{text}");
    assert!(
        row.starts_with("prefetch_streams") && row.ends_with("yes"),
        "{text}"
    );
}

/// Holds `output` to a refusal in one line that contains `what`, and no more than that line.
fn complains(output: &Output, what: &str) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{what}: {errors}");
    assert_eq!(errors.matches('\n').count(), 1, "{what}: {errors}");
    assert!(
        errors.starts_with("concertina: ") && errors.ends_with('\n'),
        "{errors}"
    );
    assert!(errors.contains(what), "{what} is not named: {errors}");
    assert!(!errors.contains("panicked"), "{errors}");
}

/// A fresh directory for one test's files.
fn directory(test: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn bad_files_get_one_line_each() {
    let good = b"# good\na 1 100 0\na 2 200 1\nf 1\n";
    let endless = [&b"# endless\n"[..], &vec![b'1'; 64 << 20]].concat();
    let whole = fs::read(recorded("prefetch_streams")).unwrap();
    let mut damaged = whole.clone();
    let checksum = damaged.len() - 8;
    damaged[checksum] ^= 1;
    // What is in the file, and what the complaint says after the file's name.
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", vec![], ": the file is empty; "),
        ("empty.gz", gzip(b""), ": there are no events in it; "),
        (
            "only-comment",
            b"# nothing\n".to_vec(),
            ": there are no events in it; ",
        ),
        (
            "no-comment",
            b"a 1 100 0\n".to_vec(),
            ":1: this is not a trace: it starts with 'a 1 1",
        ),
        (
            "binary",
            (0..=255).cycle().take(1 << 16).collect(),
            ":1: this is not a trace: ",
        ),
        (
            "binary-after-comment",
            b"# x\n\x00\xff\x1b[31m\n".to_vec(),
            ":2: '\\x00\\xff\\x1b[31m' ",
        ),
        ("endless", endless.clone(), ":2: the line is too long; "),
        (
            "endless-comment",
            b"#".repeat(1 << 20),
            ":1: the line is too long; ",
        ),
        ("endless.gz", gzip(&endless), ":2: the line is too long; "),
        (
            "cut.gz",
            gzip(good)[..20].to_vec(),
            "the gzip data ends too early; ",
        ),
        (
            "cut-header.gz",
            gzip(good)[..4].to_vec(),
            ":1: the gzip data ends too early; ",
        ),
        (
            "cut-long.gz",
            whole[..whole.len() - 4000].to_vec(),
            "the gzip data ends too early; ",
        ),
        ("damaged.gz", damaged, "the gzip data is damaged: "),
        (
            "junk-after.gz",
            [&gzip(good)[..], b"junk"].concat(),
            ":5: the gzip data is damaged: ",
        ),
        (
            "cut",
            good[..good.len() - 1].to_vec(),
            ":4: the line has no line break at its end; ",
        ),
        (
            "unknown-free",
            b"# x\na 1 100 0\nf 2\n".to_vec(),
            ":3: id 2 is freed but was never ",
        ),
        (
            "free-of-0",
            b"# x\na 1 100 0\nf 0\n".to_vec(),
            ":3: id 0 is freed but was never ",
        ),
        (
            "freed-twice",
            b"# x\na 1 100 0\nf 1\nf 1\n".to_vec(),
            ":4: id 1 is freed twice; ",
        ),
        (
            "id-again",
            b"# x\na 1 100 0\na 1 100 0\n".to_vec(),
            ":3: id 1 comes where 2 is due; ",
        ),
        (
            "id-skipped",
            b"# x\na 2 100 0\n".to_vec(),
            ":2: id 2 comes where 1 is due; ",
        ),
        ("size-0", b"# x\na 1 0 0\n".to_vec(), ":2: size 0; "),
        (
            "size-absurd",
            b"# x\na 1 70368744177665 0\n".to_vec(),
            ":2: size 70368744177665; ",
        ),
        (
            "size-overflow",
            b"# x\na 1 99999999999999999999999 0\n".to_vec(),
            ":2: size ",
        ),
        (
            "size-negative",
            b"# x\na 1 -5 0\n".to_vec(),
            ":2: 'a 1 -5 0' is neither ",
        ),
        (
            "live-absurd",
            b"# x\na 1 70368744177664 0\na 2 1 0\n".to_vec(),
            ":3: ",
        ),
        (
            "stream-absurd",
            b"# x\na 1 100 65536\n".to_vec(),
            ":2: stream 65536; ",
        ),
        (
            "too-few",
            b"# x\na 1 100\n".to_vec(),
            ":2: 'a 1 100' is neither ",
        ),
        (
            "too-many",
            b"# x\na 1 100 0 0\n".to_vec(),
            ":2: 'a 1 100 0 0' is neither ",
        ),
        (
            "blank-line",
            b"# x\n\na 1 100 0\n".to_vec(),
            ":2: '' is neither ",
        ),
        (
            "other-event",
            b"# x\nr 1 100 0\n".to_vec(),
            ":2: 'r 1 100 0' is neither ",
        ),
        (
            "other-line-breaks",
            b"# x\r\na 1 100 0\r\n".to_vec(),
            ":2: 'a 1 100 0\\r' is neither ",
        ),
    ];
    let directory = directory("bad-files");
    for (name, bytes, complaint) in cases {
        let file = directory.join(name);
        fs::write(&file, bytes).unwrap();
        let file = file.to_str().unwrap();
        let output = concertina(&["replay", "--driver", "sim", "--json", file]);
        complains(&output, file);
        complains(&output, complaint);
        assert_eq!(output.status.code(), Some(1), "{name}");
        assert!(output.stdout.is_empty(), "{name}");
    }
}

#[test]
fn what_is_no_file_gets_one_line() {
    let directory = directory("no-files");
    let missing = directory.join("missing.gz");
    for (file, complaint) in [
        (directory.to_str().unwrap(), ": this is a directory; "),
        (missing.to_str().unwrap(), ": can't be read: "),
        ("/dev/zero", ":1: this is not a trace: "),
        ("two\nlines", ": can't be read: "),
    ] {
        let output = concertina(&["replay", "--driver", "sim", file]);
        complains(&output, &file.replace('\n', "\\n"));
        complains(&output, complaint);
        assert_eq!(output.status.code(), Some(1), "{file}");
    }
}

#[test]
fn a_bad_file_does_not_stop_the_others() {
    let directory = directory("among-others");
    let [bad, plain, members] = ["bad", "plain", "members.gz"]
        .map(|name| directory.join(name).to_str().unwrap().to_owned());
    fs::write(&bad, "# bad\nf 1\n").unwrap();
    fs::write(&plain, "# good\na 1 100 0\na 2 513 65535\nf 1\n").unwrap();
    fs::write(
        &members,
        [gzip(b"# good\na 1 1"), gzip(b"00 0\nf 1\n")].concat(),
    )
    .unwrap();
    let output = concertina(&[
        "replay", "--driver", "sim", "--json", &bad, &plain, &members,
    ]);
    complains(&output, &bad);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(
        (&lines[0]["trace"], &lines[1]["trace"]),
        (&"plain".into(), &"members".into())
    );
    assert_eq!(
        (&lines[0]["events"], &lines[0]["streams"]),
        (&3.into(), &2.into())
    );
    assert_eq!(lines[0]["peak_live_bytes"], 512 + 1024);
    assert_eq!(lines[1]["peak_live_bytes"], 512);
}

#[test]
fn bad_arguments_get_one_line() {
    let file = recorded("prefetch_streams");
    let cases: &[(&[&str], &str)] = &[
        (
            &[],
            "no command is given; allowed is one of run, report, replay, --help, --version",
        ),
        (&["replai"], "there is no command 'replai'; allowed"),
        (&["--replay"], "'--replay'; allowed"),
        (&["--version", "x"], "--version takes nothing after it"),
        (&["replay"], "no trace file is given; at least one"),
        (
            &["replay", "--fast", &file],
            "'--fast'; allowed are FILE…, --driver, ",
        ),
        (&["replay", &file, "--json=yes"], "'--json'"),
        (
            &["replay", &file, "--driver", "gpu"],
            "--driver gpu: allowed is one of auto, sim, cuda",
        ),
        (
            &["replay", &file, "--driver"],
            "--driver needs a value; allowed is one of auto, sim",
        ),
        (
            &["replay", &file, "--limit", "0"],
            "--limit 0: allowed is 1 to 67108864 MiB",
        ),
        (
            &["replay", &file, "--limit", "2Q"],
            "--limit 2Q: allowed is 1 to 67108864 MiB, or 8GiB, ",
        ),
        (
            &["replay", &file, "--limit", "65TiB"],
            "--limit 65TiB: allowed is 1 to 67108864 MiB, or 8GiB, ",
        ),
        (
            &["replay", &file, "--limit", "99999999999999999999"],
            "allowed is 1 to 67108864 MiB",
        ),
        (
            &["replay", &file, "--passes", "0"],
            "--passes 0: allowed is 1 to 1000 passes",
        ),
        (
            &["replay", &file, "--passes", "-1"],
            "--passes -1: allowed is 1 to 1000 passes",
        ),
        (
            &["replay", &file, "--late", "-1"],
            "--late -1: allowed is 0 to 1000000 events",
        ),
        (
            &["replay", &file, "--late", "5", "--driver", "cuda"],
            "--late needs the simulated GPU",
        ),
        (
            &["replay", &file, "--limit", "9", "--min-limit"],
            "exclude each other",
        ),
    ];
    for (arguments, complaint) in cases {
        let output = concertina(arguments);
        complains(&output, complaint);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn help_and_version_are_printed() {
    for (arguments, start) in [
        (&["--help"][..], "A CUDA memory allocator"),
        (&["replay", "--help"], "Replays allocation traces"),
        (
            &["--version"],
            concat!("concertina ", env!("CARGO_PKG_VERSION"), "\n"),
        ),
    ] {
        let output = concertina(arguments);
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{arguments:?}"
        );
        assert!(
            String::from_utf8(output.stdout).unwrap().starts_with(start),
            "{arguments:?}"
        );
    }
}
