//! Memory that the process keeps beside the pools, for whoever has none: see `announce`.

use std::sync::OnceLock;

/// What whoever keeps memory beside the pools can do with it. Both may be called under a device's lock,
/// and give back what they can without waiting for the GPU.
#[derive(Clone, Copy)]
pub struct Keeper {
    /// Gives all of it back to the driver. False where there was nothing.
    pub give_back: fn() -> bool,
    /// The same of what nobody has asked for since it was called four times.
    pub tend: fn(),
}

static KEEPER: OnceLock<Keeper> = OnceLock::new();

/// Somebody keeps memory from now on. Only the first one counts.
pub fn announce(keeper: Keeper) {
    let _ = KEEPER.set(keeper);
}

/// Has what is kept given back; false where there was nothing.
pub(super) fn give_back() -> bool {
    KEEPER.get().is_some_and(|keeper| (keeper.give_back)())
}

/// To be called four times in the time that memory may lie idle.
pub(super) fn tend() {
    if let Some(keeper) = KEEPER.get() {
        (keeper.tend)();
    }
}
