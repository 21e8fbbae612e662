//! Random runs: many short random programs, seeded, on a few streams with late work, and on threads.
//!
//! `CONCERTINA_TEST_SEED` runs one seed alone, `CONCERTINA_TEST_RUNS` scales how many there are, in
//! percent.

use crate::harness::gpu::{Bench, GIB, MIB, on_card};
use crate::harness::random_program::{Block, Plan, Runner, Seed};
use concertina_engine::settings::Settings;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// The seeds of a test with `count` of them.
fn seeds(count: u64) -> Vec<u64> {
    match variable("CONCERTINA_TEST_SEED") {
        Some(seed) => vec![seed],
        None => (0..count * variable("CONCERTINA_TEST_RUNS").unwrap_or(100) / 100).collect(),
    }
}

#[test]
fn random_runs_keep_contents() {
    for seed in seeds(if on_card() { 10 } else { 3 }) {
        let _seed = Seed(seed);
        let bench = Bench::new(Settings::default());
        let plan = Plan {
            streams: 1 + seed % 6,
            limits: Some((300 * MIB, 3 * GIB)),
            purge: seed % 2 == 1,
            cuda: seed % 3 == 2,
            ..Plan::default()
        };
        let mut runner = Runner::new(&bench.gpu, bench.device(), plan, seed);
        runner.run(if on_card() { 5000 } else { 1000 });
        runner.end();
        bench.device().set_limit(Some(3 * GIB));
        bench.finish();
    }
}

/// Threads, each with streams of its own, that hand each other blocks: a ring for each device.
fn threads(bench: &Bench, count: usize, devices: usize, operations: u64, plan: Plan) {
    let (senders, receivers): (Vec<Sender<Block>>, Vec<Receiver<Block>>) =
        (0..count).map(|_| channel()).unzip();
    let (gpu, allocator) = (&bench.gpu, &*bench.allocator);
    let ended: Vec<(Runner, Receiver<Block>)> = thread::scope(|scope| {
        let spawn = |(turn, inbox): (usize, Receiver<Block>)| {
            let next = (turn + devices) % count;
            let outbox = senders[next].clone();
            scope.spawn(move || {
                let _here = gpu.enter();
                let device = allocator.device((turn % devices) as i32).expect("a device");
                let mut runner = Runner::new(gpu, device, plan, turn as u64);
                for operation in 0..operations {
                    runner.operation();
                    if operation % 8 == 0
                        && next != turn
                        && let Some(block) = runner.hand_over()
                    {
                        outbox.send(block).expect("a thread that listens");
                    }
                    inbox.try_iter().for_each(|block| runner.take_over(block));
                    if operation % 64 == 0 {
                        assert_eq!(device.check(), Ok(()));
                    }
                }
                (runner, inbox)
            })
        };
        let threads: Vec<_> = receivers.into_iter().enumerate().map(spawn).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a thread that ends well"))
            .collect()
    });
    drop(senders);
    for (mut runner, inbox) in ended {
        inbox.iter().for_each(|block| runner.take_over(block));
        runner.end();
    }
    bench.finish();
}

fn threads_plan() -> Plan {
    Plan {
        streams: 2,
        purge: true,
        largest: 50 * MIB,
        live: 100 * MIB,
        ..Plan::default()
    }
}

#[test]
fn random_runs_of_threads_on_one_device() {
    for count in [4, 8] {
        let bench = Bench::new(Settings::default());
        let plan = Plan {
            limits: (count == 8).then_some((300 * MIB, GIB)),
            ..threads_plan()
        };
        threads(&bench, count, 1, 1500, plan);
    }
}

#[test]
fn random_runs_of_threads_on_several_devices() {
    let name = "random_runs_of_threads_on_several_devices";
    let Some(bench) = Bench::with_devices(name, 2, Settings::default()) else {
        return;
    };
    threads(&bench, 6, 2, 1000, threads_plan());
}

mod sim_only {
    use super::{seeds, threads, threads_plan};
    use crate::harness::accounts::identities;
    use crate::harness::gpu::{Bench, GIB, KIB, MIB};
    use crate::harness::random::Random;
    use crate::harness::random_program::{Plan, Runner, Seed};
    use concertina_engine::driver::sys::CUresult;
    use concertina_engine::settings::Settings;
    use concertina_sim::{Config, Pace};

    /// One run: everything about it follows from the seed.
    pub fn run(name: &str, seed: u64, change: impl Fn(&mut Plan, &mut Settings)) {
        let _seed = Seed(seed);
        let mut random = Random::new(seed);
        // Small chunks now and then, so that many are remapped.
        let (granularity, chunk) = match random.below(6) {
            0 => (256 * KIB, 512 * KIB),
            turn => (
                2 * MIB,
                [0, 2 * MIB, 2 * MIB, 8 * MIB, 32 * MIB][turn as usize - 1],
            ),
        };
        let mut settings = Settings {
            chunk_size: chunk as usize,
            ..Settings::default()
        };
        let mut plan = Plan {
            streams: random.between(1, 7),
            largest: [MIB, 30 * MIB, 300 * MIB][random.below(3) as usize],
            live: random.between(20, 900) * MIB,
            share: !random.once_in(4),
            cuda: random.once_in(3),
            destroy: false,
            unknown: false,
            defaults: false,
            foreign: false,
            other_streams_free: false,
            pools: random.once_in(4),
            empty: !random.once_in(3),
            purge: random.once_in(2),
            limits: random.once_in(2).then_some((100 * MIB, GIB)),
            check: random.once_in(8),
        };
        change(&mut plan, &mut settings);
        let config = Config {
            memory: GIB,
            granularity,
            devices: if plan.foreign { 2 } else { 1 },
            peers: plan.foreign,
            ..Config::default()
        };
        let Some(bench) = Bench::simulated(name, config, settings) else {
            return;
        };
        let machine = bench.machine();
        machine.set_pace(match random.below(4) {
            0 => Pace::Held,
            1 => Pace::Late(random.between(1, 60)),
            _ => Pace::Random(seed),
        });
        let mut runner = Runner::new(&bench.gpu, bench.device(), plan, seed);
        runner.run(250);
        assert_eq!(machine.violations(), Vec::<String>::new());
        let figures = bench.device().figures();
        identities(&figures);
        runner.accounts.agree_with(&figures);
        let refused = [&figures.counters, &figures.of_cuda].map(|it| it.ooms);
        assert_eq!(refused, runner.refused);
        assert_eq!(machine.used(0), figures.reserved_bytes());
        bench.device().set_limit(None);
        runner.end();
        bench.finish();
        runner.accounts.agree_when_idle(&bench.device().figures());
    }

