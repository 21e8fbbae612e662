//! The simulated GPU's table.
