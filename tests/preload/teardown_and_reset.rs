//! The end of contexts: cudaDeviceReset, primary contexts, and contexts of the program.

use crate::harness::cases;

cases! {
    context_of_the_programs_own: runs "own_context", pool_serves 2, notices_broken ["context"];
    device_reset_frees_all_memory: runs "device_reset", pool_serves 7, notices_broken ["reset"];
    primary_context_release_frees_all_memory: runs "primary_context_release", pool_serves 6, notices_broken ["reset"];
}
