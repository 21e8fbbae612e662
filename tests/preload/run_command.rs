//! The command `concertina run`.

use crate::harness::{Case, Trial, served};
use crate::library::{library, output, standin};
use std::fs;
use std::path::Path;
use std::process::Command;

/// The command only sets the environment, and exits with the program's status.
#[test]
fn run_command_starts_a_program() {
    let case = Case::of("limit");
    let trial = Trial::new("command", &case);
    let stats = trial.scratch.path().join("stats.json");
    let concertina = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_concertina"));
        command
            .arg("run")
            .args(arguments)
            .env("LD_LIBRARY_PATH", standin());
        for name in ["CONCERTINA_CONF", "CONCERTINA_STATS", "LD_PRELOAD"] {
            command.env_remove(name);
        }
        command
    };
    let path = |path: &Path| path.to_str().expect("text").to_string();
    let (library, program) = (path(library()), path(&trial.program));
    let options = ["--library", &library, "--stats", &path(&stats)];
    let run = [
        &options[..],
        &["--limit", "64", "--relaxed", "--", &program],
    ]
    .concat();
    let said = output(&mut concertina(&run));
    assert!(said.contains("24 of 64 MiB\n"), "{said}");
    assert_eq!(served(&stats), 65);

    let mut shell = concertina(&["--library", &library, "sh", "-c"]);
    shell.arg("echo $LD_PRELOAD $CONCERTINA_CONF; exit 9");
    let other = "/lib/x86_64-linux-gnu/libc.so.6";
    let ended = shell
        .env("LD_PRELOAD", other)
        .env("CONCERTINA_CONF", "free:strict")
        .output()
        .expect("it runs");
    assert_eq!(ended.status.code(), Some(9));
    let said = String::from_utf8_lossy(&ended.stdout);
    assert_eq!(said, format!("{library}:{other} free:strict\n"));

    // The statistics' path holds for programs that change their directory.
    let directory = trial.scratch.path().join("5%p");
    fs::create_dir(&directory).expect("a directory");
    let absolute = path(&trial.scratch.path().join("stats.json"));
    for (given, expected) in [
        (
            "stats-%p.json",
            format!("{}/stats-%p.json", path(&trial.scratch.path().join("5%%p"))),
        ),
        (&absolute, absolute.clone()),
    ] {
        let options = ["--library", &library, "--stats", given, "sh", "-c"];
        let mut shell = concertina(&options);
        shell
            .arg("cd /; echo $CONCERTINA_STATS")
            .current_dir(&directory);
        assert_eq!(output(&mut shell), format!("{expected}\n"));
    }

    let no_library = trial.scratch.path().join("no-library.so");
    fs::write(&no_library, "no library\n").expect("a file");
    let no_library = path(&no_library);
    let other = path(
        &standin()
            .join("libcuda.so.1")
            .canonicalize()
            .expect("it is there"),
    );
    for (arguments, status, line) in [
        (
            &["--library", &library, "/no/such/program"][..],
            127,
            "run: /no/such/program: ",
        ),
        (&["--library", &library, "/"], 126, "run: /: "),
        (
            &["--library", "/no/such/file", "true"],
            2,
            "run: the library /no/such/file: ",
        ),
        (
            &["--library", &no_library, "true"],
            2,
            &format!("run: the library {no_library}: "),
        ),
        (
            &["--library", &other, "true"],
            2,
            &format!("run: the library {other}: it is not concertina's library"),
        ),
        (
            &["--stats", "no/such/directory/stats.json", "true"],
            2,
            "run: --stats: statistics cannot be written to \"no/such/directory/stats.json\": No such file",
        ),
        (
            &["--stats", "/dev/null/stats.json", "true"],
            2,
            "run: --stats: statistics cannot be written to \"/dev/null/stats.json\": Not a directory",
        ),
        (
            &["--stats", "100%", "true"],
            2,
            "run: --stats: statistics path \"100%\": it ends in a single %",
        ),
        (
            &["--stats", "", "true"],
            2,
            "run: --stats: statistics path \"\": it names no file",
        ),
        (
            &["--limit", "8Q", "true"],
            2,
            "run: --limit 8Q: allowed is 1 to 67108864 MiB, or 8GiB, ",
        ),
        (
            &["--limit", "0", "true"],
            2,
            "run: --limit 0: allowed is 1 to ",
        ),
        (
            &["--fast", "true"],
            2,
            "run: invalid option '--fast'; allowed are --library, ",
        ),
        (&[], 2, "run: no command is given; one is needed"),
    ] {
        let output = concertina(arguments).output().expect("it runs");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{errors}");
        assert!(
            errors.starts_with(&format!("concertina: {line}")),
            "{errors}"
        );
        assert_eq!(errors.lines().count(), 1, "{errors}");
    }
}

