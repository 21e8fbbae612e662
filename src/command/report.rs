//! `concertina report`: statistics files as tables, or as one JSON object.

use crate::ranks::Ranks;
use crate::trace::printable;
use concertina_engine::process::stats::SCHEMA_VERSION;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// What to report on, and how.
#[derive(Default)]
pub struct Options {
    pub files: Vec<PathBuf>,
    pub json: bool,
}

/// Writes which files were read, a table of the processes, one of their devices, and the processes' and the
/// library's calls in total; or all of that as JSON. Files that are not statistics are named on standard
/// error; false if there is one.
pub fn run(options: &Options, out: &mut impl Write) -> io::Result<bool> {
    let files = &options.files;
    let mut processes = Vec::new();
    let mut names = Vec::new();
    for file in files {
        match read(file) {
            Ok(process) => {
                names.push(file.display().to_string());
                processes.push(process);
            }
            Err(why) => crate::print_error(&format!("report: {}: {why}", file.display())),
        }
    }
    if options.json {
        let report = report_json(files.len(), &names, &processes);
        writeln!(out, "{report}")?;
    } else if !processes.is_empty() {
        writeln!(out, "{}\n", what_was_read(files.len(), &processes))?;
        write_table(out, &identities(&names, &processes), Align::Left)?;
        writeln!(out)?;
        write_table(out, &memory(&processes), Align::Right)?;
        if let Some(ranks) = Ranks::of(processes.iter()) {
            write!(out, "\n{}", ranks.text())?;
        }
        let calls = Calls::of(&processes);
        for (title, calls) in [
            ("the program's calls", calls.program),
            ("calls by library", calls.by_library),
            ("calls to the driver", calls.driver),
        ] {
            if !calls.is_empty() {
                writeln!(out)?;
                write_table(out, &calls_table(title, &calls), Align::Right)?;
            }
        }
    }
    Ok(processes.len() == files.len())
}

/// The calls of all processes in total.
struct Calls {
    program: Sums,
    by_library: Sums,
    driver: Sums,
}

impl Calls {
    fn of(processes: &[Value]) -> Calls {
        let callers: Vec<_> = processes.iter().map(by_caller).collect();
        let of_devices = processes.iter().flat_map(devices);
        Calls {
            program: sums(processes.iter().map(|process| &process["calls"])),
            by_library: sums(callers.iter()),
            driver: sums(of_devices.map(|device| &device["driver_calls"])),
        }
    }
}

/// How many files were read, and from how many processes and hosts they are.
fn what_was_read(files: usize, processes: &[Value]) -> String {
    let count = |number: usize, one: &str, more: &str| match number {
        1 => format!("1 {one}"),
        number => format!("{number} {more}"),
    };
    let mut hosts: Vec<_> = processes.iter().map(|it| it["host"].as_str()).collect();
    hosts.sort_unstable();
    hosts.dedup();
    let unused = processes
        .iter()
        .filter(|it| devices(it).next().is_none())
        .count();
    let mut text = format!(
        "{} of {} read: {} on {}",
        processes.len(),
        count(files, "file", "files"),
        count(processes.len(), "process", "processes"),
        count(hosts.len(), "host", "hosts"),
    );
    if unused > 0 {
        text += &format!(", {unused} of which used no GPU");
    }
    text
}

/// The table of processes: which one wrote each file.
fn identities(names: &[String], processes: &[Value]) -> Vec<Row> {
    let heads = ["file", "host", "rank", "process", "command line"];
    let mut rows = vec![heads.map(String::from).to_vec()];
    for (name, process) in names.iter().zip(processes) {
        let number = |key: &str| show(process[key].as_u64(), |number| number.to_string());
        rows.push(vec![
            printable(name).to_string(),
            show(process["host"].as_str(), |host| printable(host).to_string()),
            number("rank"),
            number("pid"),
            show(command_line(process), |line| printable(&line).to_string()),
        ]);
    }
    rows
}

