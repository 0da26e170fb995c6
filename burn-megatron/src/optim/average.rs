//! The exponential moving average (EMA) of the weights.

use burn::module::Module;
use burn::tensor::{DType, FloatDType, Tensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::state::StateKind;
use crate::collective::to_host;
use crate::data_parallel::{DistributedDataParallel, MemoryCategory, TrackedAllocation};

/// The prefix of the keys under which checkpoints store averages. The path of the weight follows the prefix.
pub const EMA: &str = "ema/";

/// Settings of the exponential moving average (EMA) of the weights. After each step that is not skipped, the average is
/// `e = decay e + (1 - decay) w`. The average starts with the initial weights. It is sharded like the master weights
/// and has the same dtype.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EmaConfig {
    /// The decay factor: the weight of the previous average in the new average.
    pub decay: f64,
    /// Whether the evaluation on held-out text uses the averaged weights.
    pub evaluate: bool,
}

impl Default for EmaConfig {
    fn default() -> Self {
        Self {
            decay: 0.999,
            evaluate: true,
        }
    }
}

/// The exponential moving averages of this rank's shards of the master weights.
pub struct WeightAverage {
    decay: f64,
    buckets: Vec<Tensor<1>>,
    _allocations: Vec<TrackedAllocation>,
}

impl WeightAverage {
    /// Creates an average that starts with the current weights.
    pub fn new<M: Module>(config: &EmaConfig, ddp: &DistributedDataParallel<M>) -> Self {
        let buckets = copies(ddp);
        let track = |of| ddp.usage().track_tensor(MemoryCategory::Optimizer, of);
        Self {
            decay: config.decay,
            _allocations: buckets.iter().map(track).collect(),
            buckets,
        }
    }

    /// Restarts the average with the current weights.
    pub fn reset<M: Module>(&mut self, ddp: &DistributedDataParallel<M>) {
        self.buckets = copies(ddp);
    }

    /// Updates the average with the weights after a step. `taken` is a tensor that is 1 if the step was taken,
    /// otherwise 0. Pass `None` if the step is known to be taken.
    pub fn update<M: Module>(
        &mut self,
        taken: Option<&Tensor<1>>,
        ddp: &DistributedDataParallel<M>,
    ) {
        for (number, average) in self.buckets.iter_mut().enumerate() {
            let mut change = ddp.master_shard(number) - average.clone();
            change = change.mul_scalar(1.0 - self.decay);
            if let Some(taken) = taken {
                // A shard may be on the host.
                let taken = if taken.device() == change.device() {
                    taken.clone()
                } else {
                    to_host(taken.clone())
                };
                change = change.clone() * taken.cast(FloatDType::from(change.dtype()));
            }
            *average = average.clone() + change;
        }
    }

    /// Returns the averages of this rank's shards of the master weights, in the order of the buckets.
    pub fn buckets(&self) -> &[Tensor<1>] {
        &self.buckets
    }

    /// Returns the [`StateKind`] with which checkpoints store the averages.
    pub fn kind(masters: &[DType]) -> StateKind {
        StateKind::of_all(EMA, masters.to_vec())
    }

    /// Replaces the average of this rank's shard of a bucket. `bucket` is the number of the bucket.
    pub fn restore(&mut self, bucket: usize, average: Tensor<1>) {
        self.buckets[bucket] = average;
    }
}

/// Copies the master weights. A step changes master weights in place only if nothing else shares their memory.
fn copies<M: Module>(ddp: &DistributedDataParallel<M>) -> Vec<Tensor<1>> {
    let copy = |number| ddp.master_shard(number).mul_scalar(1.0);
    (0..ddp.shards().len()).map(copy).collect()
}
