//! What a machine is made of: fixed when it is made, the same for all its devices.

/// The make of a [`Machine`](crate::Machine).
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
    /// Whether the virtual memory calls work; without, they answer `CUDA_ERROR_NOT_SUPPORTED`.
    pub virtual_memory: bool,
    /// Whether each device can reach the others' memory.
    pub peers: bool,
    /// Though they say so, none gets access to memory of another that is mapped, as where the system does
    /// not let them.
    pub peers_refuse: bool,
    /// Real mappings: device addresses can be used by host code and aliases show the same bytes.
    /// Otherwise addresses are only numbers, mapping is a table, and memory is backed when touched.
    pub host_pointers: bool,
    /// Memory that a device takes and keeps for the sake of kernels when the first one is launched, as for
    /// what is local to their threads.
    pub kernels: u64,
    /// Whether order, ownership and unmapping are checked. Off saves the bookkeeping.
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
