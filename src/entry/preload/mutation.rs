//! Deliberate mistakes, so that each test of the preloaded library can be seen to fail.
//!
//! Only in a library built with the feature `breaks`, which is for tests: there `CONCERTINA_BREAK` names the one
//! mistake to make. In the library that people use every question is `false`, and costs nothing.

/// Whether to make this mistake.
#[cfg(feature = "breaks")]
pub fn is_on(mistake: &str) -> bool {
    std::env::var_os("CONCERTINA_BREAK").is_some_and(|name| name == mistake)
}

/// Whether to make this mistake: never.
#[cfg(not(feature = "breaks"))]
#[inline(always)]
pub fn is_on(_: &str) -> bool {
    false
}