/// The command line, quoted as in a shell.
fn command_line(process: &Value) -> Option<String> {
    let words = process["command_line"].as_array()?;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    let words = words.iter().filter_map(Value::as_str).map(|word| {
        match !word.is_empty() && word.chars().all(is_plain) {
            true => word.into(),
            false => format!("'{}'", word.replace('\'', "'\\''")),
        }
    });
    Some(words.collect::<Vec<_>>().join(" "))
}

/// The report as JSON: what the tables show, in exact numbers.
fn report_json(files: usize, names: &[String], processes: &[Value]) -> Value {
    let identified = names.iter().zip(processes).map(|(name, process)| {
        let devices = devices(process).map(|device| {
            let counter = |name: &str| device["memory_stats"][name].clone();
            json!({
                "device": device["device"],
                "name": device["name"],
                "peak_allocated_bytes": counter("allocated_bytes.all.peak"),
                "peak_reserved_bytes": counter("reserved_bytes.all.peak"),
                "limit_bytes": device["limit_bytes"],
                "num_ooms": counter("num_ooms"),
                "live_blocks": device["live_blocks"],
            })
        });
        json!({
            "file": name,
            "host": process["host"],
            "rank": process["rank"],
            "local_rank": process["local_rank"],
            "world_size": process["world_size"],
            "pid": process["pid"],
            "command_line": process["command_line"],
            "used_gpu": devices.len() > 0,
            "devices": devices.collect::<Vec<_>>(),
        })
    });
    let calls = Calls::of(processes);
    json!({
        "files": files,
        "files_read": processes.len(),
        "processes": identified.collect::<Vec<_>>(),
        "ranks": Ranks::of(processes.iter()).map(|ranks| ranks.json()),
        "calls": calls.program,
        "callers": calls.by_library,
        "driver_calls": calls.driver,
    })
}

/// One process's statistics.
fn read(file: &Path) -> Result<Value, String> {
    let text = fs::read_to_string(file).map_err(|error| error.to_string())?;
    let process: Value =
        serde_json::from_str(&text).map_err(|error| format!("no JSON: {error}"))?;
    match process["schema_version"].as_u64() {
        Some(version) if version == u64::from(SCHEMA_VERSION) => Ok(process),
        Some(version) => Err(format!(
            "these statistics have schema_version {version}, and this command knows {SCHEMA_VERSION}"
        )),
        None => Err("no statistics: there is no schema_version".into()),
    }
}

fn devices(process: &Value) -> std::slice::Iter<'_, Value> {
    process["devices"]
        .as_array()
        .map_or(&[][..], Vec::as_slice)
        .iter()
}

/// The calls of each library, by its name and the function's.
fn by_caller(process: &Value) -> Value {
    let callers = process["callers"].as_object().into_iter().flatten();
    let calls = callers.flat_map(|(caller, calls)| {
        let calls = calls.as_object().into_iter().flatten();
        calls.map(move |(name, figures)| (format!("{caller}: {name}"), figures.clone()))
    });
    Value::Object(calls.collect())
}

type Row = Vec<String>;

/// The peak bytes that other libraries had allocated on a device, if the statistics tell them from PyTorch.
fn others(device: &Value) -> Option<u64> {
    let most = device["other_libraries"]["allocated_bytes.all.peak"].as_u64();
    most.filter(|most| *most > 0)
}

