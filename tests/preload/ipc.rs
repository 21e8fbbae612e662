//! IPC: memory of one process in another, by `cudaIpcGetMemHandle`.

use crate::harness::{Case, PEERS, TWO_GPUS, Trial, cases};
use crate::library::{breakable_library, library};
use std::path::Path;

cases! {
    ipc_memory_in_another_process: runs "ipc", pool_serves 5, notices_broken ["ipc", "ipc offset", "ipc count"];
    ipc_on_two_devices: runs "ipc devices", on [TWO_GPUS, PEERS], pool_serves 5, notices_broken ["ipc", "ipc offset"];
    ipc_with_expandable_segments_off: runs "ipc", set "expandable_segments:False", pool_serves 5, notices_broken ["ipc", "ipc offset"];
}

/// A process without the library cannot open a handle of one that has it: a line says so and names the
/// setting `ipc:True`, with which handles are CUDA's own.
#[test]
fn ipc_handle_that_others_cannot_open_is_explained() {
    let case = Case::of("ipc_unopened_handle");
    let trial = Trial::new("handle", &case);
    let (bare, _) = trial.run(None, &[]);
    let (said, pooled) = trial.run(Some(library()), &[]);
    let explained: Vec<&str> = said.lines().filter(|it| !bare.contains(it)).collect();
    assert!(
        explained.len() == 1 && explained[0].contains("CONCERTINA_CONF=ipc:True"),
        "{said}"
    );
    assert_eq!(pooled, 1);
    let with = [("CONCERTINA_CONF", "ipc:True")];
    assert_eq!(trial.run(Some(library()), &with), (bare, 0));
}

/// The handle of a freed block cannot be opened. CUDA's own may, so that there is nothing to compare with.
#[test]
fn ipc_handle_ends_with_its_memory() {
    let case = Case::of("ipc freed");
    let trial = Trial::new("ipc-freed", &case);
    let opens = |library: &Path, environment: &[(&str, &str)]| {
        let (said, _) = trial.run(Some(library), environment);
        let line = said.lines().find(|it| it.starts_with("what was freed"));
        line.map(str::to_string)
    };
    let whole = opens(library(), &[]);
    assert_eq!(whole.as_deref(), Some("what was freed opens: 0"));
    let broken = opens(breakable_library(), &[("CONCERTINA_BREAK", "ipc freed")]);
    assert_eq!(broken.as_deref(), Some("what was freed opens: 1"));
}
