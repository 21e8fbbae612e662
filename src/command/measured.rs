//! The results of a replay, as a line of JSON or as a row of a table.

use crate::replay_options::Options;
use crate::trace::{Trace, printable};
use concertina_engine::device::Figures;
use serde_json::{Map, Value, json};
use std::io::{self, Write};
use std::time::Duration;

/// The results of one trace.
pub struct Report {
    pub driver: &'static str,
    pub device: String,
    /// The time that each pass took.
    pub times: Vec<Duration>,
    /// The pool's statistics at the end of each pass, also of one that did not complete. Their peaks are
    /// those of the pass, their sums those since the start.
    pub figures: Vec<Figures>,
    /// Why the trace did not complete.
    pub stopped: Option<String>,
    /// With `--min-limit`, if the trace completes without a limit.
    pub min_limit_bytes: Option<u64>,
}

impl Report {
    pub fn completed(&self) -> bool {
        self.stopped.is_none()
    }

    pub fn peak_reserved_bytes(&self) -> u64 {
        self.figures
            .iter()
            .map(Figures::peak_reserved_bytes)
            .max()
            .unwrap_or(0)
    }

    fn cold_ns(&self, trace: &Trace) -> Option<f64> {
        self.times
            .first()
            .map(|time| time.as_nanos() as f64 / trace.events.len() as f64)
    }

    /// The median of the passes after the first.
    fn warm_ns(&self, trace: &Trace) -> Option<f64> {
        let mut warm: Vec<f64> = self
            .times
            .iter()
            .skip(1)
            .map(|time| time.as_nanos() as f64)
            .collect();
        warm.sort_by(f64::total_cmp);
        let (low, high) = (
            warm.get(warm.len().checked_sub(1)? / 2)?,
            warm.get(warm.len() / 2)?,
        );
        Some((low + high) / 2.0 / trace.events.len() as f64)
    }

    /// The report on one line. Byte counts are exact; times are rounded to a tenth of a nanosecond.
    pub fn json(&self, name: &str, trace: &Trace, options: &Options) -> Value {
        let tenth = |ns: Option<f64>| ns.map(|ns| (ns * 10.0).round() / 10.0);
        let mut line = json!({
            "trace": name,
            "driver": self.driver,
            "device": self.device,
            "events": trace.events.len(),
            "streams": trace.streams.len(),
            "passes": options.passes,
            "late": options.late.unwrap_or(0),
            "limit_bytes": options.limit_bytes,
            "completed": self.completed(),
            "peak_live_bytes": trace.peak_live_bytes,
            "peak_reserved_bytes": self.peak_reserved_bytes(),
            "peak_reserved_bytes_cold": self.figures.first().map(Figures::peak_reserved_bytes),
            "peak_reserved_bytes_last": self.figures.last().map(Figures::peak_reserved_bytes),
            "reserved_ratio": ratio(self.peak_reserved_bytes(), trace),
            "ns_per_event_cold": tenth(self.cold_ns(trace)),
            "ns_per_event_warm": tenth(self.warm_ns(trace)),
        });
        if options.min_limit {
            line["min_limit_bytes"] = self.min_limit_bytes.into();
            line["min_limit_ratio"] = self.min_limit_bytes.map(|bytes| ratio(bytes, trace)).into();
        }
        line["driver_ms_cold"] = self.figures.first().map(driver_ms).into();
        line["driver_ms"] = self.figures.last().map(driver_ms).into();
        let calls = self.figures.last().map(|figures| &figures.calls[..]);
        let made = calls
            .unwrap_or_default()
            .iter()
            .filter(|(_, figures)| figures.count > 0);
        line["driver_calls"] = made
            .map(|(call, figures)| (call.name().to_owned(), figures.count.into()))
            .collect::<Map<_, _>>()
            .into();
        line
    }
}

/// `bytes` over the trace's peak live, to six digits.
fn ratio(bytes: u64, trace: &Trace) -> f64 {
    (bytes as f64 / trace.peak_live_bytes as f64 * 1e6).round() / 1e6
}

/// Milliseconds spent in driver calls so far, to the microsecond.
fn driver_ms(figures: &Figures) -> f64 {
    let nanoseconds: u64 = figures.calls.iter().map(|(_, call)| call.nanoseconds).sum();
    (nanoseconds / 1000) as f64 / 1e3
}

/// The table of results, a row for each trace.
pub struct Table {
    name_width: usize,
    /// How many of [`COLUMNS`] there are.
    columns: usize,
    headed: bool,
}

/// The columns after the trace's name, and their widths.
const COLUMNS: [(&str, usize); 12] = [
    ("driver", 6),
    ("events", 9),
    ("streams", 7),
    ("live MiB", 10),
    ("reserved", 10),
    ("ratio", 7),
    ("cold ns", 8),
    ("warm ns", 8),
    ("driver ms", 9),
    ("completed", 9),
    ("min limit", 10),
    ("ratio", 7),
];

impl Table {
    /// A table for the traces of these names, the smallest limits included if asked for.
    pub fn new(names: &[String], min_limit: bool) -> Self {
        let widths = names.iter().map(|name| printable(name).chars().count());
        let name_width = widths.max().unwrap_or(0).max("trace".len());
        let columns = if min_limit {
            COLUMNS.len()
        } else {
            COLUMNS.len() - 2
        };
        Table {
            name_width,
            columns,
            headed: false,
        }
    }

    /// Writes a row, below the names of the columns if it is the first.
    pub fn row(
        &mut self,
        out: &mut impl Write,
        name: &str,
        trace: &Trace,
        report: &Report,
    ) -> io::Result<()> {
        if !std::mem::replace(&mut self.headed, true) {
            self.line(out, "trace", COLUMNS.map(|(column, _)| column.into()))?;
        }
        let mib = |bytes: u64| format!("{:.1}", bytes as f64 / (1 << 20) as f64);
        let times = |bytes: u64| format!("{:.4}", ratio(bytes, trace));
        let tenths = |number: f64| format!("{number:.1}");
        let or_none = |cell: Option<String>| cell.unwrap_or_else(|| "-".into());
        let reserved = report.peak_reserved_bytes();
        let cells = [
            report.driver.into(),
            trace.events.len().to_string(),
            trace.streams.len().to_string(),
            mib(trace.peak_live_bytes),
            mib(reserved),
            times(reserved),
            or_none(report.cold_ns(trace).map(tenths)),
            or_none(report.warm_ns(trace).map(tenths)),
            or_none(report.figures.first().map(driver_ms).map(tenths)),
            if report.completed() { "yes" } else { "no" }.into(),
            or_none(report.min_limit_bytes.map(mib)),
            or_none(report.min_limit_bytes.map(times)),
        ];
        self.line(out, name, cells)
    }

    fn line(&self, out: &mut impl Write, name: &str, cells: [String; 12]) -> io::Result<()> {
        let width = self.name_width;
        write!(out, "{:width$}", printable(name))?;
        for (cell, (_, width)) in cells.iter().zip(COLUMNS).take(self.columns) {
            write!(out, "  {cell:>width$}")?;
        }
        writeln!(out)
    }
}
