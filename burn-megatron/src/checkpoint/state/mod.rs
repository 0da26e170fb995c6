//! The state of a run. A checkpoint saves this state, and the run resumes from it.
//!
//! Each rank writes some slices of the optimized weights and of the optimizer state ([`write_items`]), so that each
//! element is written once. The bias of each router is also written as a tensor. An object is written for each FP8
//! layer with delayed scaling. The rest of the state is a [`RunState`]. To resume, a rank reads the slices that it
//! optimizes. The complete weights are then gathered from the ranks that optimize them.

pub mod buffers;
mod check;
mod error;
mod read;
mod snapshot;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Checkpoint, TensorSource};
pub use crate::data_parallel::layout::{WriteItem, write_items};
pub use crate::optim::{EMA, FIRST, SECOND};
use crate::optim::{LossScalerState, SpikeWindow, StepCount};

pub use check::{ModelKeys, agree, check};
pub use error::StateError;
pub use read::BucketReader;
pub use snapshot::Snapshot;

/// The prefix of the keys of weights. The path of the weight follows the prefix.
pub const MODEL: &str = "model/";

/// The prefix of the keys of the objects with the scales of FP8 layers. The path of the layer follows the prefix.
pub const FP8: &str = "fp8/";

/// The state of a run, except the tensors and the scales of FP8 layers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// The number of steps that were run so far. `taken` is also the step of the optimizer and of the learning rate
    /// schedule.
    pub count: StepCount,
    /// The number of samples consumed so far, including the samples of skipped steps. It is also the index of the next
    /// sample.
    pub samples: u64,
    /// The seed of the run, which determines dropout and the order of samples.
    pub seed: u64,
    /// The state of the dynamic loss scale, or `None` if the run has no dynamic loss scale.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scaler: Option<LossScalerState>,
    /// The last losses and gradient norms, if the run skips steps with loss spikes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spikes: Option<SpikeWindow>,
    /// The states of the hooks that a program has added to the `Trainer`, keyed by the name of the hook.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hooks: BTreeMap<String, serde_json::Value>,
}

impl RunState {
    /// Reads the run state from a checkpoint.
    ///
    /// # Errors
    ///
    /// [`StateError::InvalidRunState`] if the checkpoint has no run state, for example if it only has weights.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, StateError> {
        let state = serde_json::from_value(checkpoint.metadata().state.clone());
        state.map_err(|error| StateError::InvalidRunState {
            of: checkpoint.name(),
            reason: error.to_string(),
        })
    }
}