/// A mistake in a setting is said, and the program is not started.
#[test]
fn run_command_refuses_wrong_settings() {
    let start = |variable: &str, value: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_concertina"));
        for name in [
            "CONCERTINA_CONF",
            "CONCERTINA_STATS",
            "PYTORCH_CUDA_ALLOC_CONF",
        ] {
            command.env_remove(name);
        }
        command.args(["run", "--library"]).arg(library());
        command.args(["echo", "started"]).env(variable, value);
        let output = command.output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        (
            output.status.code(),
            said,
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    for (variable, value) in [
        ("CONCERTINA_CONF", "limit:8Q"),
        ("CONCERTINA_CONF", "limt:8G"),
        ("CONCERTINA_CONF", "free:lazy"),
        ("CONCERTINA_CONF", "nonsense"),
        ("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:2"),
        ("CONCERTINA_STATS", "/no/such/directory/stats.json"),
    ] {
        let (status, said, errors) = start(variable, value);
        assert_eq!(
            (status, said.as_str()),
            (Some(2), ""),
            "{variable}={value}: {errors}"
        );
        assert_eq!(errors.lines().count(), 1, "{errors}");
        assert!(
            errors.starts_with(&format!("concertina: run: {variable}: ")),
            "{errors}"
        );
    }
    for (variable, value) in [
        ("CONCERTINA_CONF", "limit:8.5g,verbose:1"),
        // A newer PyTorch may know it.
        ("PYTORCH_CUDA_ALLOC_CONF", "of_a_newer_release:True"),
    ] {
        let (status, said, errors) = start(variable, value);
        assert_eq!((status, said.as_str()), (Some(0), "started\n"), "{errors}");
        assert_eq!(errors, "");
    }
}

/// One line, from processes that use the GPU only.
#[test]
fn verbose_says_that_the_library_is_on() {
    let case = Case::of("runtime_symbols");
    let trial = Trial::new("verbose", &case);
    let program = trial.program.to_str().expect("text");
    let mut command = Command::new(env!("CARGO_BIN_EXE_concertina"));
    command
        .args(["run", "--verbose", "--limit", "1.5G", "--library"])
        .arg(library());
    command
        .args(["sh", "-c"])
        .arg(format!("{program} >/dev/null; true"));
    command
        .env_remove("CONCERTINA_CONF")
        .env_remove("CONCERTINA_STATS");
    command
        .env("LD_LIBRARY_PATH", standin())
        .env("STANDIN_DEVICES", "2");
    let output = command.output().expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    let said: Vec<_> = errors
        .lines()
        .filter(|line| line.starts_with("concertina: "))
        .collect();
    let start = format!(
        "concertina: {} is on, under LD_PRELOAD; devices: 0 ",
        env!("CARGO_PKG_VERSION")
    );
    assert_eq!(said.len(), 1, "{errors}");
    assert!(
        said[0].starts_with(&start) && said[0].contains(", 1 "),
        "{errors}"
    );
    let end = "; limit: 1.500 GiB on each device; settings: verbose:1,limit:1610612736";
    assert!(said[0].ends_with(end), "{errors}");
}
