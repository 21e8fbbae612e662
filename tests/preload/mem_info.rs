//! cudaMemGetInfo.

use crate::harness::cases;

cases! {
    mem_info_of_free_memory: runs "mem_info", pool_serves 9, notices_broken ["info"];
}
