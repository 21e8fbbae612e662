//! `concertina run`: starts a program with the library preloaded. If it is Python, or starts Python,
//! concertina is attached to PyTorch there.

use concertina_engine::process::stats_output;
use concertina_engine::process::stats_path;
use concertina_engine::settings::{DISABLE, Diagnostic, Settings, VARIABLES};
use std::env;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command, ExitCode};

/// The library's file name.
const LIBRARY: &str = "libconcertina.so";

/// The file in the Python module's directory that Python runs at its start.
const STARTUP: &str = "startup/sitecustomize.py";

/// What to run, and how.
#[derive(Default)]
pub struct Options {
    pub library: Option<PathBuf>,
    /// `CONCERTINA_STATS` of the program.
    pub stats: Option<OsString>,
    /// Settings to add to `CONCERTINA_CONF`.
    pub settings: Vec<String>,
    /// The program and its arguments.
    pub command: Vec<OsString>,
}

/// The exit status for a mistake of the user's.
const MISTAKE: u8 = 2;

/// Replaces this process by the program. Returns only if that fails: one line that says why, and the exit
/// status that a shell would use.
pub fn run(options: &Options) -> (String, ExitCode) {
    let library = match library(options.library.as_deref()) {
        Ok(library) => library,
        Err((why, status)) => return (why, ExitCode::from(status)),
    };
    let stats = options.stats.as_deref();
    let settings = settings(options);
    let disabled = env::var_os(DISABLE);
    let mistake = wrong_settings(settings.as_deref()).or_else(|| wrong_stats(stats));
    let no_library = || Some(format!("the library {}", wrong_library(&library)?));
    if let Some(why) = mistake.or_else(no_library) {
        return (format!("run: {why}"), ExitCode::from(MISTAKE));
    }
    let mut command = Command::new(&options.command[0]);
    command.args(&options.command[1..]);
    command.env("LD_PRELOAD", joined(&library, "LD_PRELOAD"));
    command.env("CONCERTINA_LIBRARY", &library);
    match disabled {
        Some(disabled) => command.env(DISABLE, disabled),
        None => command.env_remove(DISABLE),
    };
    // The program keeps the id of this process.
    command.env("CONCERTINA_RUN", process::id().to_string());
    // Without it, the library prints a warning in a program that uses PyTorch on the GPU.
    if let Some(startup) = startup(&library) {
        command.env("PYTHONPATH", joined(&startup, "PYTHONPATH"));
    }
    if let Some(stats) = stats {
        // Absolute, so that programs that it starts in other directories write to the same path.
        let path = stats_path::absolute(stats.as_bytes().to_vec());
        command.env(stats_output::VARIABLE, OsString::from_vec(path));
    }
    if let Some(settings) = settings {
        command.env(VARIABLES[0], settings);
    }
    let error = command.exec();
    let status = match error.kind() {
        io::ErrorKind::NotFound => 127,
        _ => 126,
    };
    let program = options.command[0].to_string_lossy();
    (format!("run: {program}: {error}"), ExitCode::from(status))
}

/// The value of `CONCERTINA_CONF` for the program, if it needs one.
fn settings(options: &Options) -> Option<OsString> {
    let before = env::var_os(VARIABLES[0]).filter(|before| !before.is_empty());
    let more = OsString::from(options.settings.join(","));
    match (before, more.is_empty()) {
        (before, true) => before,
        (None, false) => Some(more),
        (Some(mut before), false) => {
            // Of two values of one key the last counts.
            before.push(",");
            before.push(more);
            Some(before)
        }
    }
}

/// The first mistake in the settings that the program would get.
fn wrong_settings(own: Option<&OsStr>) -> Option<String> {
    let (_, diagnostics) = Settings::from_lookup(|variable| {
        let text = match variable == VARIABLES[0] {
            true => own.map(OsStr::to_os_string),
            false => env::var_os(variable),
        };
        Some(text?.to_string_lossy().into_owned())
    });
    let mistake = diagnostics.into_iter().find(Diagnostic::is_mistake);
    mistake.map(|diagnostic| diagnostic.line)
}

