//! Why a request could not be met.

use super::gpu::Refusal;

/// A request that could not be met, and what the pool looked like. All sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The size of the request.
    pub asked: u64,
    /// Live blocks, of both origins.
    pub live: u64,
    /// Live blocks that CUDA's functions allocated.
    pub live_cuda: u64,
    /// Reserved from the driver.
    pub reserved: u64,
    /// The largest free block.
    pub largest: u64,
    /// Reserved by other arenas and free there: this request cannot have it.
    pub other_arenas: u64,
    /// The size of the chunks that memory is reserved and remapped in; 0 where it is not mapped.
    pub chunk: u64,
    /// What the driver, or the limit, answered.
    pub refusal: Refusal,
}
