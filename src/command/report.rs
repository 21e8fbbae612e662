//! `concertina report`: what statistics say, for people.

use crate::trace::printable;
use concertina_engine::runtime::stats::SCHEMA_VERSION;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Writes a table of the devices of all files, and what their processes and the library called, summed
/// over them. Files that are no statistics are named on standard error; the answer is whether there
/// were none.
pub fn run(files: &[PathBuf], out: &mut impl Write) -> io::Result<bool> {
    let mut processes = Vec::new();
    for file in files {
        match read(file) {
            Ok(process) => processes.push(process),
            Err(why) => crate::complain(&format!("report: {}: {why}", file.display())),
        }
    }
    if !processes.is_empty() {
        let calls = sums(processes.iter().map(|process| &process["calls"]));
        let callers: Vec<_> = processes.iter().map(by_caller).collect();
        let callers = sums(callers.iter());
        let of_devices = processes.iter().flat_map(devices);
        let driver_calls = sums(of_devices.map(|device| &device["driver_calls"]));
        write_table(out, &memory(&processes))?;
        for (title, calls) in [
            ("the program's calls", calls),
            ("calls by library", callers),
            ("calls to the driver", driver_calls),
        ] {
            if !calls.is_empty() {
                writeln!(out)?;
                write_table(out, &calls_table(title, &calls))?;
            }
        }
    }
    Ok(processes.len() == files.len())
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

fn devices(process: &Value) -> impl Iterator<Item = &Value> {
    process["devices"].as_array().into_iter().flatten()
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

/// What other libraries had of a device at most, where the statistics tell them from PyTorch.
fn others(device: &Value) -> Option<u64> {
    let most = device["other_libraries"]["allocated_bytes.all.peak"].as_u64();
    most.filter(|most| *most > 0)
}

/// A row for each device of each process. The column of other libraries is there where there are any.
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

/// Figures by function: those of all objects added up. What one does not know, the sum does not know.
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

/// A row for each function, those that took longest first.
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

/// Columns two spaces apart, numbers to the right.
fn write_table(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for row in rows {
        let cells = row.iter().zip(&widths).enumerate();
        let cells = cells.map(|(column, (cell, width))| match column {
            0 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  "))?;
    }
    Ok(())
}
