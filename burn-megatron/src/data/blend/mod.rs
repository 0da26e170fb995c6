//! Several data sets as one, by weight or until each is used up.

mod greedy;
mod samples;

pub use greedy::{blend, blend_exhaustive, normalize, sizes};
pub use samples::BlendedDataset;

#[cfg(test)]
mod tests;
