//! The layers of the engine: which folder may import from which, and that no files import each other in a
//! circle.
//!
//! It reads the source: every path that begins with `crate::`, wherever it stands, apart from unit tests. For
//! circles it also reads paths that begin with `super::`, and follows re-exports to the file of the name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// What each folder (or file) of `src/engine` may import from, besides itself.
const LAYERS: &[(&str, &[&str])] = &[
    ("util", &[]),
    ("core", &["util"]),
    ("settings", &["core", "util"]),
    ("device", &["core", "driver", "settings", "util"]),
    ("ipc", &["core", "device", "driver", "settings", "util"]),
    (
        "process",
        &["core", "device", "driver", "ipc", "settings", "util"],
    ),
];

/// The folders whose files may not import each other in a circle.
const ACYCLIC: &[&str] = &["util", "core", "device", "ipc", "process"];

/// Files that circles may go through: `device/mod.rs` has `Device` and `State`, of which the files beside it implement
/// functions, and whose fields have those files' types.
const HUBS: &[&str] = &["device/mod.rs"];

/// What files of `src/entry` that `torch` and `preload` share may import from there.
const SHARED_BY_ENTRIES: &[(&str, &[&str])] =
    &[("panic_guard.rs", &[]), ("python.rs", &["panic_guard"])];

/// Imports against the rules that are known: a file and the path that it imports. To be emptied.
const EXCEPTIONS: &[(&str, &str)] = &[];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// All Rust files under a folder, with their paths from there.
fn files(folder: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|it| it == "rs") {
                let name = path.strip_prefix(folder).expect("below the folder");
                let text = fs::read_to_string(&path).expect("text");
                found.insert(name.to_string_lossy().into_owned(), code(&text));
            }
        }
    }
    assert!(!found.is_empty(), "{folder:?} has no source");
    found
}

/// The source without comments and without the unit tests at its end.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text);
    let lines = text.lines().map(|line| match line.find("//") {
        Some(at) => &line[..at],
        None => line,
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// The paths that begin with `start`, such as `crate::`, without it. `crate::a::{b, c::d}` is `a::b` and
/// `a::c::d`.
fn paths(code: &str, start: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices(start) {
        let before = code[..at].chars().next_back();
        if !before.is_some_and(|it| it.is_alphanumeric() || it == '_' || it == ':' || it == '$') {
            expand(&code[at + start.len()..], "", &mut found);
        }
    }
    found
}

/// Adds the paths at the start of `code`, each behind `prefix`. Returns what follows them.
fn expand<'a>(code: &'a str, prefix: &str, found: &mut BTreeSet<String>) -> &'a str {
    let code = code.trim_start();
    if let Some(mut list) = code.strip_prefix('{') {
        loop {
            list = expand(list, prefix, found).trim_start();
            if let Some(name) = list.strip_prefix("as ") {
                let is_name = |c: char| c.is_alphanumeric() || c == '_';
                list = name.trim_start().trim_start_matches(is_name).trim_start();
            }
            match list.strip_prefix(',') {
                Some(rest) => list = rest,
                None => return list.strip_prefix('}').unwrap_or(list),
            }
        }
    }
    let end = code.find(|c: char| !(c.is_alphanumeric() || c == '_'));
    let (name, rest) = code.split_at(end.unwrap_or(code.len()));
    let path = match (prefix, name) {
        ("", _) => name.to_string(),
        (_, "" | "self") => prefix.to_string(),
        _ => format!("{prefix}::{name}"),
    };
    match rest.strip_prefix("::") {
        Some(rest) if !name.is_empty() => expand(rest, &path, found),
        _ => {
            found.insert(path);
            rest
        }
    }
}

/// The file that a path leads to, or into: the longest part of it that is a module. A name that a module re-exports
/// leads to where it comes from.
fn file_of(
    path: &str,
    files: &BTreeMap<String, String>,
    exports: &BTreeMap<String, String>,
) -> Option<String> {
    let parts: Vec<&str> = path.split("::").collect();
    let exported = (1..=parts.len())
        .rev()
        .find_map(|count| exports.get(&parts[..count].join("::")));
    if let Some(origin) = exported.filter(|it| *it != path) {
        return file_of(origin, files, exports);
    }
    (1..=parts.len()).rev().find_map(|count| {
        let module = parts[..count].join("/");
        let names = [format!("{module}.rs"), format!("{module}/mod.rs")];
        names.into_iter().find(|name| files.contains_key(name))
    })
}

/// The paths in `code` behind `start`, such as `use `, that name a child of the module `folder`, or a path from
/// `crate::`.
fn paths_of_module(code: &str, start: &str, folder: &str) -> BTreeSet<String> {
    let all = paths(code, start).into_iter();
    all.map(|path| match path.strip_prefix("crate::") {
        Some(path) => path.to_string(),
        None => format!("{folder}::{path}"),
    })
    .collect()
}

/// The names that modules re-export (`pub use child::Name;`), with the paths that they come from.
fn re_exports(files: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for (name, code) in files {
        let Some(folder) = name.strip_suffix("/mod.rs") else {
            continue;
        };
        let folder = folder.replace('/', "::");
        for start in ["pub use ", "pub(crate) use "] {
            for path in paths_of_module(code, start, &folder) {
                let last = path.rsplit("::").next().expect("a name");
                found.insert(format!("{folder}::{last}"), path.clone());
            }
        }
    }
    found
}

