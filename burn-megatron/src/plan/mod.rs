//! What a layout costs before it runs.

pub mod flops;
pub mod memory;
pub mod profile;
pub mod tape;
