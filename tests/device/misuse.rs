//! The simulated GPU detects programs that misuse memory, so that the tests here can fail. A card punishes
//! such mistakes rarely and late.

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

    /// Another stream's write is not recorded, so the pool hands the block out while it runs.
    #[test]
    fn misuse_by_an_unrecorded_stream_is_detected() {
        let Some(bench) = bench("misuse_by_an_unrecorded_stream_is_detected") else {
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
    fn misuse_after_free_is_detected() {
        let Some(bench) = bench("misuse_after_free_is_detected") else {
            return;
        };
        let stream = bench.gpu.stream();
        let (block, separator) = (bench.allocate(4 * MIB, stream), bench.allocate(512, stream));
        bench.free(block);
        bench.gpu.fill(block, 512, 1, stream);
        only_violation(&bench, "touches freed memory");
        bench.free(separator);
        bench.finish();
    }

    /// The program goes on using a block that it has freed, while the pool unmaps it.
    #[test]
    fn misuse_of_unmapped_memory_is_detected() {
        let Some(bench) = bench("misuse_of_unmapped_memory_is_detected") else {
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
    fn misuse_by_two_owners_of_one_byte_is_detected() {
        let Some(bench) = bench("misuse_by_two_owners_of_one_byte_is_detected") else {
            return;
        };
        let block = bench.allocate(4 * MIB, bench.gpu.stream());
        bench.gpu.claim(block + 1024, 512, 77);
        only_violation(&bench, "overlap");
    }
}
