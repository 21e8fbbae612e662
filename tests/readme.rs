//! The documentation: what README.md, CONTRIBUTING.md and docs/ say twice, or say is there.

mod library;

use concertina_engine::process::stats;
use library::exports;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// What fits on a page or two.
const README_LINES: usize = 150;
const GLOSSARY_LINES: usize = 40;

fn read(name: &str) -> String {
    fs::read_to_string(Path::new(ROOT).join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Every document for people who use or change the library, by its path from the root.
fn documents() -> Vec<(PathBuf, String)> {
    let docs = fs::read_dir(Path::new(ROOT).join("docs")).expect("docs");
    let names = docs.map(|entry| Path::new("docs").join(entry.expect("an entry").file_name()));
    let mut names: Vec<_> = names
        .filter(|name| name.extension().is_some_and(|it| it == "md"))
        .chain(["README.md", "CONTRIBUTING.md"].map(PathBuf::from))
        .collect();
    names.sort();
    assert!(names.len() > 10, "{names:?}");
    let text = |name: &PathBuf| read(name.to_str().expect("a path of text"));
    names
        .into_iter()
        .map(|name| (name.clone(), text(&name)))
        .collect()
}

#[test]
fn statistics_fields_are_those_of_the_documentation() {
    let text = read("docs/statistics.md");
    let shown = text
        .split("<!-- stats -->")
        .nth(1)
        .expect("a table between two <!-- stats --> markers");
    assert!(
        shown.trim() == stats::markdown().trim(),
        "the table of docs/statistics.md is stale; it should be:\n\n{}",
        stats::markdown()
    );
}

#[test]
fn version_is_the_same_everywhere() {
    let version = env!("CARGO_PKG_VERSION");
    let schema = stats::SCHEMA_VERSION;
    let example = format!("\"schema_version\": {schema}, \"version\": \"{version}\"");
    assert!(read("docs/statistics.md").contains(&example), "{example}");
    let heading = format!("\n## [{version}] - ");
    assert!(read("CHANGELOG.md").contains(&heading), "{heading}");
    let line = format!("concertina: {version} is on");
    assert!(read("README.md").contains(&line), "{line}");
}

/// The words of `text` that name something in this repository.
fn paths(text: &str) -> Vec<&str> {
    let part = |c: char| c.is_ascii_alphanumeric() || "_-./*".contains(c);
    text.split(|c: char| !part(c))
        .map(|word| word.trim_start_matches("../").trim_end_matches(['.', '/']))
        .filter(|word| {
            ["scripts/", "tests/", "src/", "include/", "LICENSE-"]
                .iter()
                .any(|start| word.starts_with(start))
        })
        .collect()
}

/// Whether there is such a file, or one that a pattern with one `*` in its last part matches.
fn is_there(name: &str) -> bool {
    let path = Path::new(ROOT).join(name);
    let Some((before, after)) = name.rsplit('/').next().and_then(|it| it.split_once('*')) else {
        return path.exists();
    };
    let files = path
        .parent()
        .and_then(|directory| fs::read_dir(directory).ok());
    files.into_iter().flatten().flatten().any(|file| {
        let file = file.file_name();
        let file = file.to_string_lossy();
        file.starts_with(before) && file[before.len()..].ends_with(after)
    })
}

#[test]
fn paths_that_are_named_are_there() {
    for (document, text) in documents() {
        for name in paths(&text) {
            assert!(
                is_there(name),
                "{}: {name} is not there",
                document.display()
            );
        }
    }
    let readme = read("README.md");
    for command in ["scripts/quickstart.sh", "scripts/test.sh"] {
        assert!(
            paths(&readme).contains(&command),
            "{command} is not in the README"
        );
    }
}

/// What GitHub makes of the headings of a document, to link to.
fn anchors(text: &str) -> Vec<String> {
    let mut is_code = false;
    let mut anchors = Vec::new();
    for line in text.lines() {
        is_code ^= line.trim_start().starts_with("```");
        let heading = line.trim_start_matches('#');
        if is_code || heading.len() == line.len() {
            continue;
        }
        let kept = |c: &char| c.is_alphanumeric() || " -_".contains(*c);
        let anchor = heading.trim().chars().filter(kept).collect::<String>();
        anchors.push(anchor.to_lowercase().replace(' ', "-"));
    }
    anchors
}

/// Where the links of a document lead to.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1);
    let targets = targets.filter_map(|rest| rest.split_once(')'));
    targets
        .map(|(target, _)| target)
        .filter(|target| !target.contains("://"))
}

#[test]
fn links_lead_somewhere() {
    let mut checked = 0;
    let mut known: HashMap<PathBuf, Vec<String>> = HashMap::new();
    for (document, text) in documents() {
        for target in links(&text) {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let from = Path::new(ROOT).join(&document);
            let path = match file {
                "" => from,
                _ => from.parent().expect("a directory").join(file),
            };
            assert!(path.exists(), "{}: {target}", document.display());
            if !anchor.is_empty() {
                let there = known
                    .entry(path.clone())
                    .or_insert_with(|| anchors(&fs::read_to_string(&path).expect("text")));
                let found = there.iter().any(|it| it == anchor);
                assert!(
                    found,
                    "{}: {target}; there are {there:?}",
                    document.display()
                );
            }
            checked += 1;
        }
    }
    assert!(checked > 50, "{checked} links");
}

#[test]
fn documents_are_linked_from_the_readme() {
    let readme = read("README.md");
    let linked: Vec<_> = links(&readme).collect();
    for (document, _) in documents() {
        let name = document.to_str().expect("a path of text");
        assert!(name == "README.md" || linked.contains(&name), "{name}");
    }
}

#[test]
fn length_of_the_readme_and_of_the_glossary_is_bounded() {
    let lines = read("README.md").lines().count();
    assert!(lines <= README_LINES, "the README has {lines} lines");
    let text = read("docs/how-it-works.md");
    let (_, glossary) = text.split_once("\n## Glossary\n").expect("a glossary");
    let lines = glossary.lines().count();
    assert!(lines <= GLOSSARY_LINES, "the glossary has {lines} lines");
}

#[test]
fn functions_that_are_named_are_exported() {
    let documents = documents();
    let named: Vec<_> = documents
        .iter()
        .flat_map(|(_, text)| text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')))
        .filter(|word| word.starts_with("concertina_"))
        .collect();
    assert!(named.contains(&"concertina_malloc"));
    for name in named {
        assert!(exports().contains(&name), "{name}");
    }
}
