//! cudaMalloc and cudaFree: sizes, errors, waiting, and devices that cannot map memory.

use crate::harness::{Case, HELD, NESTED_CALLS, Trial, cases};
use crate::library::library;

cases! {
    cuda_malloc_sizes_and_errors: runs "cuda_malloc_sizes", pool_serves 9, notices_broken ["zero"];
    cuda_free_of_wrong_pointers: runs "wrong_frees", pool_serves 2, notices_broken ["unknown"];
    cuda_free_waits_for_all_work: runs "cuda_free_waits", on [HELD], pool_serves 4, notices_broken ["wait"];
    cuda_malloc_while_every_driver_call_allocates: runs "runtime_symbols", on [NESTED_CALLS], notices_broken ["inside"];
}

/// On a device without virtual memory, and with `expandable_segments:False`.
#[test]
fn cuda_malloc_where_memory_cannot_be_mapped() {
    for (name, variable) in [
        ("unmappable", ("STANDIN_VIRTUAL_MEMORY", "0")),
        ("plain", ("CONCERTINA_CONF", "expandable_segments:False")),
    ] {
        for program in [
            "runtime_symbols",
            "wrong_frees",
            "cuda_free_waits",
            "malloc_async",
            "device_reset",
        ] {
            let case = Case::of(program);
            let trial = Trial::new(&format!("{name}-{program}"), &case);
            let variables = [variable, HELD];
            let (bare, _) = trial.run(None, &variables);
            let (preloaded, pooled) = trial.run(Some(library()), &variables);
            let said = "concertina: device 0 (Simulated GPU) cannot map memory: plain cudaMalloc \
                        segments are used there\n";
            assert_eq!(preloaded.replace(said, ""), bare, "{program}, {name}");
            assert!(pooled > 0, "{program}, {name}");
        }
    }
}
