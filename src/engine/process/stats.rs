//! The statistics as JSON.
//!
//! The pool's counters are the only source. `OWN` is the one list of the fields that PyTorch does not have:
//! the JSON and the table of docs/statistics.md are both made from it.

use crate::core::{PoolStats, Stat, TORCH_COUNTS, Usage};
use crate::device::external_cache;
use crate::device::{Device, Figures};
use crate::process::allocator::{Allocator, allocator_in_use};
use crate::process::cuda_calls;
use crate::process::launcher;
use crate::process::stats_path;
use crate::settings::variable_text as variable;
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::fs::File;
use std::io::Read;
use std::time::{Duration, SystemTime};

/// Raised when a field changes its meaning or goes; new fields do not raise it.
pub const SCHEMA_VERSION: u32 = 1;

/// A field of a device that PyTorch does not have.
struct Own {
    name: &'static str,
    doc: &'static str,
    value: fn(&Figures) -> Value,
}

macro_rules! own {
    ($($name:literal, $doc:literal, $value:expr;)*) => {
        const OWN: &[Own] = &[$(Own { name: $name, doc: $doc, value: $value },)*];
    };
}

own! {
    "limit_bytes", "the limit on what may be held from the driver; null where none is set",
        |f| f.limit.map_or(Value::Null, Value::from);
    "fragmentation", "free share of what is held: inactive bytes over reserved bytes, 0 to 1",
        |f| {
            let all = &f.of_program().all;
            let reserved = all.reserved_bytes.current.max(1) as f64;
            json!(all.inactive_split_bytes.current as f64 / reserved)
        };
    "largest_free_bytes", "the largest free block",
        |f| json!(f.largest_free);
    "live_blocks", "blocks that the program has not given back",
        |f| json!(f.of_program().all.allocation.current);
    "pending_bytes", "bytes given back that another recorded stream may still use",
        |f| json!(f.of_program().pending_bytes);
    "other_libraries", "where `memory_stats` is PyTorch's: what other libraries of the process have from the \
         pool by `cudaMalloc`, `cudaMallocAsync` and the like, under the names of `memory_stats`; else null",
        |f| f.of_others().map_or(Value::Null, |it| Value::Object(others(it)));
    "hits", "requests met from memory that was free already",
        |f| json!(f.counters.hits);
    "cross_stream_reuses", "of those, in memory that another stream freed, which the stream waits for on the GPU",
        |f| json!(f.counters.cross_stream_reuses);
    "growths", "requests for which new memory was taken from the driver",
        |f| json!(f.counters.growths);
    "stitches", "chunks remapped to make free memory contiguous",
        |f| json!(f.counters.stitches);
    "stitched_bytes", "bytes of those chunks",
        |f| json!(f.counters.stitched_bytes);
    "stale_mappings", "old mappings of remapped chunks that are not unmapped yet",
        |f| json!(f.counters.stale);
    "stale_bytes", "bytes behind those mappings; they are held once, not twice",
        |f| json!(f.counters.stale_bytes);
    "address_bytes", "addresses reserved; they cost no memory",
        |f| json!(f.addresses);
    "driver_errors", "driver calls that failed for another reason than want of memory",
        |f| json!(f.counters.driver_errors);
    "driver_calls", "for each driver call: `count`, `nanoseconds` in all, and `failed`",
        |f| {
            let calls = f.calls.iter().map(|(call, figures)| {
                let value = json!({
                    "count": figures.count,
                    "nanoseconds": figures.nanoseconds,
                    "failed": figures.failed,
                });
                (call.name().to_string(), value)
            });
            Value::Object(calls.collect())
        };
}

/// The statistics of all open devices, one JSON object. A device that another thread keeps locked for longer
/// than `timeout` is marked `busy` and has no figures.
pub fn json(timeout: Duration) -> String {
    json_of(allocator_in_use(), timeout)
}

/// [`json()`] of any allocator, not only the process's own.
pub fn json_of(allocator: Option<&Allocator>, timeout: Duration) -> String {
    let devices: Vec<Value> = allocator
        .into_iter()
        .flat_map(|allocator| allocator.devices_in_use())
        .map(|device| device_json(device, device.figures_within(timeout).as_ref()))
        .collect();
    let driver = allocator.map(|allocator| match allocator.functions().simulated {
        true => "sim",
        false => "cuda",
    });
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    json!({
        "schema_version": SCHEMA_VERSION,
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "host": stats_path::host_name(),
        "rank": launcher::rank(variable).and_then(|rank| rank.parse::<u64>().ok()),
        "local_rank": launcher::local_rank(variable),
        "world_size": launcher::world_size(variable),
        "command_line": command_line(),
        "used_gpu": !devices.is_empty(),
        "time": now.as_secs(),
        "driver": driver,
        "calls": cuda_calls::json(),
        "callers": cuda_calls::callers_json(),
        "kept": external_cache::json(),
        "devices": devices,
    })
    .to_string()
}

