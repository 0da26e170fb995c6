//! The load of the experts in a training step.

use crate::nn::moe::RouterLossKind;

/// What the routers of all pipeline stages reported of a training step.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertMetrics {
    /// The step, from 0.
    pub step: usize,
    /// The layers with experts, in the order of the model.
    pub layers: Vec<LayerLoad>,
}

/// One layer with experts.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerLoad {
    /// Its path in the model, such as `blocks.0.moe`.
    pub layer: String,
    /// The pairs of a token and an expert that each expert computed, over all ranks and micro-batches of the
    /// step.
    pub load: Vec<u64>,
    /// The pairs that a capacity dropped.
    pub dropped: u64,
    /// The mean of each loss of the router, with its coefficient.
    pub losses: Vec<(RouterLossKind, f64)>,
}
