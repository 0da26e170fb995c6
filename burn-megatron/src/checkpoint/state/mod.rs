//! What a run saves, and how it goes on from there.
//!
//! A rank writes boxes of the weights as they are stepped and of both moments of AdamW, each element of
//! the model once over all ranks ([`parts`]); 8-bit layers with delayed scaling have an object each, and
//! the rest is a [`RunState`]. A rank reads the boxes that it steps, and gathers what it computes with
//! from those that step it.

mod check;
mod error;
mod parts;
mod read;
mod snapshot;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use super::{Checkpoint, TensorSource};
use crate::optim::{LossScalerState, StepCount};

pub(crate) use check::{Names, Wanted, agree, check};
pub use error::StateError;
pub use parts::{Part, parts};
pub(crate) use read::Reader;
pub(crate) use snapshot::Snapshot;

/// Before the path of a weight, in the key of its tensor.
pub const MODEL: &str = "model/";

/// Before the path of a weight, in the key of its first moment.
pub const FIRST: &str = "adamw.first/";

/// Before the path of a weight, in the key of its second moment.
pub const SECOND: &str = "adamw.second/";

/// Before the path of a layer in 8 bits, in the key of the object with its scales.
pub const FP8: &str = "fp8/";

/// What a run remembers beside tensors and 8-bit scales.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunState {
    /// The steps so far. Those that were taken are those of the optimizer, and the place in the learning
    /// rate's schedule.
    pub count: StepCount,
    /// The samples that were trained on, those of skipped steps among them; the next step begins with
    /// the sample of this number.
    pub samples: u64,
    /// The seed of the run, from which dropout and the order of the samples follow.
    pub seed: u64,
    /// The dynamic loss scale, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scaler: Option<LossScalerState>,
}

impl RunState {
    /// That of the run which saved a checkpoint.
    ///
    /// # Errors
    ///
    /// [`StateError::Run`] where there is none, as in a checkpoint of weights alone.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, StateError> {
        let state = serde_json::from_value(checkpoint.about().state.clone());
        state.map_err(|error| StateError::Run {
            of: checkpoint.name(),
            reason: error.to_string(),
        })
    }
}