/// The files that each file imports from.
fn imports(files: &BTreeMap<String, String>) -> BTreeMap<String, BTreeSet<String>> {
    let exports = re_exports(files);
    let of_file = |(name, code): (&String, &String)| {
        let module = name.trim_end_matches(".rs").trim_end_matches("/mod");
        let mut all = paths(code, "crate::");
        if let Some((parent, _)) = module.rsplit_once('/') {
            let parent = parent.replace('/', "::");
            let above = paths(code, "super::").into_iter();
            all.extend(above.map(|path| format!("{parent}::{path}")));
        }
        if name.ends_with("/mod.rs") {
            let uses = code.replace("pub use ", "").replace("pub(crate) use ", "");
            all.extend(paths_of_module(&uses, "use ", &module.replace('/', "::")));
        }
        let found = all.iter().filter_map(|it| file_of(it, files, &exports));
        (name.clone(), found.filter(|it| it != name).collect())
    };
    files.iter().map(of_file).collect()
}

/// The first circle of imports that a file is part of.
fn circle(name: &str, imports: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    let mut seen = BTreeSet::new();
    let mut ways = vec![vec![name.to_string()]];
    while let Some(way) = ways.pop() {
        let all = imports.get(way.last()?).into_iter().flatten().cloned();
        for next in all.filter(|it| !HUBS.contains(&it.as_str())) {
            let longer: Vec<_> = way.iter().cloned().chain([next.clone()]).collect();
            if next == name {
                return Some(longer);
            }
            if seen.insert(next) {
                ways.push(longer);
            }
        }
    }
    None
}

#[test]
fn folders_of_the_engine_import_only_from_layers_below() {
    let files = files(&root().join("engine"));
    let mut wrong = Vec::new();
    for (name, code) in files.iter().filter(|(name, _)| *name != "lib.rs") {
        let layer = name.split(['/', '.']).next().expect("a folder");
        let rule = LAYERS.iter().find(|(it, _)| *it == layer);
        let (_, below) = rule.unwrap_or_else(|| panic!("{layer} has no rule here"));
        for path in paths(code, "crate::") {
            let from = path.split("::").next().expect("a name");
            let known = EXCEPTIONS.contains(&(name, &path));
            if from != layer && !below.contains(&from) && !known {
                wrong.push(format!("{name}: crate::{path}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn files_of_the_engine_import_each_other_in_no_circle() {
    let files = files(&root().join("engine"));
    let inside = |name: &str| ACYCLIC.iter().any(|it| name.starts_with(&format!("{it}/")));
    let files = files.into_iter().filter(|(name, _)| inside(name)).collect();
    let imports = imports(&files);
    let circles: Vec<_> = imports
        .keys()
        .filter(|name| !HUBS.contains(&name.as_str()))
        .filter_map(|name| circle(name, &imports))
        .map(|names| names.join(" → "))
        .collect();
    assert!(circles.is_empty(), "{circles:#?}");
}

#[test]
fn what_torch_and_preload_share_imports_neither() {
    let files = files(&root().join("entry"));
    for (name, allowed) in SHARED_BY_ENTRIES {
        let code = &files[*name];
        let mut all = paths(code, "super::");
        all.extend(paths(code, "crate::entry::"));
        let wrong = all.iter().filter(|path| {
            let from = path.split("::").next().unwrap_or_default();
            !allowed.contains(&from)
        });
        assert_eq!(wrong.collect::<Vec<_>>(), [""; 0], "{name}");
    }
}

/// PyTorch's side may ask whether the library was preloaded; a preloaded program may have no PyTorch.
#[test]
fn preload_imports_nothing_of_torch() {
    let files = files(&root().join("entry/preload"));
    for (name, code) in &files {
        let all = paths(code, "crate::entry::");
        assert!(!all.iter().any(|it| it.starts_with("torch")), "{name}");
    }
}

#[test]
fn the_reader_of_imports_sees_them_all() {
    let code = code(
        "use crate::a::{self, B, c::{D, E as F}, g};\n// crate::no::no\nfn f() { crate::h::i(); $crate::j }\n",
    );
    let expected = ["a", "a::B", "a::c::D", "a::c::E", "a::g", "h::i"];
    assert_eq!(
        paths(&code, "crate::").iter().collect::<Vec<_>>(),
        expected.iter().collect::<Vec<_>>()
    );
    for back in ["use crate::x::Y;", "use super::Y;", "use super::{y::Y};"] {
        let files = BTreeMap::from([
            ("x/mod.rs".into(), "mod y;\npub use y::Y;".into()),
            ("x/y.rs".into(), "use crate::x::z::Z;".into()),
            ("x/z.rs".into(), back.into()),
        ]);
        let imports = imports(&files);
        assert!(circle("x/y.rs", &imports).is_some());
        assert!(circle("x/mod.rs", &imports).is_none());
    }
    let files = BTreeMap::from([
        (
            "x/mod.rs".into(),
            "mod y;\nuse y::Y;\npub struct X(Y);".into(),
        ),
        ("x/y.rs".into(), "use crate::x::X;".into()),
    ]);
    assert!(circle("x/y.rs", &imports(&files)).is_some());
}
