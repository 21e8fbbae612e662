//! Purge: idle memory returns to the driver after `idle_release_ms`.

use crate::harness::{NESTED_CALLS, cases};

cases! {
    purge_while_every_driver_call_allocates: runs "purge", on [NESTED_CALLS], set "idle_release_ms:20", notices_broken ["inside"];
}
