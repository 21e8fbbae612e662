//! The scripts say what they are for.

use std::fs;
use std::path::Path;
use std::process::Command;

/// `--help` says it on standard output and does nothing else.
#[test]
fn help_is_printed_by_every_script() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts");
    let mut asked = 0;
    for entry in fs::read_dir(&directory).expect("a directory") {
        let script = entry.expect("an entry").path();
        let interpreter = match script.extension().and_then(|it| it.to_str()) {
            Some("sh") => "bash",
            Some("py") => "python3",
            _ => continue,
        };
        let mut command = Command::new(interpreter);
        // What builds or fetches would find no tool to do it with.
        let tools = "/usr/bin:/bin";
        if interpreter == "bash" && !script.ends_with("bench.sh") {
            command.env("PATH", tools).env_remove("HOME");
        }
        let output = command
            .arg(&script)
            .arg("--help")
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{script:?}: {output:?}");
        assert!(output.stderr.is_empty(), "{script:?}: {output:?}");
        assert!(
            said.len() > 40 && !said.starts_with('#'),
            "{script:?}: {said}"
        );
        asked += 1;
    }
    assert!(asked > 10, "{asked}");
}

/// An option that there is not is named, before anything is built, fetched or left anywhere.
#[test]
fn an_unknown_option_ends_every_shell_script() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts");
    for entry in fs::read_dir(&directory).expect("a directory") {
        let script = entry.expect("an entry").path();
        // What `bench.sh` starts knows its options, and wants the library built.
        if script.extension().is_none_or(|it| it != "sh") || script.ends_with("bench.sh") {
            continue;
        }
        let scratch = Path::new(env!("CARGO_TARGET_TMPDIR")).join("unknown-option");
        let _ = fs::remove_dir_all(&scratch);
        fs::create_dir_all(&scratch).expect("a directory");
        let output = Command::new("bash")
            .env("PATH", "/usr/bin:/bin")
            .env_remove("CONCERTINA_LIBRARY")
            .current_dir(&scratch)
            .arg(&script)
            .arg("--fast")
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{script:?}: {output:?}");
        assert!(
            said.contains("--fast") && said.lines().count() == 1,
            "{script:?}: {said}"
        );
        let left = fs::read_dir(&scratch).expect("a directory").count();
        assert_eq!(left, 0, "{script:?}");
    }
}
