//! Generated programs on the simulated GPU, and bounds on the memory that the pool reserves for them.

mod programs;
#[path = "../device/harness/random.rs"]
mod random;
mod replay;
mod script;
mod soak;

use concertina_engine::core::Tuning;
use concertina_engine::settings::Settings;
use random::Random;
use replay::Replay;
use script::Script;

/// A kind of program, and the most that may be reserved at its peak, in shares of what is live at its peak:
/// from an empty pool, in a second run after that, and where work ends [`LATE`] events late. One chunk of 2
/// MiB for each stream is allowed on top.
struct Load {
    name: &'static str,
    program: fn(&mut Random) -> Script,
    cold: f64,
    again: f64,
    late: f64,
}

/// Programs of each kind.
const SEEDS: u64 = 8;

const LATE: u64 = 50;

const CHUNK: u64 = 2 << 20;

/// Each bound is a little above the worst of its programs. Results are the same on every machine.
#[rustfmt::skip]
const LOADS: &[Load] = &[
    Load { name: "training",      program: programs::training,      cold: 1.010, again: 1.010, late: 1.010 },
    Load { name: "serving",       program: programs::serving,       cold: 1.075, again: 1.085, late: 1.075 },
    Load { name: "serving_small", program: programs::serving_small, cold: 1.160, again: 1.185, late: 1.160 },
    Load { name: "two_models",    program: programs::two_models,    cold: 1.030, again: 1.035, late: 1.030 },
    Load { name: "pipeline",      program: programs::pipeline,      cold: 1.115, again: 1.115, late: 1.130 },
    Load { name: "anything",      program: programs::anything,      cold: 1.040, again: 1.040, late: 1.065 },
    Load { name: "small",         program: programs::small,         cold: 1.035, again: 1.035, late: 1.035 },
];

#[test]
fn reserved_memory_of_generated_programs_is_bounded() {
    let mut beyond = Vec::new();
    for load in LOADS {
        for seed in 0..SEEDS {
            let script = (load.program)(&mut Random::new(seed));
            let mut hold = |what: &str, held: u64, bound: f64| {
                let live = script.peak_live;
                assert!(held >= live);
                let apart = CHUNK * u64::from(script.streams);
                let share = held.saturating_sub(apart) as f64 / live as f64;
                let line = format!(
                    "{}, seed {seed}, {what}: {share:.4} of {} MiB, at most {bound}",
                    load.name,
                    live >> 20
                );
                println!("{line}");
                if share > bound {
                    beyond.push(line);
                }
            };
            let mut idle = Replay::new(&script, 0);
            hold("from an empty pool", idle.pass(&script), load.cold);
            hold("again", idle.pass(&script), load.again);
            let mut late = Replay::new(&script, LATE);
            hold("with late work", late.pass(&script), load.late);
        }
    }
    assert!(beyond.is_empty(), "\n{}", beyond.join("\n"));
}

/// Calls of the simulated GPU take no time, so the test sets a remap budget that is used up at once.
#[test]
fn growth_where_remapping_costs_too_much_and_memory_is_fragmented() {
    // What a script reserves at most, and how many chunks its second pass remaps.
    let run = |script: &Script, patience: u64| {
        let tuning = Tuning {
            remap_share: patience,
            ..Tuning::default()
        };
        let settings = Settings {
            tuning,
            ..Settings::default()
        };
        let mut replay = Replay::with_settings(settings, 4 * script.peak_live.max(1 << 30), 0);
        replay.make_streams(script.streams);
        let stitches = |replay: &Replay| replay.device().figures().counters.stitches;
        let held = replay.pass(script);
        let first = stitches(&replay);
        (held.max(replay.pass(script)), stitches(&replay) - first)
    };
    let (mut remapped, mut calm) = (0, 0);
    for seed in 0..SEEDS {
        let script = programs::replaced(&mut Random::new(seed));
        remapped += run(&script, Tuning::default().remap_share).1;
        let (held, again) = run(&script, 0);
        calm += again;
        let most = script.peak_live + script.peak_live / 6 + CHUNK;
        assert!(held <= most, "seed {seed}: {held} of {most}");
        // Where remapping keeps memory contiguous there is nothing to gain.
        let script = programs::training(&mut Random::new(seed));
        let default_budget = run(&script, Tuning::default().remap_share);
        assert_eq!(default_budget, run(&script, 0), "seed {seed}");
    }
    println!("{remapped} chunks remapped, or {calm}");
    assert!(calm * 20 < remapped, "{calm} of {remapped}");
}

