//! Several GPUs.

use crate::harness::{HELD, PEERS, TWO_GPUS, cases};

cases! {
    several_gpus_and_their_ordinals: runs "several_gpus", on [TWO_GPUS, PEERS], pool_serves 3, notices_broken ["elsewhere"];
    several_gpus_free_async_on_another_devices_stream: runs "free_async_on_another_device", on [HELD, TWO_GPUS, PEERS];
}
