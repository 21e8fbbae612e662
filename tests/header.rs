//! The C header: as checked in, as generated, as C and as C++.

mod library;

use library::{Scratch, exports, output};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn header() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include/concertina.h")
}

fn text() -> String {
    fs::read_to_string(header()).expect("include/concertina.h")
}

/// The header without comments.
fn code() -> String {
    let text = text();
    let mut code = String::new();
    let mut rest = text.as_str();
    while let Some((before, comment)) = rest.split_once("/*") {
        code.push_str(before);
        rest = comment.split_once("*/").expect("a comment ends").1;
    }
    code.push_str(rest);
    code.lines()
        .map(|line| line.split("//").next().unwrap_or(line).to_owned() + "\n")
        .collect()
}

fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
}

#[test]
fn the_header_is_the_generated_one() {
    let generated = fs::read_to_string(env!("CONCERTINA_GENERATED_HEADER")).expect("generated");
    assert!(
        text() == generated,
        "include/concertina.h is stale: run scripts/header.sh"
    );
}

#[test]
fn the_header_declares_every_export_and_no_other_function() {
    let code = code();
    let mut declared: Vec<&str> = code
        .match_indices('(')
        .filter_map(|(at, _)| words(&code[..at]).last())
        .filter(|name| name.starts_with("concertina_"))
        .collect();
    declared.sort();
    let exported: Vec<_> = exports()
        .into_iter()
        .filter(|name| name.starts_with("concertina_"))
        .collect();
    assert_eq!(declared, exported);
}

#[test]
fn the_header_takes_no_names_but_ours() {
    const LANGUAGE: &[&str] = &[
        "char", "const", "double", "int", "long", "size_t", "struct", "unsigned", "void",
    ];
    let code = code();
    let declarations: String = code
        .lines()
        .filter(|line| !line.starts_with('#') && !line.contains("extern \"C\""))
        .collect::<Vec<_>>()
        .join("\n");
    // The names of parameters and members are nobody's: those before `,`, `)` and `;`.
    let mut taken: Vec<&str> = Vec::new();
    for (at, _) in declarations.match_indices(|c: char| c.is_alphabetic() || c == '_') {
        let starts = declarations[..at].chars().next_back();
        if starts.is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let word = words(&declarations[at..]).next().unwrap_or_default();
        let next = declarations[at + word.len()..].trim_start().chars().next();
        if matches!(next, Some(',' | ')' | ';')) && !declarations[..at].trim_end().ends_with('}') {
            continue;
        }
        taken.push(word);
    }
    for name in taken {
        // CUDA's own tag for a stream: declared, so that a handle can be passed, and not defined.
        let known = LANGUAGE.contains(&name) || name == "CUstream_st";
        assert!(known || name.starts_with("concertina_"), "{name}");
    }
    for line in code.lines().filter(|line| line.starts_with("#define")) {
        assert!(line.starts_with("#define CONCERTINA_"), "{line}");
    }
}

#[test]
fn every_function_is_documented() {
    let text = text();
    let lines: Vec<_> = text.lines().collect();
    let mut documented = 0;
    for (at, line) in lines.iter().enumerate() {
        let starts = line.contains(" concertina_") || line.contains("*concertina_");
        if starts && line.contains('(') && !line.starts_with([' ', '/']) {
            assert_eq!(lines[at - 1].trim(), "*/", "no comment above: {line}");
            documented += 1;
        }
    }
    assert_eq!(
        documented,
        exports()
            .iter()
            .filter(|name| name.starts_with("concertina_"))
            .count()
    );
}

#[test]
fn the_header_compiles_as_c_and_as_cpp() {
    let scratch = Scratch::new("header");
    for (compiler, standard, name) in [
        ("cc", "-std=c99", "c99.c"),
        ("cc", "-std=c11", "c11.c"),
        ("c++", "-std=c++11", "cpp11.cpp"),
        ("c++", "-std=c++17", "cpp17.cpp"),
    ] {
        let source = scratch.path().join(name);
        // Twice, for the guard; and used, for the types.
        let program = "#include \"concertina.h\"\n#include \"concertina.h\"\n\
             int main(void) { return concertina_stats_json(0, 0) == 0 || concertina_version() == 0; }\n";
        fs::write(&source, program).expect("the scratch directory is ours");
        output(
            Command::new(compiler)
                .args([standard, "-Wall", "-Wextra", "-pedantic", "-Werror", "-c"])
                .arg("-I")
                .arg(header().parent().expect("include"))
                .arg(&source)
                .arg("-o")
                .arg(source.with_extension("o")),
        );
    }
}
