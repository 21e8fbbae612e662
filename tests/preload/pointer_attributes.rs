//! Pointer attributes and address ranges.

use crate::harness::cases;

cases! {
    pointer_attributes_of_the_programs_own_mappings: runs "own_mappings", pool_serves 1, notices_broken ["handles", "own handles"];
    pointer_attributes_of_blocks: runs "pointer_attributes 1024", pool_serves 3, notices_broken ["range", "attributes"];
}
