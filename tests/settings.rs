//! Settings: from the environment's text to their effect, and as the documentation shows them.

use concertina_engine::process::stats_path;
use concertina_engine::settings::{
    Diagnostic, Free, RoundUp, Settings, Severity, VARIABLES, markdown, size,
};
use std::path::PathBuf;
use std::time::Duration;

const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

/// The settings and complaints of an environment that holds `variables`.
fn settings(variables: &[(&str, &str)]) -> (Settings, Vec<String>) {
    let (settings, complaints) = read(variables);
    let lines = complaints.into_iter().map(|complaint| complaint.line);
    (settings, lines.collect())
}

fn read(variables: &[(&str, &str)]) -> (Settings, Vec<Diagnostic>) {
    Settings::from_lookup(|name| {
        let found = variables.iter().find(|(variable, _)| *variable == name);
        found.map(|(_, text)| text.to_string())
    })
}

/// The settings of a `CONCERTINA_CONF` that has no mistake.
#[track_caller]
fn good(text: &str) -> Settings {
    let (settings, complaints) = settings(&[("CONCERTINA_CONF", text)]);
    assert_eq!(complaints, [""; 0], "{text}");
    settings
}

/// The one complaint about a `CONCERTINA_CONF` that leaves the defaults.
#[track_caller]
fn bad(text: &str) -> String {
    let (settings, mut complaints) = settings(&[("CONCERTINA_CONF", text)]);
    assert_eq!(settings, Settings::default(), "{text}");
    assert_eq!(complaints.len(), 1, "{text}: {complaints:?}");
    let line = complaints.remove(0);
    assert!(!line.chars().any(char::is_control), "{line:?}");
    assert!(line.starts_with("CONCERTINA_CONF: "), "{line}");
    line
}

#[test]
fn nothing_set_is_the_defaults() {
    for text in ["", " ", ",", " , ,\t"] {
        assert_eq!(good(text), Settings::default(), "{text:?}");
    }
    assert_eq!(settings(&[]).0, Settings::default());
}

#[test]
fn every_setting_takes_effect() {
    assert!(good("ipc:True").ipc);
    assert_eq!(good("free:relaxed").free, Free::Relaxed);
    assert_eq!(good("free:relaxed,free:strict").free, Free::Strict);
    assert!(!good("expandable_segments:False").expandable_segments);
    assert_eq!(
        good("per_process_memory_fraction:0.25").per_process_memory_fraction,
        0.25
    );
    assert_eq!(
        good("per_process_memory_fraction:0").per_process_memory_fraction,
        0.0
    );
    assert_eq!(good("chunk_size_mb:64").chunk_size, 64 * MIB);
    assert!(!good("stream_waits:False").stream_waits);
    assert_eq!(
        good("idle_release_ms:1500").idle_release,
        Duration::from_millis(1500)
    );
    assert_eq!(
        good("roundup_power2_divisions:4")
            .round_up
            .round_up(5 * MIB + 1),
        6 * MIB
    );
    for (text, verbose) in [("1", true), ("True", true), ("0", false), ("False", false)] {
        assert_eq!(good(&format!("verbose:{text}")).verbose, verbose);
    }
}

#[test]
fn sizes_are_read_as_people_write_them() {
    for (text, bytes) in [
        ("8GiB", 8 * GIB),
        ("8192MiB", 8 * GIB),
        ("8589934592", 8 * GIB),
        ("8589934592B", 8 * GIB),
        ("3KiB", 3 << 10),
        ("1TiB", 1 << 40),
        ("8G", 8 * GIB),
        ("8g", 8 * GIB),
        ("8gib", 8 * GIB),
        ("8 GIB", 8 * GIB),
        ("8GB", 8_000_000_000),
        ("8gb", 8_000_000_000),
        ("300MB", 300_000_000),
        ("300M", 300 * MIB),
        ("5kb", 5000),
        ("5k", 5120),
        ("1TB", 1_000_000_000_000),
        ("8.5GiB", 17 * GIB / 2),
        ("0.5G", GIB / 2),
        ("1.0GB", 1_000_000_000),
        ("0.1MiB", 104_857),
    ] {
        assert_eq!(good(&format!("limit:{text}")).limit, Some(bytes), "{text}");
        assert_eq!(good(&format!("preallocate:{text}")).preallocate, bytes);
    }
    // Where a bare number is one of MiB, a unit is what it is.
    for (text, bytes) in [
        ("8192", Some(8 * GIB)),
        ("8G", Some(8 * GIB)),
        ("8B", Some(8)),
        ("1.5", None),
        ("", None),
        ("GiB", None),
    ] {
        assert_eq!(size(text, MIB), bytes, "{text}");
    }
}

