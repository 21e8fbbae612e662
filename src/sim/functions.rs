//! The table of the simulated GPU's functions.

use concertina_driver::{Functions, driver_functions};

macro_rules! simulated {
    ($($name:ident: fn($($argument:ident: $kind:ty),*);)*) => {
        Functions { simulated: true, $($name: crate::$name,)* }
    };
}

/// The simulated GPU as a table of driver functions. They act on the [`Machine`](crate::Machine) that is
/// bound to the calling thread.
pub fn functions() -> Functions {
    driver_functions!(simulated)
}
