//! Bytes that an arena holds from the driver, counted as PyTorch counts them for a private pool.

/// Reserved bytes of one arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReservedBytes {
    /// Now.
    pub current: u64,
    /// The most since the last reset of peaks.
    pub peak: u64,
    /// Taken from the driver since the last reset of sums.
    pub allocated: u64,
    /// Returned to the driver since then.
    pub freed: u64,
}

impl ReservedBytes {
    /// Counts bytes that were taken from the driver.
    pub fn add(&mut self, bytes: u64) {
        self.current += bytes;
        self.allocated += bytes;
        self.peak = self.peak.max(self.current);
    }

    /// Counts bytes that were returned to the driver.
    pub fn remove(&mut self, bytes: u64) {
        self.current -= bytes;
        self.freed += bytes;
    }
}
