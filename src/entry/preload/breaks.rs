//! Deliberate mistakes, one for each behaviour that the tests guard, so that each of them can be seen
//! to fail. Only in a library built with the feature `breaks`, which is for tests; there
//! `CONCERTINA_BREAK` names the one mistake to make.

/// Whether this is the behaviour to break.
#[cfg(feature = "breaks")]
pub fn is_broken(behaviour: &str) -> bool {
    std::env::var_os("CONCERTINA_BREAK").is_some_and(|name| name == behaviour)
}

/// Nothing is broken in the library that people use.
#[cfg(not(feature = "breaks"))]
#[inline(always)]
pub fn is_broken(_: &str) -> bool {
    false
}
