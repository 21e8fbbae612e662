//! How much the pool's constants matter, and which they would be had one of the recorded traces not been
//! there: `cargo run --release --example policy` prints two tables.
//!
//! Every trace is replayed six times in a row on the simulated GPU under each choice. A choice will do for
//! a trace where no more than 1.01 of what is live is held (llama_serve: 1.015); of the choices that will
//! do for all traces but one, that whose driver calls take the least time on them is chosen. Times follow
//! from how often each call is made and what it costs on an H100.

#![allow(dead_code, reason = "the modules serve others too")]

#[path = "../device/harness/random.rs"]
mod random;
#[path = "../workloads/replay.rs"]
mod replay;
#[path = "../workloads/script.rs"]
mod script;
#[path = "../../src/command/trace.rs"]
mod trace;

use concertina_engine::core::Tuning;
use concertina_engine::device::Call;
use concertina_engine::settings::Settings;
use replay::Replay;
use script::Script;
use std::path::Path;

/// The traces, and what may be held of each in shares of what is live.
const TRACES: [(&str, f64); 5] = [
    ("gpt2_varlen", 1.01),
    ("llama_lora_ckpt", 1.01),
    ("llama_serve", 1.015),
    ("prefetch_streams", 1.01),
    ("resnet_multiscale", 1.01),
];

/// The choices: `slack` in thousandths, and `share`.
const SLACKS: [u64; 4] = [5, 7, 9, 12];
const SHARES: [u64; 5] = [512, 724, 896, 1024, 2048];

const PASSES: usize = 6;

/// Microseconds of a call for one chunk of 2 MiB (H100, driver 580). What grows with the chunk's size is
/// left out: it belongs to the bytes, which are about the same under every choice.
const COSTS: [(Call, f64); 5] = [
    (Call::Create, 10.2),
    (Call::Map, 1.0),
    (Call::SetAccess, 23.8),
    (Call::Unmap, 15.4),
    (Call::Release, 11.3),
];

/// What a trace takes under a choice.
#[derive(Clone, Copy)]
struct Taken {
    /// The most that was held, over the most that was live.
    held: f64,
    /// Of driver calls, over all passes.
    milliseconds: f64,
}

fn main() {
    let scripts = TRACES.map(|(name, _)| recorded(name));
    let mut choices: Vec<(Tuning, [Taken; TRACES.len()])> = Vec::new();
    println!("held over live, and milliseconds of driver calls, in six passes\n");
    println!(
        "| slack | share |{}",
        row(TRACES.map(|(name, _)| name.into()))
    );
    println!("| --- | --- |{}", row(TRACES.map(|_| "---".into())));
    for slack in SLACKS {
        for share in SHARES {
            let tuning = Tuning {
                slack,
                share,
                ..Tuning::default()
            };
            let taken = scripts.each_ref().map(|script| replay(script, tuning));
            let cells = taken.map(|it| format!("{:.4}, {:.0}", it.held, it.milliseconds));
            println!("| {slack} | {share} |{}", row(cells));
            choices.push((tuning, taken));
        }
    }
    println!("\n| chosen without | slack | share | holds of it |");
    println!("| --- | --- | --- | --- |");
    for (left_out, (name, _)) in TRACES.iter().enumerate() {
        let others: Vec<usize> = (0..TRACES.len()).filter(|at| *at != left_out).collect();
        let will_do = |taken: &[Taken]| others.iter().all(|at| taken[*at].held <= TRACES[*at].1);
        let cost = |taken: &[Taken]| others.iter().map(|at| taken[*at].milliseconds).sum::<f64>();
        let chosen = choices
            .iter()
            .filter(|(_, taken)| will_do(taken))
            .min_by(|(_, a), (_, b)| cost(a).total_cmp(&cost(b)));
        match chosen {
            Some((Tuning { slack, share, .. }, taken)) => {
                let held = taken[left_out].held;
                println!("| {name} | {slack} | {share} | {held:.4} |");
            }
            None => println!("| {name} | none will do | | |"),
        }
    }
}

fn row(cells: [String; TRACES.len()]) -> String {
    cells.map(|cell| format!(" {cell} |")).concat()
}

/// A recorded trace, to whose end what is still live is given back.
fn recorded(name: &str) -> Script {
    let path = format!("{}/tests/traces/{name}.gz", env!("CARGO_MANIFEST_DIR"));
    let path = Path::new(&path);
    let trace = match trace::read(path) {
        Ok(trace) => trace,
        Err(refusal) => panic!("{}", refusal.about(path)),
    };
    let mut script = Script::default();
    let mut live = vec![false; trace.allocations as usize];
    for event in trace.events {
        // Both count up, a trace from 1.
        let block = event.id - 1;
        if event.size > 0 {
            script.take(event.size, event.stream);
        } else {
            script.give(block);
        }
        live[block as usize] = event.size > 0;
    }
    let left = (0..).zip(live).filter(|(_, live)| *live);
    script.give_all(left.map(|(block, _)| block));
    script
}

fn replay(script: &Script, tuning: Tuning) -> Taken {
    let settings = Settings {
        tuning,
        ..Settings::default()
    };
    let mut replay = Replay::with_settings(settings, 80 << 30, 0);
    replay.make_streams(script.streams);
    let held = (0..PASSES).map(|_| replay.pass(script)).max();
    let calls = replay.device().figures().calls;
    let cost = |(call, count): (Call, u64)| {
        let cost = COSTS.iter().find(|(of, _)| *of == call);
        cost.map_or(0.0, |(_, microseconds)| microseconds * count as f64)
    };
    let microseconds = calls.iter().map(|(call, of)| cost((*call, of.count)));
    Taken {
        held: held.unwrap_or(0) as f64 / script.peak_live as f64,
        milliseconds: microseconds.sum::<f64>() / 1000.0,
    }
}