/// The table of devices, a row for each device of each process. It has a column of other libraries if there
/// are any.
fn memory(processes: &[Value]) -> Vec<Row> {
    const OTHERS: &str = "by other libraries";
    let heads = [
        "process",
        "device",
        "most in use",
        OTHERS,
        "most held",
        "held / in use",
        "limit",
        "out of memory",
        "not freed",
    ];
    let mut rows = vec![heads.map(String::from).to_vec()];
    for process in processes {
        let number = show(process["pid"].as_u64(), |pid| pid.to_string());
        let before = rows.len();
        for device in devices(process) {
            let name = device["name"].as_str().unwrap_or("-");
            let ordinal = show(device["device"].as_i64(), |ordinal| ordinal.to_string());
            let counter = |name: &str| device["memory_stats"][name].as_u64();
            let used = counter("allocated_bytes.all.peak");
            let held = counter("reserved_bytes.all.peak");
            let others = others(device);
            let in_use = used.map(|used| used + others.unwrap_or(0));
            let ratio = in_use.filter(|in_use| *in_use > 0).zip(held);
            rows.push(vec![
                number.clone(),
                format!("{ordinal} ({})", printable(name)),
                show(used, mebibytes),
                show(others, mebibytes),
                show(held, mebibytes),
                show(ratio, |(used, held)| {
                    format!("{:.3}", held as f64 / used as f64)
                }),
                show(device["limit_bytes"].as_u64(), mebibytes),
                show(counter("num_ooms"), |times| times.to_string()),
                show(device["live_blocks"].as_u64(), |blocks| blocks.to_string()),
            ]);
        }
        if rows.len() == before {
            let mut row = vec![number];
            row.resize(heads.len(), "-".into());
            rows.push(row);
        }
    }
    if processes
        .iter()
        .flat_map(devices)
        .all(|it| others(it).is_none())
    {
        let at = heads.iter().position(|head| *head == OTHERS);
        rows.iter_mut()
            .for_each(|row| drop(at.map(|at| row.remove(at))));
    }
    rows
}

fn show<T>(value: Option<T>, text: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "-".into(), text)
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

/// Counters by function, added up. A counter that is missing in one object is missing in the sum.
type Sums = BTreeMap<String, Map<String, Value>>;

fn sums<'a>(objects: impl Iterator<Item = &'a Value>) -> Sums {
    let mut sums = Sums::new();
    for (name, figures) in objects.filter_map(Value::as_object).flatten() {
        let Some(figures) = figures.as_object() else {
            continue;
        };
        match sums.get_mut(name) {
            None => {
                sums.insert(name.clone(), figures.clone());
            }
            Some(sum) => sum.iter_mut().for_each(|(figure, sum)| {
                let more = figures.get(figure).and_then(Value::as_u64);
                let both = sum.as_u64().zip(more);
                *sum = both.map(|(sum, more)| sum.saturating_add(more)).into();
            }),
        }
    }
    sums.retain(|_, figures| figures.get("count").and_then(Value::as_u64) != Some(0));
    sums
}

/// The table of calls, a row for each function, those that took longest first.
fn calls_table(title: &str, calls: &Sums) -> Vec<Row> {
    let figure = |figures: &Map<String, Value>, name: &str| figures.get(name)?.as_u64();
    let has_bytes = calls.values().any(|figures| figures.contains_key("bytes"));
    let mut heads = vec![title, "times", "failed", "asked for", "time", "each"];
    if !has_bytes {
        heads.remove(3);
    }
    let mut order: Vec<_> = calls.iter().collect();
    order.sort_by_key(|(_, figures)| std::cmp::Reverse(figure(figures, "nanoseconds")));
    let rows = order.into_iter().map(|(name, figures)| {
        let count = figure(figures, "count");
        let time = figure(figures, "nanoseconds");
        let each = time.zip(count.filter(|count| *count > 0));
        let mut row = vec![
            printable(name).to_string(),
            show(count, |count| count.to_string()),
            show(figure(figures, "failed"), |failed| failed.to_string()),
            show(figure(figures, "bytes"), mebibytes),
            show(time, |time| format!("{:.3} ms", time as f64 / 1e6)),
            show(each, |(time, count)| {
                format!("{:.3} us", time as f64 / count as f64 / 1e3)
            }),
        ];
        if !has_bytes {
            row.remove(3);
        }
        row
    });
    let heads = heads.into_iter().map(String::from).collect();
    std::iter::once(heads).chain(rows).collect()
}

/// The alignment of the cells after the first.
#[derive(Clone, Copy, PartialEq)]
enum Align {
    Left,
    Right,
}

/// Writes a table, its columns two spaces apart.
fn write_table(out: &mut impl Write, rows: &[Row], align: Align) -> io::Result<()> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate();
        let cells = cells.map(|(column, (cell, width))| match column {
            column if column > 0 && align == Align::Right => format!("{cell:>width$}"),
            _ => format!("{cell:<width$}"),
        });
        let line = cells.collect::<Vec<_>>().join("  ");
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}
