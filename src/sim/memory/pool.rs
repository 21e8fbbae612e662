//! The driver's memory pools, for stream-ordered allocation.

/// One pool. The simulated GPU releases freed memory at once, so a pool holds only what is in use; attributes
/// that programs set are kept to be read again.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    pub device: usize,
    /// Made by `cuMemPoolCreate`, so that it can be destroyed.
    pub explicit: bool,
    /// Destroyed: it goes with its last allocation.
    pub closed: bool,
    pub used: u64,
    pub used_high: u64,
    pub reserved_high: u64,
    pub release_threshold: u64,
    /// Whether memory may be reused by following events, opportunistically, with new dependencies.
    pub reuse: [i32; 3],
}

impl Pool {
    pub fn new(device: usize, explicit: bool) -> Pool {
        Pool {
            device,
            explicit,
            reuse: [1; 3],
            ..Pool::default()
        }
    }

    /// Counts an allocation.
    pub fn take(&mut self, bytes: u64) {
        self.used += bytes;
        self.used_high = self.used_high.max(self.used);
        self.reserved_high = self.reserved_high.max(self.used);
    }

    /// Counts one less.
    pub fn give_back(&mut self, bytes: u64) {
        self.used -= bytes;
    }
}
