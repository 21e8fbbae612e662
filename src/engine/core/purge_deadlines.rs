//! When purgeable blocks go back to the driver.

use super::block::BlockId;
use std::collections::HashMap;

/// When purgeable blocks go back to the driver, on the caller's clock. The blocks themselves lie in bins of
/// the lists of the streams that freed them.
#[derive(Default)]
pub struct PurgeDeadlines {
    pub(super) due: HashMap<BlockId, u64>,
}

impl PurgeDeadlines {
    pub fn len(&self) -> usize {
        self.due.len()
    }

    pub fn contains(&self, block: BlockId) -> bool {
        self.due.contains_key(&block)
    }
}
