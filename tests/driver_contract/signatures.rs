//! Signatures: the simulated functions are those that the engine calls, with the same arguments.

use cudarc::driver::sys::*;
use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

macro_rules! compare {
    ($($name:ident: fn($($argument:ident: $type:ty),*);)*) => {
        $(const _: unsafe extern "C" fn($($type),*) -> u32 = concertina_sim::$name;)*
        const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}
concertina_engine::driver::driver_functions!(compare);

#[test]
fn signature_of_every_function_and_its_count() {
    let machine = concertina_sim::Machine::new(concertina_sim::Config::default());
    for name in NAMES {
        assert_eq!(machine.calls(name), 0);
    }
}