/// A large block that was freed before a program starts makes the pool reserve little more.
#[test]
fn reserved_memory_after_a_large_block_is_freed_is_bounded() {
    for seed in 0..SEEDS {
        for (program, bound) in [
            (programs::training as fn(&mut _) -> _, 1.010),
            (programs::two_models, 1.040),
        ] {
            let script: Script = program(&mut Random::new(seed));
            for part in [2, 3, 5] {
                let mut before = Script::default();
                let block = before.take(script.peak_live / part, 0);
                before.give(block);
                let mut replay = Replay::new(&script, 0);
                replay.pass(&before);
                let held = replay.pass(&script);
                let apart = CHUNK * u64::from(script.streams);
                let share = held.saturating_sub(apart) as f64 / script.peak_live as f64;
                println!("seed {seed}, behind 1/{part}: {share:.4}, at most {bound}");
                assert!(share <= bound, "seed {seed}, behind 1/{part}: {share:.4}");
            }
        }
    }
}

/// A large block is freed and requested again, a little larger: only the difference is remapped.
#[test]
fn remap_of_a_large_block_that_grows_maps_only_the_difference() {
    const LARGE: u64 = 300 << 20;
    let mut script = Script::default();
    // A gigabyte of free blocks of two chunks.
    let blocks: Vec<_> = (0..512).map(|_| script.take(2 * CHUNK, 0)).collect();
    let (stay, go): (Vec<_>, Vec<_>) = blocks.into_iter().partition(|block| block % 2 == 0);
    script.give_all(go);
    let first = script.take(LARGE, 0);
    let second = script.take(LARGE, 0);
    script.give(first);
    let before = script.events.len();
    let larger = script.take(LARGE + CHUNK, 0);
    script.give_all(stay.into_iter().chain([second, larger]));

    let mut replay = Replay::new(&script, 0);
    let mut remapped = Vec::new();
    replay.watched_pass(&script, |replay, count| {
        if count == before || count == before + 1 {
            remapped.push(replay.device().figures().counters.stitches);
        }
    });
    let [before, after] = remapped[..] else {
        panic!("{remapped:?}")
    };
    assert!(before >= LARGE / CHUNK, "{before} remapped at first");
    assert!(
        (1..=3).contains(&(after - before)),
        "{} remapped",
        after - before
    );
}

/// Allocates five gigabytes, then a block of several chunks. Returns how many chunks that created.
fn chunks_for_more(prepare: impl FnOnce(&mut Script)) -> u64 {
    const BLOCK: u64 = 32 * CHUNK;
    let mut script = Script::default();
    prepare(&mut script);
    let blocks: Vec<_> = (0..80).map(|_| script.take(BLOCK, 0)).collect();
    let before = script.events.len();
    let more = script.take(BLOCK, 0);
    script.give_all(blocks.into_iter().chain([more]));

    let mut replay = Replay::new(&script, 0);
    let mut created = Vec::new();
    replay.watched_pass(&script, |replay, count| {
        if count == before || count == before + 1 {
            created.push(replay.machine.calls("cuMemCreate"));
        }
    });
    created[1] - created[0]
}

/// Chunks are small while a program has freed nothing, and where parts of chunks are free.
#[test]
fn growth_takes_larger_chunks_where_memory_is_not_fragmented() {
    // The first of every two blocks is freed: halves of chunks are free.
    let cut_up = |script: &mut Script| {
        let halves: Vec<_> = (0..64).map(|_| script.take(CHUNK / 2, 0)).collect();
        script.give_all(halves.into_iter().step_by(2));
    };
    let give_much_back = |script: &mut Script| {
        let much: Vec<_> = (0..44).map(|_| script.take(32 * CHUNK, 0)).collect();
        script.give_all(much);
    };
    let loading = chunks_for_more(|_| ());
    let whole = chunks_for_more(give_much_back);
    let cut = chunks_for_more(|script| {
        give_much_back(script);
        cut_up(script);
    });
    println!("{loading} chunks, {whole} where memory is whole, {cut} where it is cut up");
    assert!(whole < loading && cut == loading);
}
