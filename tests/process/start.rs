//! Start: what of the environment is read.

use crate::harness::{environment, files, program, run, scratch};
use crate::library::{library, output};
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Command;

#[test]
fn start_with_elevated_privileges_ignores_the_environment() {
    scratch!(scratch, file);
    // Set-group-ID is enough, and root may choose the group.
    let elevated = scratch.path().join("elevated");
    fs::copy(program(), &elevated).expect("ours");
    let other = output(Command::new("id").arg("--groups"));
    let own = output(Command::new("id").arg("--group"));
    let other = other
        .split_whitespace()
        .find(|group| *group != own.trim())
        .unwrap_or("65534");
    if chown(&elevated, None, other.parse().ok()).is_err() {
        println!("SKIP: the user is in one group alone, so no program can be given another");
        return;
    }
    fs::set_permissions(&elevated, fs::Permissions::from_mode(0o2755)).expect("ours");
    let mut command = Command::new(&elevated);
    environment(command.arg(library()).arg("exit"), &file);
    // Without the stand-in there may be no memory to be had; the case says so by 99.
    let status = run(command).status.code();
    assert!(matches!(status, Some(3 | 99)), "{status:?}");
    assert_eq!(files(scratch.path()), ["elevated"]);
}