#[test]
fn settings_that_differ_from_the_defaults_are_told() {
    let text = "limit:8G,free:strict,expandable_segments:False,ipc:False,backend:native,verbose:1";
    assert_eq!(
        good(text).changed,
        ["limit:8G", "expandable_segments:False", "verbose:1"]
    );
}

/// A mistake that lifts a limit is told from one that does not, and both from what has no effect.
#[test]
fn mistakes_are_told_by_what_they_cost() {
    let [own, theirs, _] = VARIABLES;
    for (variable, text, severity) in [
        (own, "limit:much", Severity::LimitMistake),
        (own, "limit:", Severity::LimitMistake),
        (own, "limt:8G", Severity::LimitMistake),
        (own, "Limit:8G", Severity::LimitMistake),
        (own, "memory_limit:8G", Severity::LimitMistake),
        (own, "limit=8G", Severity::LimitMistake),
        (own, "limit:8G;free:strict", Severity::LimitMistake),
        (
            own,
            "per_process_memory_fraction:50%",
            Severity::LimitMistake,
        ),
        (
            theirs,
            "per_process_memory_fraction:2",
            Severity::LimitMistake,
        ),
        (
            theirs,
            "per_process_memory_fracton:0.5",
            Severity::LimitMistake,
        ),
        (own, "lmt:8G", Severity::LimitMistake),
        (own, "cap:8 GiB", Severity::LimitMistake),
        (own, "most:0.5", Severity::LimitMistake),
        (own, "most:50%", Severity::LimitMistake),
        (own, "something:true", Severity::Mistake),
        (own, "free:lazy", Severity::Mistake),
        (own, "expandable:True", Severity::Mistake),
        (own, "nonsense", Severity::Mistake),
        (own, "something_else_altogether:1", Severity::Mistake),
        // PyTorch names these itself, or knows them.
        (theirs, "something_else_altogether:1", Severity::Note),
        (theirs, "something_new:0.8", Severity::Note),
        (theirs, "something_new:8G", Severity::Note),
        (theirs, "expandable_segments:true", Severity::Note),
        (own, "backend:cudaMallocAsync", Severity::Note),
        (theirs, "max_split_size_mb:200", Severity::Note),
    ] {
        let (_, complaints) = read(&[(variable, text)]);
        assert_eq!(complaints.len(), 1, "{complaints:?}");
        assert_eq!(complaints[0].severity, severity, "{complaints:?}");
        assert_eq!(complaints[0].is_mistake(), severity != Severity::Note);
    }
}

#[test]
fn white_space_and_empty_pairs_do_not_matter() {
    let text =
        " free : relaxed ,, roundup_power2_divisions : [ 256:1 , 512:2, >:4 ] ,\tlimit:1 GiB,";
    let settings = good(text);
    assert_eq!(settings.free, Free::Relaxed);
    assert_eq!(settings.limit, Some(GIB));
    assert_eq!(settings.round_up.round_up(513 * MIB), 768 * MIB);
}

