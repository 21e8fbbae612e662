//! Captures that nobody announces, for which the whole device is waited for in another way. That they are to
//! be expected is said of a whole process, so that each test is one of its own.

mod sim_only {
    use crate::harness::gpu::{Bench, GIB, MIB};
    use concertina_engine::device::captures;
    use concertina_engine::settings::Settings;
    use concertina_sim::Config;
    use std::process::Command;

    /// Runs the test of this name in a process in which captures begin unseen. True in that process.
    fn in_a_process_of_its_own(name: &str) -> bool {
        const UNSEEN: &str = "CONCERTINA_TEST_UNSEEN";
        if std::env::var_os(UNSEEN).is_some() {
            captures::expect_unseen();
            return true;
        }
        let test = std::env::current_exe().expect("a test has a path");
        let arguments = ["--exact", name];
        let mut command = Command::new(test);
        let status = command.args(arguments).env(UNSEEN, "1").status();
        assert!(status.expect("the test runs").success());
        false
    }

    /// All of the device's memory is freed, on a stream that has ended: to wait for that takes no memory.
    #[test]
    fn unseen_captures_leave_a_full_device_to_be_waited_for() {
        let name = "captures::sim_only::unseen_captures_leave_a_full_device_to_be_waited_for";
        if !in_a_process_of_its_own(name) {
            return;
        }
        let config = Config {
            memory: GIB,
            ..Config::default()
        };
        let bench = Bench::simulated("unseen", config, Settings::default()).expect("a GPU");
        let (gpu, a, c) = (&bench.gpu, bench.gpu.stream(), bench.gpu.stream());
        let blocks: Vec<u64> = (0..64).map(|_| bench.allocate(16 * MIB, a)).collect();
        blocks.iter().for_each(|block| gpu.fill(*block, MIB, 1, a));
        gpu.destroy(a);
        blocks.into_iter().for_each(|block| bench.free(block));
        let block = bench.allocate(512 * MIB, c);
        bench.free(block);
        bench.finish();
    }
}
