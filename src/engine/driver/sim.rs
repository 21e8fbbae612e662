//! The table of the simulated GPU, for machines without one.

use super::Functions;
use super::functions::driver_functions;

macro_rules! simulated {
    ($($name:ident: fn($($argument:ident: $kind:ty),*);)*) => {
        Functions { simulated: true, $($name: concertina_sim::$name,)* }
    };
}

/// The simulated GPU's functions. They act on the machine that is bound to the calling thread.
pub fn sim() -> Functions {
    driver_functions!(simulated)
}
