//! The suite can fail: programs that break their word, and what notices. A card punishes such
//! mistakes rarely and late, so these run on the simulated GPU only.

mod sim_only {
    use crate::harness::gpu::{Bench, MIB};
    use concertina_engine::settings::Settings;
    use concertina_sim::{Config, Pace};

    fn bench(name: &str) -> Option<Bench> {
        Bench::simulated(name, Config::default(), Settings::default())
    }

    fn only_violation(bench: &Bench, part: &str) {
        let violations = bench.machine().violations();
        assert!(
            violations.len() == 1 && violations[0].contains(part),
            "{violations:?}"
        );
    }

    /// The other stream's write is not recorded, so the pool hands the block out again under it.
    #[test]
    fn a_use_that_is_not_recorded_is_noticed() {
        let Some(bench) = bench("a_use_that_is_not_recorded_is_noticed") else {
            return;
        };
        let gpu = &bench.gpu;
        bench.machine().set_pace(Pace::Held);
        let (a, b) = (gpu.stream(), gpu.stream());
        let block = bench.allocate(4 * MIB, a);
        gpu.fill(block, 4 * MIB, 1, a);
        assert!(gpu.order(a, b));
        gpu.fill(block, 4 * MIB, 2, b);
        bench.free(block);
        let again = bench.allocate(4 * MIB, a);
        assert_eq!(again, block);
        assert_eq!(bench.machine().violations(), Vec::<String>::new());
        gpu.fill(again, 4 * MIB, 3, a);
        only_violation(&bench, "unordered reuse");
        bench.free(again);
        bench.finish();
    }

    #[test]
    fn a_use_after_free_is_noticed() {
        let Some(bench) = bench("a_use_after_free_is_noticed") else {
            return;
        };
        let stream = bench.gpu.stream();
        let (block, wall) = (bench.allocate(4 * MIB, stream), bench.allocate(512, stream));
        bench.free(block);
        bench.gpu.fill(block, 512, 1, stream);
        only_violation(&bench, "touches freed memory");
        bench.free(wall);
        bench.finish();
    }

    /// The pool believes the free; the program uses the memory on, unordered, when it is unmapped.
    #[test]
    fn memory_given_back_under_running_work_is_noticed() {
        let Some(bench) = bench("memory_given_back_under_running_work_is_noticed") else {
            return;
        };
        let (gpu, machine) = (&bench.gpu, bench.machine());
        machine.set_pace(Pace::Held);
        let stream = gpu.stream();
        let block = bench.allocate(4 * MIB, stream);
        bench.free(block);
        bench.device().empty_cache();
        machine.unclaimed_ok(true);
        gpu.fill(block, 512, 1, stream);
        gpu.settle();
        only_violation(&bench, "touched unmapped memory");
    }

    #[test]
    fn two_owners_of_one_byte_are_noticed() {
        let Some(bench) = bench("two_owners_of_one_byte_are_noticed") else {
            return;
        };
        let block = bench.allocate(4 * MIB, bench.gpu.stream());
        bench.gpu.claim(block + 1024, 512, 77);
        only_violation(&bench, "overlap");
    }
}