/// Why the program could not write its statistics, if they are wanted. It keeps the id of this process.
fn wrong_stats(option: Option<&OsStr>) -> Option<String> {
    let variable = env::var_os(stats_output::VARIABLE).filter(|path| !path.is_empty());
    let (name, pattern) = match (option, variable) {
        (Some(option), _) => ("--stats", option.to_os_string()),
        (None, variable) => (stats_output::VARIABLE, variable?),
    };
    let failure = stats_output::check_pattern(pattern.as_bytes()).err()?;
    Some(format!("{name}: {}", failure.line))
}

/// Why a file is not concertina's library, if it is not: the dynamic linker would only print a warning, and
/// the program would run without it.
fn wrong_library(library: &Path) -> Option<String> {
    let name = CString::new(library.as_os_str().as_bytes()).ok()?;
    // In this process the library is to print nothing, and to write nothing at exit.
    // SAFETY: no other thread runs.
    unsafe { env::set_var(DISABLE, "1") };
    // SAFETY: strings that end in a NUL. The file is the one that is to be loaded into the program, and
    // stays loaded until this process becomes that. The error, where there is one, is a string that
    // lasts until the next such call.
    unsafe {
        let handle = libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL);
        if handle.is_null() {
            let error = libc::dlerror();
            return Some(match error.is_null() {
                true => format!("{}: it cannot be loaded", library.display()),
                false => CStr::from_ptr(error).to_string_lossy().into_owned(),
            });
        }
        let is_ours = !libc::dlsym(handle, c"concertina_version".as_ptr()).is_null();
        let why = || format!("{}: it is not concertina's library", library.display());
        (!is_ours).then(why)
    }
}

/// `first`, followed by a colon and the value of the variable, if it has one.
fn joined(first: &Path, variable: &str) -> OsString {
    let mut joined = first.as_os_str().to_os_string();
    if let Some(rest) = env::var_os(variable).filter(|rest| !rest.is_empty()) {
        joined.push(":");
        joined.push(rest);
    }
    joined
}

/// The library: the one that the option or `CONCERTINA_LIBRARY` names, or one beside this command, in the
/// `lib` beside its directory, or where pip installs it with the command.
fn library(named: Option<&Path>) -> Result<PathBuf, (String, u8)> {
    let named = named.map(Path::to_path_buf).or_else(|| {
        let variable = env::var_os("CONCERTINA_LIBRARY").filter(|path| !path.is_empty());
        variable.map(PathBuf::from)
    });
    let found = match named {
        Some(named) => named.canonicalize().map_err(|error| {
            (
                format!("run: the library {}: {error}", named.display()),
                MISTAKE,
            )
        })?,
        None => beside_command().ok_or_else(|| {
            let why = format!("run: no {LIBRARY} beside this command; --library FILE names one");
            (why, 125)
        })?,
    };
    if found
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|byte| b": ".contains(byte))
    {
        let why = format!(
            "run: the library {}: the dynamic linker takes no path with a space or a colon in it; --library names a copy elsewhere",
            found.display()
        );
        return Err((why, MISTAKE));
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

/// The directory to add to `PYTHONPATH`: in the Python module that contains the library, or one that was
/// installed with this command, or that of this source tree.
fn startup(library: &Path) -> Option<PathBuf> {
    let command = own_directory()?;
    let beside = library.parent().map(Path::to_path_buf);
    let source = command.join("../../scripts/concertina");
    let modules = beside.into_iter().chain(modules(&command)).chain([source]);
    let mut files = modules.filter_map(|module| module.join(STARTUP).canonicalize().ok());
    let startup = files.next()?.parent()?.to_path_buf();
    // A colon separates paths.
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
    // `pip install --target` makes a `bin` beside the packages.
    let target = directory.join("../concertina");
    let pythons = versions
        .flat_map(|version| version.flatten())
        .filter(|version| version.file_name().as_bytes().starts_with(b"python"));
    let modules = pythons.flat_map(|python| {
        ["site-packages", "dist-packages"]
            .map(|packages| python.path().join(packages).join("concertina"))
    });
    std::iter::once(target).chain(modules)
}
