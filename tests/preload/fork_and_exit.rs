//! Child processes, and the ways a process ends.

use crate::harness::cases;

cases! {
    fork_and_return_from_main: runs "fork_and_exit return", pool_serves 2, notices_broken ["pool"];
    fork_and_exit: runs "fork_and_exit exit", pool_serves 2, notices_broken ["pool"];
    fork_and_exit_at_once: runs "fork_and_exit _exit";
    fork_and_exit_in_a_thread: runs "fork_and_exit thread", pool_serves 2, notices_broken ["pool"];
    fork_and_exec: runs "fork_and_exit exec", pool_serves 1, notices_broken ["pool"];
}
