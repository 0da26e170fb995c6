//! Blends of several data sets, by weight or until each data set is exhausted.

mod blending_indices;
mod samples;

pub use blending_indices::{
    build_blending_indices, build_exhaustive_blending_indices, normalize, sizes,
};
pub use samples::BlendedDataset;

#[cfg(test)]
mod tests;