#[test]
fn the_first_variable_that_has_a_key_decides() {
    assert_eq!(
        VARIABLES,
        [
            "CONCERTINA_CONF",
            "PYTORCH_CUDA_ALLOC_CONF",
            "PYTORCH_ALLOC_CONF"
        ]
    );
    let (merged, complaints) = settings(&[
        ("CONCERTINA_CONF", "limit:1GiB"),
        (
            "PYTORCH_CUDA_ALLOC_CONF",
            "limit:2GiB,per_process_memory_fraction:0.5",
        ),
        (
            "PYTORCH_ALLOC_CONF",
            "per_process_memory_fraction:0.6,expandable_segments:False",
        ),
    ]);
    assert_eq!(complaints, [""; 0]);
    assert_eq!(merged.limit, Some(GIB));
    assert_eq!(merged.per_process_memory_fraction, 0.5);
    assert!(!merged.expandable_segments);

    // A mistake decides, too: what it meant is not to be guessed from elsewhere.
    let (merged, complaints) = settings(&[
        ("CONCERTINA_CONF", "limit:much"),
        ("PYTORCH_ALLOC_CONF", "limit:1GiB"),
    ]);
    assert_eq!((merged.limit, complaints.len()), (None, 1));

    assert_eq!(
        good("limit:1GiB,limit:2GiB").limit,
        Some(2 * GIB),
        "the last word counts"
    );
}

#[test]
fn a_mistake_is_named_with_what_is_allowed() {
    for (text, value, allowed) in [
        ("expandable_segments:true", "true", "True or False"),
        ("expandable_segments:1", "1", "True or False"),
        (
            "expandable_segments:",
            "expandable_segments:",
            "True or False",
        ),
        ("per_process_memory_fraction:1.1", "1.1", "0.0 to 1.0"),
        ("per_process_memory_fraction:-0.1", "-0.1", "0.0 to 1.0"),
        ("per_process_memory_fraction:nan", "nan", "0.0 to 1.0"),
        ("limit:0", "0", "8GiB"),
        ("limit:8GiBs", "8GiBs", "8GiB"),
        ("limit:8XB", "8XB", "8GiB"),
        ("limit:0GiB", "0GiB", "8GiB"),
        ("limit:.5GiB", ".5GiB", "8GiB"),
        ("limit:8.GiB", "8.GiB", "8GiB"),
        ("limit:1.2.3GiB", "1.2.3GiB", "8GiB"),
        ("limit:1e3MiB", "1e3MiB", "8GiB"),
        ("limit:GiB", "GiB", "8GiB"),
        ("limit:-1", "-1", "8GiB"),
        ("limit:1.5", "1.5", "8GiB"),
        ("limit:1.5B", "1.5B", "8GiB"),
        ("verbose:2", "2", "1 or 0"),
        ("limit:99999999999999999999", "9999", "8GiB"),
        ("limit:18446744073709551615TiB", "TiB", "8GiB"),
        ("free:lazy", "lazy", "strict or relaxed"),
        ("chunk_size_mb:3", "3", "steps of 2"),
        ("chunk_size_mb:18446744073709551614", "184", "steps of 2"),
        ("idle_release_ms:1.5", "1.5", "whole number of milliseconds"),
        ("idle_release_ms:-1", "-1", "whole number of milliseconds"),
        ("roundup_power2_divisions:3", "3", "[256:1,512:2,>:4]"),
        ("roundup_power2_divisions:0", "0", "[256:1,512:2,>:4]"),
        ("roundup_power2_divisions:[3:1]", "[3:1]", "power"),
        ("roundup_power2_divisions:[256:3]", "[256:3]", "power"),
        ("roundup_power2_divisions:[256]", "[256]", "power"),
        ("roundup_power2_divisions:[]", "[]", "power"),
        ("roundup_power2_divisions:[256:1", "[256:1", "power"),
        ("roundup_power2_divisions:256:1]", "256:1]", "power"),
        ("max_split_size_mb:19", "19", "20 or more"),
        ("pinned_num_register_threads:256", "256", "up to 128"),
        ("backend:other", "other", "native or cudaMallocAsync"),
    ] {
        let line = bad(text);
        let key = text.split(':').next().unwrap_or_default();
        assert!(line.contains(key) && line.contains(value), "{line}");
        assert!(line.contains(allowed) && line.contains("default"), "{line}");
    }
}

