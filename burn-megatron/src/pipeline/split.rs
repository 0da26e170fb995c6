//! Which layers make up a stage.

use std::ops::Range;

/// What is in one stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageLayout {
    /// Whether it begins with the embedding.
    pub embedding: bool,
    /// Its layers.
    pub layers: Range<usize>,
    /// Whether it ends with the output layer and the loss.
    pub loss: bool,
}

impl StageLayout {
    /// The only stage of a model that is not cut.
    pub fn whole(layers: usize) -> Self {
        Self {
            embedding: true,
            layers: 0..layers,
            loss: true,
        }
    }
}

/// TEMP
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{layers} layers cannot be split evenly over {stages} stages")]
pub struct SplitError {
    layers: usize,
    stages: usize,
}

/// TEMP
pub fn split_evenly(layers: usize, stages: usize) -> Result<Vec<StageLayout>, SplitError> {
    if stages == 0 || layers % stages != 0 {
        return Err(SplitError { layers, stages });
    }
    let n = layers / stages;
    Ok((0..stages)
        .map(|s| StageLayout {
            embedding: s == 0,
            layers: s * n..(s + 1) * n,
            loss: s + 1 == stages,
        })
        .collect())
}