/// The process's program and arguments, cut off if they are very long.
fn command_line() -> Vec<String> {
    const LONGEST: u64 = 4096;
    let mut text = Vec::new();
    if let Ok(file) = File::open("/proc/self/cmdline") {
        // What was read until then will do.
        let _ = file.take(LONGEST).read_to_end(&mut text);
    }
    let words = text.strip_suffix(b"\0").unwrap_or(&text);
    words
        .split(|byte| *byte == 0)
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect()
}

fn device_json(device: &Device, figures: Option<&Figures>) -> Value {
    let mut object = Map::new();
    object.insert("device".into(), device.ordinal().into());
    object.insert("name".into(), device.name().into());
    object.insert("total_bytes".into(), device.total_bytes().into());
    object.insert("busy".into(), figures.is_none().into());
    if let Some(figures) = figures {
        object.insert(
            "memory_stats".into(),
            Value::Object(memory_stats(figures.of_program())),
        );
        for own in OWN {
            object.insert(own.name.into(), (own.value)(figures));
        }
    }
    Value::Object(object)
}

/// PyTorch's `memory_stats`, key by key under its names (`torch/cuda/memory.py`).
pub fn memory_stats(counters: &PoolStats) -> Map<String, Value> {
    let mut stats = Map::new();
    for (pool, usage) in [
        ("all", &counters.all),
        ("small_pool", &counters.small),
        ("large_pool", &counters.large),
    ] {
        for (name, flow) in by_name(usage) {
            put(&mut stats, &format!("{name}.{pool}"), flow);
        }
    }
    // Nothing is oversize without `max_split_size_mb`, which has no effect here.
    put(&mut stats, "oversize_allocations", &Stat::default());
    put(&mut stats, "oversize_segments", &Stat::default());
    for count in &TORCH_COUNTS {
        stats.insert(count.name.into(), count.of(counters).into());
    }
    stats.insert("max_split_size".into(), (-1).into());
    stats
}

/// What is counted of the blocks of other libraries, all sizes together.
fn others(counters: &PoolStats) -> Map<String, Value> {
    let mut stats = Map::new();
    for (name, flow) in of_blocks(&counters.all) {
        put(&mut stats, &format!("{name}.all"), flow);
    }
    stats.insert("num_alloc_retries".into(), counters.alloc_retries.into());
    stats.insert("num_ooms".into(), counters.ooms.into());
    stats
}

/// Those of the quantities that blocks have, and the memory around them has not.
fn of_blocks(usage: &Usage) -> impl Iterator<Item = (&'static str, &Stat)> {
    let of_memory = [
        "segment",
        "inactive_split",
        "reserved_bytes",
        "inactive_split_bytes",
    ];
    let all = by_name(usage).into_iter();
    all.filter(move |(name, _)| !of_memory.contains(name))
}

fn put(stats: &mut Map<String, Value>, name: &str, flow: &Stat) {
    stats.insert(format!("{name}.current"), flow.current.into());
    stats.insert(format!("{name}.peak"), flow.peak.into());
    stats.insert(format!("{name}.allocated"), flow.allocated.into());
    stats.insert(format!("{name}.freed"), flow.freed.into());
}

/// What PyTorch counts, in the order that its own table has (`DeviceStats` in its
/// `CachingDeviceAllocator.h`).
pub fn by_name(usage: &Usage) -> [(&'static str, &Stat); 9] {
    [
        ("allocation", &usage.allocation),
        ("segment", &usage.segment),
        ("active", &usage.active),
        ("inactive_split", &usage.inactive_split),
        ("allocated_bytes", &usage.allocated_bytes),
        ("reserved_bytes", &usage.reserved_bytes),
        ("active_bytes", &usage.active_bytes),
        ("inactive_split_bytes", &usage.inactive_split_bytes),
        ("requested_bytes", &usage.requested_bytes),
    ]
}

/// The fields of `OWN` as docs/statistics.md shows them: a Markdown table.
pub fn markdown() -> String {
    let mut text = String::from("| field | meaning |\n| --- | --- |\n");
    for own in OWN {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "| `{}` | {} |", own.name, own.doc);
    }
    text
}