#[test]
fn an_unknown_key_is_named_with_the_ones_that_are_near() {
    for (text, near) in [
        ("limits:1GiB", "limit"),
        ("LIMIT:1GiB", "limit"),
        ("lmiit:1GiB", "limit"),
        ("mem_limit:1GiB", "limit"),
        ("expandable-segments:True", "expandable_segments"),
        ("max_split_size:128", "max_split_size_mb"),
        ("per_process_memory:0.5", "per_process_memory_fraction"),
        (
            "stats:/tmp/file",
            "stats_callers or stats_signal or stats_interval_s",
        ),
    ] {
        let line = bad(text);
        let end = format!("there is no such key; did you mean {near}?");
        assert!(line.ends_with(&end), "{line}");
    }
    let long = format!("{}:1", "limit".repeat(10_000));
    for text in ["[:1", "::", "something:1", &long] {
        let line = bad(text);
        assert!(
            line.contains("no such key") && line.contains("per_process_memory_fraction"),
            "{line}"
        );
    }
    for text in ["limit", "True", "]["] {
        assert!(bad(text).contains("key:value"));
    }
}

#[test]
fn a_complaint_stays_one_short_line_of_plain_text() {
    let line = bad("free:\u{1b}[2J\u{7f}\0");
    assert!(line.contains("\\u{1b}"), "{line}");
    let line = bad(&format!("free:{}", "x".repeat(100_000)));
    assert!(line.len() < 300, "{}", line.len());
}

#[test]
fn pytorchs_own_settings_are_accepted_and_named() {
    for key_and_default in [
        "garbage_collection_threshold:0",
        "garbage_collection_threshold:0.0",
        "max_non_split_rounding_mb:20",
        "large_segment_size_mb:20",
        "backend:native",
        "release_lock_on_cudamalloc:False",
        "throw_on_cudamalloc_oom:False",
        "graph_capture_record_stream_reuse:False",
        "pinned_use_cuda_host_register:False",
        "pinned_num_register_threads:1",
        "pinned_use_background_threads:False",
        "pinned_free_catch_all:False",
    ] {
        assert_eq!(good(key_and_default), Settings::default());
    }
    for other in [
        "garbage_collection_threshold:0.8",
        "max_split_size_mb:128",
        "max_non_split_rounding_mb:40",
        "large_segment_size_mb:40",
        "backend:cudaMallocAsync",
        "release_lock_on_cudamalloc:True",
        "pinned_use_cuda_host_register:True",
        "pinned_num_register_threads:8",
        "pinned_use_background_threads:True",
        "pinned_reserve_segment_size_mb:64",
    ] {
        let line = bad(other);
        assert!(line.contains(other) && line.contains("no effect"), "{line}");
    }
    // Pinned memory is PyTorch's business, in PyTorch's variables.
    let pinned = |variable| {
        let text =
            |asked: &str| (asked == variable).then(|| "pinned_use_cuda_host_register:True".into());
        Settings::from_lookup(text).1.len()
    };
    assert_eq!(
        [
            "CONCERTINA_CONF",
            "PYTORCH_CUDA_ALLOC_CONF",
            "PYTORCH_ALLOC_CONF"
        ]
        .map(pinned),
        [1, 0, 0]
    );
}

