//! How a pool takes memory: what settings decide, and what only experiments change.

/// How a pool takes memory.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// Growable segments of mapped memory; plain segments otherwise.
    pub expandable: bool,
    /// The largest chunk that growth creates, in bytes; 0 lets the pool choose.
    pub chunk: u64,
    /// Cross-stream reuse: streams may be made to wait on the GPU for what others have freed.
    pub waits: bool,
    /// What no setting changes.
    pub tuning: Tuning,
}

/// What experiments change (`tests/bench/policy.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// The slack: by how much reserved memory may exceed the peak of live memory, in thousandths, before free
    /// chunks are remapped rather than new ones created. Nine keeps every recorded trace within 1 % where the
    /// free blocks allow it (`tests/replay.rs`).
    pub slack: u64,
    /// A chunk is 1/share of the reserved memory: costs are per chunk and waste is per chunk size, and about
    /// a thousandth keeps both in proportion. With it gpt2_varlen in `tests/traces` takes 0.14 s of driver
    /// calls to grow to 33 GB (H100) and reserves 1.009 of what is live.
    pub share: u64,
    /// The remap budget: how much of the program's time remapping may take, in thousandths, before memory
    /// that is too fragmented for the slack grows instead, within bounds. At 20, 2000 blocks of up to 16 MiB
    /// that are replaced at random reach their steady time after 0.2 s (H200).
    pub remap_share: u64,
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning {
            slack: 9,
            share: 896,
            remap_share: 20,
        }
    }
}
