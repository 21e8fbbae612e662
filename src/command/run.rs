//! `concertina run`: starts a program with the library preloaded, and has every Python that it is, or
//! starts, attach concertina to PyTorch.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command, ExitCode};

/// The library's file name.
const LIBRARY: &str = "libconcertina.so";

/// The file that Python runs at its start, in the Python module's directory.
const STARTUP: &str = "startup/sitecustomize.py";

/// What to run, and how.
#[derive(Default)]
pub struct Options {
    pub library: Option<PathBuf>,
    /// `CONCERTINA_STATS` of the program.
    pub stats: Option<OsString>,
    /// What `CONCERTINA_CONF` is to say besides what it says already.
    pub settings: Vec<String>,
    /// The program and its arguments.
    pub command: Vec<OsString>,
}

/// Becomes the program. Returns only where that is not possible: one line that says why, and the
/// status that a shell would leave with.
pub fn run(options: &Options) -> (String, ExitCode) {
    let library = match library(options.library.as_deref()) {
        Ok(library) => library,
        Err(why) => return (why, ExitCode::from(125)),
    };
    let mut command = Command::new(&options.command[0]);
    command.args(&options.command[1..]);
    command.env("LD_PRELOAD", joined(&library, "LD_PRELOAD"));
    command.env("CONCERTINA_LIBRARY", &library);
    // The program will have the number of this process.
    command.env("CONCERTINA_RUN", process::id().to_string());
    // Without it a program that uses PyTorch on the GPU says so itself.
    if let Some(startup) = startup(&library) {
        command.env("PYTHONPATH", joined(&startup, "PYTHONPATH"));
    }
    if let Some(stats) = &options.stats {
        command.env("CONCERTINA_STATS", absolute(stats));
    }
    if !options.settings.is_empty() {
        // Of two words about one setting the last counts.
        let settings = OsString::from(options.settings.join(","));
        let settings = match env::var_os("CONCERTINA_CONF").filter(|it| !it.is_empty()) {
            Some(mut before) => {
                before.push(",");
                before.push(settings);
                before
            }
            None => settings,
        };
        command.env("CONCERTINA_CONF", settings);
    }
    let error = command.exec();
    let status = match error.kind() {
        io::ErrorKind::NotFound => 127,
        _ => 126,
    };
    let program = options.command[0].to_string_lossy();
    (format!("run: {program}: {error}"), ExitCode::from(status))
}

/// A path of statistics from here on, wherever the programs go from here.
fn absolute(stats: &OsStr) -> OsString {
    match env::current_dir() {
        Ok(directory) if Path::new(stats).is_relative() && !stats.is_empty() => {
            // A per cent sign stands for something else.
            let directory = directory.into_os_string().into_vec();
            let mut path = Vec::with_capacity(directory.len());
            for byte in directory {
                path.push(byte);
                if byte == b'%' {
                    path.push(byte);
                }
            }
            path.push(b'/');
            path.extend(stats.as_bytes());
            OsString::from_vec(path)
        }
        _ => stats.into(),
    }
}

/// `first`, and behind it, after a colon, what the variable holds.
fn joined(first: &Path, variable: &str) -> OsString {
    let mut joined = first.as_os_str().to_os_string();
    if let Some(rest) = env::var_os(variable).filter(|rest| !rest.is_empty()) {
        joined.push(":");
        joined.push(rest);
    }
    joined
}

/// The library: the one that is named, by the option or in `CONCERTINA_LIBRARY`, or one that lies
/// beside this command, in the `lib` beside its directory, or where pip puts it with the command.
fn library(named: Option<&Path>) -> Result<PathBuf, String> {
    let named = named.map(Path::to_path_buf).or_else(|| {
        let variable = env::var_os("CONCERTINA_LIBRARY").filter(|path| !path.is_empty());
        variable.map(PathBuf::from)
    });
    let found = match named {
        Some(named) => named
            .canonicalize()
            .map_err(|error| format!("run: {}: {error}", named.display()))?,
        None => beside_command().ok_or_else(|| {
            format!("run: no {LIBRARY} beside this command; --library FILE names one")
        })?,
    };
    if found
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|byte| b": ".contains(byte))
    {
        return Err(format!(
            "run: {}: the dynamic linker takes no path with a space or a colon in it",
            found.display()
        ));
    }
    Ok(found)
}

fn beside_command() -> Option<PathBuf> {
    let directory = own_directory()?;
    let places = [
        directory.join(LIBRARY),
        directory.join("../lib").join(LIBRARY),
    ];
    let modules = modules(&directory).map(|module| module.join(LIBRARY));
    let mut places = places.into_iter().chain(modules);
    places.find_map(|place| place.canonicalize().ok())
}

/// The directory that Python is to look into at its start: in the Python module that the library lies
/// in, or one that came with this command, or that of this source tree.
fn startup(library: &Path) -> Option<PathBuf> {
    let command = own_directory()?;
    let beside = library.parent().map(Path::to_path_buf);
    let source = command.join("../../scripts/concertina");
    let modules = beside.into_iter().chain(modules(&command)).chain([source]);
    let mut files = modules.filter_map(|module| module.join(STARTUP).canonicalize().ok());
    let startup = files.next()?.parent()?.to_path_buf();
    // A colon parts one path from the next.
    let fits = !startup.as_os_str().as_bytes().contains(&b':');
    fits.then_some(startup)
}

fn own_directory() -> Option<PathBuf> {
    Some(env::current_exe().ok()?.parent()?.to_path_buf())
}

/// Where the Python module may lie when pip has installed this command in `directory`.
fn modules(directory: &Path) -> impl Iterator<Item = PathBuf> {
    // `lib64` is Fedora's, `dist-packages` Debian's.
    let libraries = ["../lib", "../lib64"].map(|library| directory.join(library));
    let versions = libraries.into_iter().flat_map(fs::read_dir);
    let pythons = versions
        .flat_map(|version| version.flatten())
        .filter(|version| version.file_name().as_bytes().starts_with(b"python"));
    pythons.flat_map(|python| {
        ["site-packages", "dist-packages"]
            .map(|packages| python.path().join(packages).join("concertina"))
    })
}
