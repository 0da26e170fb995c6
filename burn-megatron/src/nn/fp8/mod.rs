//! Linear layers that multiply in 8 bits.

use std::sync::{Arc, Mutex, PoisonError};

mod config;
mod weight;

pub use config::{
    AmaxChoice, BlockScaling, CurrentScaling, DelayedScaling, Fp8Config, Fp8Format, Fp8Layers,
    Fp8Recipe,
};
pub use weight::{QuantizedWeight, WeightQuantizer};

/// The 8-bit layers of one rank's part of a model.
#[derive(Clone, Debug, Default)]
pub struct Fp8 {
    weights: Arc<Mutex<Vec<(String, Arc<dyn WeightQuantizer>)>>>,
}

impl Fp8 {
    /// The paths of the weights in 8 bits, such as `blocks.0.mlp.up.weight`, each with how it is
    /// quantised.
    pub fn weights(&self) -> Vec<(String, Arc<dyn WeightQuantizer>)> {
        let weights = self.weights.lock();
        weights.unwrap_or_else(PoisonError::into_inner).clone()
    }
}
