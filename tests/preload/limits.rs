//! Limits: `limit` counts all memory of the program.

use crate::harness::{Case, Trial, report};
use crate::library::library;

#[test]
fn limit_is_all_the_memory_there_is() {
    let case = Case {
        settings: "limit:64MiB",
        ..Case::of("limit")
    };
    let trial = Trial::new("limit", &case);
    let (said, pooled) = trial.run(Some(library()), &[]);
    assert_eq!(
        said,
        "cudaMemGetInfo(&free, &total): 0\n\
         64 of 64 MiB\n\
         cudaMallocPitch(&one, &pitch, MIB, 65): 2\n\
         cudaMallocPitch(&one, &pitch, 2 * MIB, 30): 0\n\
         cudaMemGetInfo(&free, &total): 0\n\
         4 of 64 MiB\n\
         cudaFree(one): 0\n\
         0 failed\n\
         cudaMalloc(&one, 40 * MIB): 0\n\
         cudaMemGetInfo(&free, &total): 0\n\
         24 of 64 MiB\n\
         cudaMalloc(&two, 40 * MIB): 2\n\
         cudaGetLastError(): 2\n\
         cudaMalloc(&two, 24 * MIB): 0\n\
         cudaMallocAsync(&one, 8 * MIB, NULL): 2\n\
         cudaFree(two): 0\n\
         cudaMallocAsync(&one, 8 * MIB, NULL): 0\n\
         cudaGetLastError(): 2\n\
         cuMemAlloc_v2(&address, 17 * MIB): 2\n\
         cuMemAlloc_v2(&address, 16 * MIB): 0\n\
         exit status: 0"
    );
    assert_eq!(pooled, 65);
    let relaxed = [("CONCERTINA_CONF", "limit:64MiB,free:relaxed")];
    assert_eq!(trial.run(Some(library()), &relaxed), (said.clone(), 65));
    // Also what the driver hands out in the pool's place.
    let driver_memory = [("CONCERTINA_CONF", "limit:64MiB,ipc:True")];
    assert_eq!(trial.run(Some(library()), &driver_memory), (said, 1));
}

#[test]
fn limit_counts_what_the_driver_allocates() {
    let case = Case {
        settings: "limit:64MiB",
        ..Case::of("limit_counts_driver_memory")
    };
    let trial = Trial::new("limit-driver", &case);
    let report_file = trial.scratch.path().join("report");
    let report_to = [("STANDIN_REPORT", report_file.to_str().expect("text"))];
    let (said, pooled) = trial.run(Some(library()), &report_to);
    let most = report(&report_file).into_iter().find(|it| it.0 == "most");
    assert_eq!(most, Some(("most".to_string(), 64 << 20)));
    assert_eq!(
        said,
        "cudaStreamCreateWithFlags(&stream, NON_BLOCKING): 0\n\
         cudaMalloc(&one, 8 * MIB): 0\n\
         cudaStreamBeginCapture(stream, RELAXED): 0\n\
         cudaMalloc(&two, 40 * MIB): 0\n\
         cudaMemGetInfo(&free, &total): 0\n\
         16 of 64 MiB\n\
         cudaMalloc(&three, 40 * MIB): 2\n\
         cudaStreamEndCapture(stream, &graph): 0\n\
         cudaFree(one): 0\n\
         cudaFree(two): 0\n\
         cudaMemGetInfo(&free, &total): 0\n\
         64 of 64 MiB\n\
         cudaMalloc(&one, 64 * MIB): 0\n\
         cudaFree(one): 0\n\
         cudaStreamBeginCapture(stream, RELAXED): 0\n\
         cudaMalloc(&two, MIB): 0\n\
         cudaStreamEndCapture(stream, &graph): 0\n\
         cudaMalloc(&two, 40 * MIB): 0\n\
         cudaDeviceReset(): 0\n\
         cudaMalloc(&two, MIB): 0\n\
         cudaMemGetInfo(&free, &total): 0\n\
         62 of 64 MiB\n\
         exit status: 0"
    );
    // One of them in a capture, of the pool's cached memory.
    assert_eq!(pooled, 5);
}
