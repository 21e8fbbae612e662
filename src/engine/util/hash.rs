//! Hashing of addresses, handles and sizes for the engine's own tables.

/// Fibonacci hashing: multiplies by 2^64 divided by the golden ratio. The upper bits are the hash; take the
/// index of a table of 2^n entries from the upper n.
#[inline]
pub fn fibonacci(value: u64) -> u64 {
    value.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}
