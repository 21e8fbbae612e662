//! Threads that allocate and free at once.

use crate::harness::{HELD, cases};

cases! {
    threads_allocate_and_free: runs "threads", pool_serves 1600, notices_broken ["pool"];
    threads_and_streams_of_every_kind: runs "threads_and_streams", on [HELD], notices_broken ["wait"];
}
