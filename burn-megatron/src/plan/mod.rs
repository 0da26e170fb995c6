//! What a layout costs before it runs.
//!
//! - [`flops`]: the operations of a model, as published tables count them.
//! - [`hardware`]: what a device computes, moves and exchanges per second.
//! - [`profile`]: what the layers of a rank compute, send and keep.

pub mod flops;
pub mod hardware;
pub mod memory;
pub mod profile;
pub mod tape;
