//! Out of memory: the program's allocations, and retries of what the driver allocates itself.

use crate::harness::{
    Case, HELD, KERNELS_300_MB, MEMORY_1_GB, MEMORY_512_MB, TWO_GPUS, cases, compare,
};

cases! {
    out_of_memory_and_enough_again_after_frees: runs "out_of_memory", on [MEMORY_512_MB];
    out_of_memory_in_driver_allocations_is_retried: runs "out_of_memory_retry", on [MEMORY_1_GB, KERNELS_300_MB], notices_broken ["room"];
    out_of_memory_in_driver_allocations_is_retried_with_free_relaxed: runs "out_of_memory_retry", on [MEMORY_1_GB, KERNELS_300_MB], set "free:relaxed", notices_broken ["room"];
}

/// What only a machine without a GPU shows, or a GPU only sometimes.
#[test]
fn out_of_memory_in_managed_memory_late_work_and_on_another_device_is_retried() {
    const CASES: [(&str, &[(&str, &str)]); 3] = [
        ("out_of_memory_retry managed", &[MEMORY_1_GB]),
        ("out_of_memory_retry held", &[MEMORY_1_GB, HELD]),
        ("out_of_memory_retry devices", &[MEMORY_1_GB, TWO_GPUS]),
    ];
    for (command, gpu) in CASES {
        let case = Case {
            gpu,
            notices_broken: &["room"],
            ..Case::of(command)
        };
        compare(&command.replace(' ', "-"), &case);
    }
}
