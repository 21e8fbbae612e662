//! Statistics while the process runs: `stats_signal` and `stats_interval_s`.

use crate::harness::{MIB, allocated, c, exits, files, only, read, scratch};
use std::path::Path;
use std::process::Command;

/// The C program, with a setting that writes statistics while it runs.
fn triggered(case: &str, setting: &str, stats: &Path) -> Command {
    let mut command = c(case, stats);
    command.env("CONCERTINA_CONF", setting);
    command
}

#[test]
fn stats_signal_writes_statistics() {
    for case in ["signal", "signal once", "signal alone"] {
        scratch!(scratch, file);
        let program = triggered(case, "stats_signal:SIGUSR2", &file);
        assert_eq!(exits(program, 0), "", "{case}");
        assert_eq!(files(scratch.path()), ["stats.json", "stats.json.taken"]);
        assert_eq!(allocated(&file.with_extension("json.taken")), MIB);
        assert_eq!(allocated(&file), 2 * MIB);
    }
}

#[test]
fn stats_signal_until_the_exit_leaves_one_file() {
    for _ in 0..20 {
        scratch!(scratch, file);
        let program = triggered("signals and exit", "stats_signal:SIGUSR2", &file);
        assert_eq!(exits(program, 0), "");
        read(&only(&scratch, "stats.json"));
    }
}

#[test]
fn stats_interval_writes_statistics() {
    scratch!(scratch, file);
    assert_eq!(
        exits(triggered("interval", "stats_interval_s:1", &file), 0),
        ""
    );
    assert_eq!(allocated(&file.with_extension("json.taken")), MIB);
    assert_eq!(allocated(&file), 2 * MIB);
}

#[test]
fn stats_signal_and_interval_without_a_path_have_no_effect() {
    scratch!(scratch, file);
    let settings = "stats_signal:SIGUSR2,stats_interval_s:1";
    let mut program = triggered("exit", settings, &file);
    program.env_remove("CONCERTINA_STATS");
    let said = exits(program, 3);
    let line =
        "concertina: stats_signal, stats_interval_s has no effect without CONCERTINA_STATS\n";
    assert_eq!(said, line);
    assert_eq!(files(scratch.path()), [""; 0]);
}
