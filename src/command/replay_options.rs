//! The options of `concertina replay`.

use std::path::PathBuf;

/// What to replay, and how.
pub struct Options {
    pub files: Vec<PathBuf>,
    pub driver: Choice,
    pub limit_bytes: Option<u64>,
    pub min_limit: bool,
    pub passes: u32,
    /// How many events later the work of each simulated stream is executed.
    pub late: Option<u32>,
    pub json: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            files: Vec::new(),
            driver: Choice::Auto,
            limit_bytes: None,
            min_limit: false,
            passes: 3,
            late: None,
            json: false,
        }
    }
}

/// The driver that `--driver` names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    Auto,
    Sim,
    Cuda,
}
