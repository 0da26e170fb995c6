//! What a layout costs before it runs.

pub mod profile;
