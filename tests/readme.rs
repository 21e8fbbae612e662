//! What the README says twice, or says is there.

mod library;

use concertina_engine::runtime::stats;
use library::exports;
use std::fs;
use std::path::Path;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn read(name: &str) -> String {
    fs::read_to_string(Path::new(ROOT).join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn it_shows_the_statistics_fields() {
    let readme = read("README.md");
    let shown = readme
        .split("<!-- stats -->")
        .nth(1)
        .expect("a table between two <!-- stats --> markers");
    assert!(
        shown.trim() == stats::markdown().trim(),
        "the README's table of statistics fields is stale; it should be:\n\n{}",
        stats::markdown()
    );
}

#[test]
fn the_version_is_the_same_everywhere() {
    let version = env!("CARGO_PKG_VERSION");
    let schema = stats::SCHEMA_VERSION;
    let example = format!("\"schema_version\": {schema}, \"version\": \"{version}\"");
    assert!(read("README.md").contains(&example), "{example}");
    let heading = format!("\n## [{version}] - ");
    assert!(read("CHANGELOG.md").contains(&heading), "{heading}");
}

/// The words of `text` that name something in this repository.
fn paths(text: &str) -> Vec<&str> {
    let part = |c: char| c.is_ascii_alphanumeric() || "_-./*".contains(c);
    text.split(|c: char| !part(c))
        .map(|word| word.trim_end_matches(['.', '/']))
        .filter(|word| {
            ["scripts/", "tests/", "src/", "include/", "LICENSE-"]
                .iter()
                .any(|start| word.starts_with(start))
                || word.ends_with(".md")
        })
        .collect()
}

#[test]
fn what_it_names_is_there() {
    let readme = read("README.md");
    let named = paths(&readme);
    for command in ["scripts/quickstart.sh", "scripts/test.sh"] {
        assert!(named.contains(&command), "{command} is not in the README");
    }
    for name in named {
        // A pattern of the shell's stands for its directory.
        let name = name
            .rsplit_once("/*")
            .map_or(name, |(directory, _)| directory);
        assert!(Path::new(ROOT).join(name).exists(), "{name} is not there");
    }
}

#[test]
fn the_functions_it_names_are_exported() {
    let readme = read("README.md");
    let named: Vec<_> = readme
        .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .filter(|word| word.starts_with("concertina_"))
        .collect();
    assert!(named.contains(&"concertina_malloc"));
    for name in named {
        assert!(exports().contains(&name), "{name}");
    }
}