    #[test]
    fn random_runs_neither_overlap_nor_race_nor_leak() {
        for seed in seeds(1500) {
            run(
                "random_runs_neither_overlap_nor_race_nor_leak",
                seed,
                |_, _| {},
            );
        }
    }

    #[test]
    fn random_runs_with_expandable_segments_off() {
        for seed in seeds(300) {
            run(
                "random_runs_with_expandable_segments_off",
                seed,
                |plan, settings| {
                    settings.expandable_segments = false;
                    plan.largest = plan.largest.min(100 * MIB);
                },
            );
        }
    }

    #[test]
    fn random_runs_with_streams_created_and_destroyed() {
        for seed in seeds(500) {
            run(
                "random_runs_with_streams_created_and_destroyed",
                seed,
                |plan, _| {
                    plan.destroy = true;
                    plan.streams = plan.streams.max(2);
                },
            );
        }
    }

    #[test]
    fn random_runs_with_streams_the_pool_does_not_know() {
        for seed in seeds(500) {
            let name = "random_runs_with_streams_the_pool_does_not_know";
            run(name, seed, |plan, settings| {
                plan.unknown = true;
                plan.destroy = seed % 2 == 0;
                plan.defaults = seed % 3 == 0;
                plan.foreign = seed % 5 < 2;
                plan.other_streams_free = seed % 7 < 3;
                plan.cuda |= plan.other_streams_free;
                plan.streams = plan.streams.max(2);
                settings.stream_waits = seed % 8 != 7;
            });
        }
    }

    /// Calls that tell how far streams have got, or change what is mapped, fail at random.
    #[test]
    fn random_runs_with_driver_failures() {
        const FUNCTIONS: [&str; 10] = [
            "cuEventRecord",
            "cuEventQuery",
            "cuStreamWaitEvent",
            "cuStreamQuery",
            "cuCtxRecordEvent",
            "cuEventCreate",
            "cuMemUnmap",
            "cuMemMap",
            "cuMemSetAccess",
            "cuMemCreate",
        ];
        for seed in seeds(300) {
            let _seed = Seed(seed);
            let mut random = Random::new(seed);
            let plan = Plan {
                streams: random.between(2, 7),
                largest: [MIB, 30 * MIB, 300 * MIB][random.below(3) as usize],
                live: random.between(20, 900) * MIB,
                unknown: random.once_in(2),
                defaults: random.once_in(2),
                destroy: random.once_in(2),
                foreign: random.once_in(2),
                pools: random.once_in(4),
                purge: random.once_in(2),
                ..Plan::default()
            };
            let config = Config {
                memory: GIB,
                devices: 2,
                peers: true,
                ..Config::default()
            };
            let settings = Settings {
                chunk_size: [0, 2 * MIB, 32 * MIB][random.below(3) as usize] as usize,
                ..Settings::default()
            };
            let name = "random_runs_with_driver_failures";
            let Some(bench) = Bench::simulated(name, config, settings) else {
                return;
            };
            let machine = bench.machine();
            machine.set_pace(match random.below(3) {
                0 => Pace::Held,
                _ => Pace::Random(seed),
            });
            for _ in 0..random.between(1, 40) {
                let function = FUNCTIONS[random.below(FUNCTIONS.len() as u64) as usize];
                // A device that is refused access must not use the memory, which is said.
                if plan.foreign && function == "cuMemSetAccess" {
                    continue;
                }
                let status = [
                    CUresult::CUDA_ERROR_UNKNOWN,
                    CUresult::CUDA_ERROR_OUT_OF_MEMORY,
                ];
                machine.fail(
                    function,
                    random.between(1, 300),
                    status[random.below(2) as usize],
                );
            }
            let mut runner = Runner::new(&bench.gpu, bench.device(), plan, seed);
            runner.run(250);
            assert_eq!(machine.violations(), Vec::<String>::new());
            assert_eq!(bench.device().check(), Ok(()));
            machine.clear_failures();
            runner.end();
            bench.finish();
        }
    }

    #[test]
    fn random_runs_of_threads_with_late_work() {
        for seed in seeds(6) {
            let _seed = Seed(seed);
            let config = Config {
                memory: 2 * GIB,
                devices: 1 + seed as usize % 3,
                ..Config::default()
            };
            let devices = config.devices;
            let name = "random_runs_of_threads_with_late_work";
            let Some(bench) = Bench::simulated(name, config, Settings::default()) else {
                return;
            };
            bench.machine().set_pace(Pace::Random(seed));
            let limits = (devices == 1).then_some((300 * MIB, GIB));
            threads(
                &bench,
                6,
                devices,
                600,
                Plan {
                    limits,
                    ..threads_plan()
                },
            );
        }
    }
}
