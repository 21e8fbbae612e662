//! The configuration of a machine: fixed when it is created, the same for all its devices.

/// The configuration of a [`Machine`](crate::Machine).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// How many devices `cuDeviceGetCount` finds; at most 64.
    pub devices: usize,
    /// Physical memory of each device, in bytes.
    pub memory: u64,
    /// Bytes of addresses that reservations of `cuMemAddressReserve` may take together: a process has 47 bits
    /// of them, which the driver shares with the host's own mappings.
    pub addresses: u64,
    /// Minimum and recommended granularity of the virtual memory calls; a power of two of at least
    /// a page.
    pub granularity: u64,
    /// Whether the virtual memory calls work; otherwise they return `CUDA_ERROR_NOT_SUPPORTED`.
    pub virtual_memory: bool,
    /// Whether each device can reach the others' memory.
    pub peers: bool,
    /// Mapping another device's memory fails although `peers` is reported, as where the system does not allow
    /// it.
    pub peers_refuse: bool,
    /// Real mappings: device addresses can be used by host code and aliases show the same bytes.
    /// Otherwise addresses are only numbers, mapping is a table, and memory is backed when touched.
    pub host_pointers: bool,
    /// Bytes that a device allocates when the first kernel is launched and keeps, as for the threads' local
    /// memory.
    pub kernels: u64,
    /// Whether order, ownership and unmapping are checked. Off saves time.
    pub checks: bool,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            devices: 1,
            memory: 80 << 30,
            addresses: 1 << 47,
            granularity: 2 << 20,
            virtual_memory: true,
            peers: false,
            peers_refuse: false,
            host_pointers: false,
            kernels: 0,
            checks: true,
        }
    }
}