/// Rounded sizes by PyTorch's own words: 1200 with four divisions goes to 1280.
#[test]
fn sizes_are_rounded_as_pytorch_rounds_them() {
    let round = |divisions: &str| good(&format!("roundup_power2_divisions:{divisions}")).round_up;
    let four = round("4");
    assert_eq!(four.round_up(1200 << 10), 1280 << 10);
    assert_eq!(four.round_up(1280 << 10), 1280 << 10);
    assert_eq!(four.round_up((1280 << 10) + 1), 1536 << 10);
    assert_eq!(four.round_up((1792 << 10) + 1), 2048 << 10);
    assert_eq!(four.round_up(2048 << 10), 2048 << 10);
    // 512 times the divisions and below: left to the block's own rounding.
    assert_eq!(four.round_up(2048), 2048);
    assert_eq!(four.round_up(1999), 1999);
    assert_eq!(four.round_up(2049), 2560);
    // One division, and none, round nothing.
    for divisions in ["1", "[256:0,>:0]"] {
        assert_eq!(round(divisions).round_up(5 * MIB + 1), 5 * MIB + 1);
    }

    // The first size covers all below it, `>` all above the last; between, nothing is rounded.
    let listed = round("[4:2,16:4,>:8]");
    let odd = |mebibytes: usize| listed.round_up(mebibytes * MIB + 1);
    assert_eq!(odd(2), 3 * MIB);
    assert_eq!(odd(4), 6 * MIB, "4 to 8 MiB are the interval of 4");
    assert_eq!(odd(8), 8 * MIB + 1);
    assert_eq!(odd(16), 20 * MIB);
    assert_eq!(odd(32), 36 * MIB);
    assert_eq!(odd(1 << 20), (9 << 20) / 8 * MIB);

    assert_eq!(RoundUp::default().round_up(12345), 12345);
    for divisions in ["2", "1024", "9223372036854775808"] {
        for size in [0, 1, 511, 512, 513, usize::MAX, usize::MAX / 2 + 2] {
            let rounded = round(divisions).round_up(size);
            assert!(
                rounded >= size && (rounded == size || rounded % 512 == 0),
                "{divisions} {size}"
            );
        }
    }
}

#[test]
fn paths_are_expanded() {
    let expand = |pattern: &str, rank: &'static [(&str, &str)]| {
        stats_path::expand_with(pattern.as_bytes(), |name| {
            rank.iter()
                .find(|(variable, _)| *variable == name)
                .map(|(_, text)| text.to_string())
        })
    };
    let path = |pattern, rank| expand(pattern, rank).unwrap_or_else(|why| panic!("{}", why.line));
    let process = std::process::id();
    assert_eq!(
        path("out-%p-100%%.json", &[]),
        PathBuf::from(format!("out-{process}-100%.json"))
    );
    assert_eq!(path("%r", &[]), PathBuf::from("0"));
    assert_eq!(path("%r", &[("SLURM_PROCID", "7")]), PathBuf::from("7"));
    let all = &[
        ("RANK", "1"),
        ("OMPI_COMM_WORLD_RANK", "2"),
        ("SLURM_PROCID", "3"),
    ];
    assert_eq!(path("%r/%r", all), PathBuf::from("1/1"));
    assert_eq!(
        path("%r", &[("RANK", "../../etc"), ("SLURM_PROCID", "3")]),
        PathBuf::from("3")
    );
    let host = path("%h", &[]);
    assert!(
        !host.as_os_str().is_empty() && host.components().count() == 1,
        "{host:?}"
    );
    for pattern in ["%q", "out%", "", "%", "a\0b"] {
        let failure = expand(pattern, &[]).expect_err(pattern);
        assert_eq!(failure.errno, 22);
        assert!(
            !failure.line.chars().any(char::is_control),
            "{:?}",
            failure.line
        );
    }
    assert!(stats_path::names_process(b"a%p") && !stats_path::names_process(b"%%p%r"));
}

#[test]
fn table_of_settings_is_that_of_the_documentation() {
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/settings.md");
    let text = std::fs::read_to_string(text).expect("docs/settings.md");
    let mut parts = text.split("<!-- settings -->");
    let shown = parts
        .nth(1)
        .expect("a table between two <!-- settings --> markers");
    assert!(
        shown.trim() == markdown().trim(),
        "the table of docs/settings.md is stale; it should be:\n\n{}",
        markdown()
    );
}
